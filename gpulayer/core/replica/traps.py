"""What users of services trip over when they write a command, and what to write instead. docs/services.md has the list.

Pure: from the words of a command, how its run ended, or which of its processes are alive, to a sentence for the place
where the user looks: a note at submit (cli/submit.py), the hint of a reason (reasons.py), what a check of the port
found (runtime/listeners.py). Refuses nothing. A trap is named only where the words leave little doubt: a false alarm
costs more than a missing hint, since people stop reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from gpulayer.core.replica.shell_line import SHELLS, Line, Step, base_name, is_assignment, read
from gpulayer.model.job import JobSpec

if TYPE_CHECKING:
    # The command line, which starts for every submit, does not wait for its import.
    from gpulayer.model.replica import Exit


# Tuples, as in shell_line.py: a dataclass takes half a millisecond to make, and every submit would wait for four.
class Trap(NamedTuple):
    what: str
    """What happens, or has happened."""
    instead: str
    """What to write instead."""

    def __str__(self) -> str:
        return f"{self.what}; {self.instead}"


class _Case(NamedTuple):
    spec: JobSpec
    line: Line
    code: int = 0
    """The exit code, after the end of a run."""

    @property
    def argv(self) -> tuple[str, ...]:
        return self.spec.argv

    @property
    def is_service(self) -> bool:
        return self.spec.kind == "service"

    @property
    def wants_port(self) -> bool:
        return self.is_service and self.spec.port


_Row = Callable[[_Case], Trap | None]


def at_submit(spec: JobSpec) -> tuple[Trap, ...]:
    """What can be said of a command before it runs, by its words alone."""
    return tuple(_found(_AT_SUBMIT, spec, 0))


def after_exit(spec: JobSpec, exit: Exit) -> Trap | None:
    """What most likely made a run end as it did. Not of a run that gpulayer ended, or a signal."""
    if exit.ended_by != "itself" or exit.code is None:
        return None
    if exit.code:
        return next(_found(_AFTER_FAILURE, spec, exit.code), None) or _NOT_FOUND.get(exit.code)
    # A batch may well start something elsewhere, and end; one that left processes behind may not.
    is_odd = spec.kind == "service" or exit.left_background > 0
    return next(_found(_AFTER_SUCCESS, spec, 0), None) if is_odd else None


def _found(rows: Iterable[_Row], spec: JobSpec, code: int) -> Iterator[Trap]:
    case = _Case(spec=spec, line=read(spec.argv), code=code)
    return (trap for row in rows if (trap := row(case)) is not None)


# --- words that no shell reads ------------------------------------------------------------------------------------

# Patterns are text here: `re` keeps what it has compiled, and a submit waits only for those that it needs.
_VARIABLE = r"\$\{?(PORT|HOST|HOME|PWD|USER|CUDA_VISIBLE_DEVICES|GPULAYER_[A-Z_]+)\b\}?"
# A word of a program's own language (awk, perl, python -c) has blanks, quotes or brackets.
_PLAIN_WORD = r"[-\w./:=@,+{}$~%]*"
_OPERATORS = frozenset(("&&", "||", "|", "&", "<", ">", ">>", "2>", "2>&1", "&>", "1>", ">/dev/null", "2>/dev/null"))
# Their own words may look like a shell's, or are for a shell elsewhere.
_WITH_PATTERNS = frozenset(("grep", "egrep", "fgrep", "rg", "sed", "awk"))
_WITH_OPERATORS = _WITH_PATTERNS | {"expr", "test", "[", "find", "ssh", "tmux", "jq"}
_WITH_VARIABLES = _WITH_PATTERNS | {"envsubst", "ssh", "make"}
_BUILTINS = frozenset(("cd", "source", ".", "export", "set", "unset", "alias", "ulimit", "umask", "eval", "trap"))
_NO_SHELL = "no shell reads the command, so"


def _no_program(case: _Case) -> Trap | None:
    word = case.argv[0]
    if any(map(str.isspace, word)) and "/" not in [*word.split(), ""][0]:
        return Trap(
            what=f"{word!r} is one word, and no program is called so",
            instead="write the words without quotes around them all, or sh -c '…' to have a shell read them",
        )
    if is_assignment(word):
        return Trap(
            what=f"{word} is no program: {_NO_SHELL} nothing sets a variable",
            instead=f"write --env {word} before the --",
        )
    if word in _BUILTINS:
        instead = "write --workdir DIR" if word == "cd" else "write sh -c '…'"
        return Trap(what=f"`{word}` is a word of the shell and no program", instead=f"{instead} instead")
    return None


def _not_expanded(case: _Case) -> Trap | None:
    """`$PORT`, `&&` and the like given to a program as they are."""
    if case.line.shell or any(base_name(word) in SHELLS for word in case.argv):
        return None
    program = base_name(case.argv[0])
    for word in case.argv[1:]:
        is_plain = "$" in word and program not in _WITH_VARIABLES and re.fullmatch(_PLAIN_WORD, word)
        variable = re.search(_VARIABLE, word) if is_plain else None
        if variable is not None:
            return Trap(what=f"{_NO_SHELL} {program} gets {variable[0]} as it is written", instead=_in_a_shell(case))
        if word in _OPERATORS and program not in _WITH_OPERATORS:
            # In a shell it would be the next trap.
            instead = "leave it out" if word == "&" else _in_a_shell(case)
            return Trap(what=f"{_NO_SHELL} {program} gets {word} as an argument", instead=instead)
        if word.startswith("~/") or "=~/" in word:
            return Trap(what=f"{_NO_SHELL} {program} gets the ~ of {word} as it is", instead="write the whole path")
    return None


def _in_a_shell(case: _Case) -> str:
    is_plain = all(word in _OPERATORS or re.fullmatch(_PLAIN_WORD, word) for word in case.argv)
    is_one = _OPERATORS.isdisjoint(case.argv)
    line = ("exec " if is_one else "") + " ".join(case.argv)
    return f"write sh -c '{line}'" if is_plain and len(line) <= 100 else "write sh -c '…' around it, in single quotes"


_PORT_OPTION = r"--?(?!no-|auto-|random-)(?:[\w-]+[.-])?port"


def _emptied(case: _Case) -> Trap | None:
    """`--port $PORT` without quotes, or in double ones: the shell that submits has no $PORT, and put in nothing."""
    if not case.wants_port:
        return None
    for step in case.line.steps:
        for word, following in zip_longest(step.words[1:], step.words[2:], fillvalue=""):
            name, separator, value = word.partition("=")
            if value or not name.endswith("port") or not re.fullmatch(_PORT_OPTION, name):
                continue
            if separator or not following or following.startswith("-"):
                return Trap(
                    what=f"nothing stands behind {word}: your own shell has put its $PORT there, which is empty",
                    instead="use single quotes, as in sh -c 'exec … --port $PORT'",
                )
    return None


# --- environments -------------------------------------------------------------------------------------------------

_CONDAS = frozenset(("conda", "mamba", "micromamba"))
_PREPARED = r"conda\.sh|\bshell\S{0,40} hook"


def _conda_activate(case: _Case) -> Trap | None:
    step = _activation(case)
    if step is None:
        return None
    name = step.words[2] if len(step.words) > 2 else "NAME"
    return Trap(
        what=f"`{' '.join(step.words[:2])}` works only in a shell that `conda init` has prepared, and none is",
        instead=f"name the environment's own program by its path (…/envs/{name}/bin/python), or write "
        f"`conda run --no-capture-output -n {name} …`",
    )


def _conda_activate_at_submit(case: _Case) -> Trap | None:
    """A login shell may be prepared by /etc/profile.d, and `source activate` finds its file in the PATH: both work on
    many hosts."""
    step = _activation(case)
    is_open = case.line.is_login or (step is not None and step.program not in _CONDAS)
    return None if is_open else _conda_activate(case)


def _activation(case: _Case) -> Step | None:
    script = case.line.script
    if "activate" not in script or case.line.is_interactive or re.search(_PREPARED, script):
        return None
    activators = _CONDAS | {"source", "."}
    return next(
        (step for step in case.line.steps if step.program in activators and step.words[1:2] == ("activate",)), None
    )


def _conda_run(case: _Case) -> Trap | None:
    for step in case.line.steps:
        shows_at_once = {"--no-capture-output", "--live-stream", "-s"} & {*step.words}
        if step.program == "conda" and step.words[1:2] == ("run",) and not shows_at_once:
            return Trap(
                what="`conda run` keeps the output to itself until the end",
                instead="write `conda run --no-capture-output …`, or name the environment's program by its path",
            )
    return None


def _source_in_sh(case: _Case) -> Trap | None:
    if (
        case.code == 127
        and case.line.shell in ("sh", "dash")
        and any(step.program == "source" for step in case.line.steps)
    ):
        return Trap(
            what="`source` is a word of bash, which sh may not know",
            instead="write bash -c, or `.` for it, or name the environment's program by its path",
        )
    return None


def _sudo(case: _Case) -> Trap | None:
    for step in case.line.steps:
        keeps = any(re.fullmatch(r"-[^\WE]*E\w*|--preserve-env.*", word) for word in step.words)
        if step.program == "sudo" and not keeps:
            return Trap(
                what="sudo takes $PORT, CUDA_VISIBLE_DEVICES and the like away, and may ask for a password",
                instead="leave it out: the job runs as the daemon's user",
            )
    return None


def _own_devices(case: _Case) -> Trap | None:
    name = "CUDA_VISIBLE_DEVICES"
    in_words = (word.partition("=") for word in case.line.words if word.startswith(f"{name}="))
    for _, _, value in (*in_words, *((key, "=", value) for key, value in case.spec.env if key == name)):
        if value and "$" not in value:
            return Trap(
                what=f"{name}={value} takes the place of the devices that the replica holds, and may be another job's",
                instead="leave it out: gpulayer sets it, and the first device that a program sees is 0",
            )
    return None


# --- a run ends with its first process ----------------------------------------------------------------------------


class _Leaves(NamedTuple):
    """A program that starts another one and returns: where its words match `leaves`, and do not match `stays`."""

    programs: str
    instead: str
    leaves: str = ""
    stays: str = r"(?!)"
    may_stay: str = r"(?!)"
    """An option whose file may say that it stays. Doubted only when its run has ended."""


# Options of `docker run` whose value is known to follow, or that have none: a -d behind the image is not its own.
_OPTIONS = (
    r"(?:(?:--rm|--init|-i|-t|-it|-ti|--privileged|--\w[\w-]*=\S+|"
    r"--(?:name|gpus|network|ipc|shm-size|restart|env|volume|publish) \S+|-[epvwu] \S+) )*"
)
_DETACHED = r"(?:-[it]*d[dit]*|--detach(?:=true)?)(?!\S)"
_LEAVE: tuple[_Leaves, ...] = (
    _Leaves(
        programs="docker podman",
        leaves=rf"run {_OPTIONS}{_DETACHED}|compose up (?:.* )?{_DETACHED}",
        instead="write it without -d, and with --rm",
    ),
    _Leaves(
        programs="docker podman",
        leaves=r"start\b",
        stays=r"-[ai]+\b|--attach|--interactive",
        instead="write `docker run --rm …`",
    ),
    _Leaves(
        programs="systemctl service", leaves=r".*\b(?:re)?start\b", instead="write the program that the unit starts"
    ),
    _Leaves(programs="systemd-run", stays=r"--(?:scope|wait|pipe|pty)|-[Pt]\b", instead="write the program alone"),
    _Leaves(programs="setsid", stays=r"-w\b|--wait|-\w*w", instead="leave setsid out"),
    _Leaves(
        programs="tmux",
        leaves=r"new\S* (?:.* )?-\w?d",
        instead="write the program alone; `gpulayer job logs` has its output",
    ),
    _Leaves(
        programs="screen",
        leaves=r"(?:.* )?-d",
        instead="write the program alone; `gpulayer job logs` has its output",
    ),
    _Leaves(
        programs="nginx", stays=r"daemon off|-[tTvVs]\b", may_stay=r"-[cp]\b", instead="write nginx -g 'daemon off;'"
    ),
    _Leaves(
        programs="redis-server mongod",
        leaves=r".*(?:--daemonize yes|--fork\b)",
        instead="leave that out",
    ),
    _Leaves(programs="gunicorn", leaves=r"(?:.* )?(?:-D|--daemon)(?!\S)", instead="leave that out"),
    _Leaves(programs="uwsgi start-stop-daemon", leaves=r".*(?:--daemonize|--background)", instead="leave that out"),
    _Leaves(
        programs="supervisord",
        stays=r"-\w?n|--nodaemon",
        may_stay=r"-c\b|--configuration",
        instead="write supervisord -n",
    ),
    _Leaves(programs="httpd apache2", stays=r"-D ?FOREGROUND|-[tvVlLS]\b", instead="write httpd -DFOREGROUND"),
    _Leaves(programs="apachectl apache2ctl", leaves=r"(?:re)?start\b", instead="write httpd -DFOREGROUND"),
    _Leaves(programs="ray", leaves=r"start\b", stays=r"--block", instead="add --block"),
    _Leaves(programs="pm2", leaves=r"start\b", stays=r"--no-daemon", instead="write pm2-runtime"),
    _Leaves(programs="celery", leaves=r"multi start\b", instead="write celery worker"),
)
_ENDS_WITH_IT = "and a run ends with its first process"


def _leaves_by_its_words(case: _Case, *, has_ended: bool = True) -> Trap | None:
    """The last command of a line: what stands before it may well prepare something."""
    step = _final(case.line)
    if step is None:
        return None
    arguments = " ".join(step.words[1:])
    for row in _LEAVE:
        if step.program not in row.programs.split():
            continue
        stays = row.stays if has_ended else f"{row.stays}|{row.may_stay}"
        found = re.match(row.leaves, arguments)
        if found is not None and not re.search(rf"(?:^|\s)(?:{stays})", arguments):
            shown = f"{step.program} {found[0]}".rstrip()
            return Trap(what=f"`{shown}` returns at once, {_ENDS_WITH_IT}", instead=row.instead)
    return None


def _service_leaves(case: _Case) -> Trap | None:
    return _leaves_by_its_words(case, has_ended=False) if case.is_service else None


def _all_in_background(case: _Case) -> Trap | None:
    last = _last(case.line)
    if last is None or last.then != "&":
        return None
    return Trap(
        what=f"the & behind `{last.program}` lets the shell end at once, {_ENDS_WITH_IT}",
        instead="leave out the &, and start it with exec",
    )


def _hidden(case: _Case) -> Trap | None:
    last = _last(case.line)
    if not case.is_service or last is None or not _waits_for_ever(last.words):
        return None
    started = [step.program for step in case.line.steps if step.then == "&"]
    if not started:
        return None
    return Trap(
        what=f"nobody will notice when `{started[-1]}` ends: the shell waits for `{' '.join(last.words)}`",
        instead="start it last, without &, and with exec",
    )


def _waited_for(case: _Case) -> Trap | None:
    last = _last(case.line)
    is_in_background = any(step.then == "&" for step in case.line.steps)
    if last is None or last.words != ("wait",) or not is_in_background:
        return None
    return Trap(
        what="`wait` gives 0 however the programs before it have ended",
        instead="start the only one with exec instead of &; of several, write bash -c '… & … & wait -n'",
    )


def _in_background(case: _Case) -> Trap | None:
    """Of a run that has left processes, or ended at once: any & may be the cause."""
    started = [step.program for step in case.line.steps if step.then == "&"]
    if not started:
        return None
    return Trap(
        what=f"`{started[-1]}` was started with & in the background, {_ENDS_WITH_IT}",
        instead="start it last, without &, and with exec",
    )


def _last(line: Line) -> Step | None:
    """Of a shell's script."""
    return _final(line) if line.script else None


def _final(line: Line) -> Step | None:
    """What a run waits for: the last command of a script, or the only one."""
    return next((step for step in reversed(line.steps) if step.words), None)


def _waits_for_ever(words: Sequence[str]) -> bool:
    program, arguments = base_name(words[0]), " ".join(words[1:])
    if program == "sleep":
        return bool(re.fullmatch(r"inf(inity)?|\d+d|\d{5,}s?", arguments))
    return program == "tail" and "/dev/null" in arguments


def _ssh(case: _Case) -> Trap | None:
    step = _final(case.line)
    # With -N it starts nothing there: a tunnel.
    if not case.is_service or step is None or step.program != "ssh" or "-N" in step.words:
        return None
    return Trap(
        what="what ssh starts runs on the other host, where gpulayer neither sees nor ends it",
        instead="submit it to a daemon there",
    )


# --- the tables ---------------------------------------------------------------------------------------------------

_AT_SUBMIT: tuple[_Row, ...] = (
    _no_program,
    _not_expanded,
    _emptied,
    _conda_activate_at_submit,
    _conda_run,
    _sudo,
    _own_devices,
    _all_in_background,
    _hidden,
    _service_leaves,
    _ssh,
)
_AFTER_FAILURE: tuple[_Row, ...] = (_conda_activate, _source_in_sh, _not_expanded, _emptied, _sudo)
_AFTER_SUCCESS: tuple[_Row, ...] = (_all_in_background, _waited_for, _leaves_by_its_words, _in_background, _ssh)
# What a shell, and env, say by their exit code (POSIX, "Exit Status for Commands").
_NOT_FOUND = {
    127: Trap(
        what="127 mostly means that a program was not found",
        instead="names are looked up in the PATH of the job, which is the daemon's unless --env PATH gives yours; "
        "a script with Windows line ends asks for a program whose name ends in \\r",
    ),
    126: Trap(
        what="126 mostly means that a file is not executable", instead="chmod +x it, or name its interpreter: sh FILE"
    ),
}

# --- what is alive of a run ---------------------------------------------------------------------------------------

_IDLE = frozenset(("sleep", "tail", "cat"))


class OnlyShell(NamedTuple):
    """Of a run nothing is alive but a shell and what it waits for."""

    names: str
    """Its processes: `sh and sleep`."""
    has_background: bool
    """The shell was told to start something in the background, which has ended, then."""


def only_shell(commands: Sequence[Sequence[str]]) -> OnlyShell | None:
    """From the arguments of the living processes of a run, its first process first; None where anything else lives."""
    programs = [base_name(words[0]) if words else "" for words in commands]
    if not programs or programs[0] not in SHELLS or not set(programs) <= SHELLS | _IDLE:
        return None
    names = sorted(set(programs), key=programs.index)
    has_background = any(step.then == "&" for step in read(commands[0]).steps)
    return OnlyShell(
        names=f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0],
        has_background=has_background,
    )


def is_shell(command: Sequence[str]) -> bool:
    return bool(command) and base_name(command[0]) in SHELLS


def fixed_port(command: Sequence[str], port: int) -> Trap | None:
    """Where a command says the port that its program should have taken from $PORT."""
    words = read(command).words
    for before, word in zip(["", *words], words, strict=False):
        if re.search(rf"(?<!\d){port}(?!\d)", word):
            told = f"{before} {word}" if word == str(port) and before.startswith("-") else word
            if re.fullmatch(_PLAIN_WORD, told.replace(" ", "")):
                return Trap(
                    what=f"its command says `{told}`",
                    instead=f"write `{told.replace(str(port), '$PORT')}` there, in sh -c '…', which fills it in",
                )
    return None


# --- files --------------------------------------------------------------------------------------------------------


def paths(argv: Sequence[str]) -> Iterator[str]:
    """What a command may name in the directory that it is written in; nothing of it once it changes the directory."""
    line = read(argv)
    for step in line.steps:
        if step.program in ("cd", "pushd"):
            return
        words = step.words if step.words and "/" in step.words[0] else step.words[1:]
        for before, word in zip(("", *words), words, strict=False):
            if before == "-m":
                module = word.replace(".", "/")
                yield from (f"{module}.py", f"{module}/__main__.py")
            elif re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(?:\(\))?", word):  # uvicorn app:app
                module = word.partition(":")[0].replace(".", "/")
                yield from (f"{module}.py", f"{module}/__init__.py")
            else:
                value = word.partition("=")[2] if word.startswith("-") else word
                if value and not value.startswith("/"):
                    yield value
