"""What a command says, read as a shell would read it, as far as that can be told without being one.

For hints only (traps.py): what cannot be read gives no step, and nothing is decided by what is found here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

SHELLS = frozenset(("sh", "bash", "dash", "ash", "zsh", "ksh", "fish"))
# Programs that only start another one, and words of the shell that may stand before a command.
_WRAPPERS = frozenset(("env", "exec", "nohup", "timeout", "nice", "ionice", "stdbuf", "time", "numactl", "taskset"))
_KEYWORDS = frozenset(("then", "do", "else", "if", "while", "until", "{", "!", "done", "fi", "esac", "}"))
# What stands between a wrapper and its command: options, and the numbers of timeout, nice and taskset.
_OF_A_WRAPPER = r"-.*|[\d.,-]+[smhd]?|0x[0-9a-f]+"
_COMMENT = r"(?:^|(?<=\s))#[^\n]*"
_OPERATORS = frozenset("();|&\n")
# What a person types is shorter. A command may have 512 KiB, and a daemon reads it after every exit.
_WORDS_MAX = 500
_SCRIPT_CHARACTERS_MAX = 4096
_CHARACTERS_MAX = 16_384


class Step(NamedTuple):
    """One command of a line."""

    words: tuple[str, ...]
    """From its program on: without `exec`, `nohup`, `FOO=1` and the like before it, and without redirections."""
    before: tuple[str, ...]
    """What was left out before its program."""
    then: str
    """The operator behind it: `&`, `&&`, `||`, `|`, else `;` (also at the end of a line)."""

    @property
    def program(self) -> str:
        return base_name(self.words[0]) if self.words else ""


class Line(NamedTuple):
    """A command as a whole. Without a shell it is one step."""

    shell: str
    """`sh`, `bash`, …: it reads the script; empty where the program is started as it is."""
    is_interactive: bool
    is_login: bool
    script: str
    steps: tuple[Step, ...]

    @property
    def words(self) -> list[str]:
        return [word for step in self.steps for word in (*step.before, *step.words)]


def read(argv: Sequence[str]) -> Line:
    """`sh -c SCRIPT` (also behind `env`, `timeout 5` and the like) step by step; anything else as one step."""
    if sum(len(word) for word in argv[:_WORDS_MAX]) > _CHARACTERS_MAX:
        # The daemon reads every command that ends, and nobody typed this one.
        return Line(shell="", is_interactive=False, is_login=False, script="", steps=())
    before, words = _unwrapped(argv[:_WORDS_MAX])
    shell = base_name(words[0]) if words and base_name(words[0]) in SHELLS else ""
    options, script = _options_and_script(words) if shell else ([], None)
    if script is None:
        steps = (Step(words=words, before=before, then=";"),)
        return Line(shell=shell, is_interactive=False, is_login=False, script="", steps=steps)
    letters = "".join(option for option in options if not option.startswith("--"))
    return Line(
        shell=shell,
        is_interactive="i" in letters,
        is_login="l" in letters or "--login" in options,
        script=script,
        steps=_steps(script),
    )


def base_name(path: str) -> str:
    """`/bin/sh` and `-sh` (a login shell calls itself so) are sh."""
    return path.rsplit("/", 1)[-1].lstrip("-")


def is_assignment(word: str) -> bool:
    """`FOO=1`."""
    name, separator, _ = word.partition("=")
    return bool(separator) and name.isidentifier()


def _options_and_script(words: Sequence[str]) -> tuple[list[str], str | None]:
    options: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith(("-", "+")):
            return options, None  # a script in a file
        options.append(word)
        if not word.startswith("--") and "c" in word:
            return options, next(rest, None)
        if word in ("-o", "+o", "-O", "+O"):
            next(rest, None)
    return options, None


def _unwrapped(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What stands before the program, and from the program on."""
    at, is_wrapped = 0, False
    while at < len(words):
        word = words[at]
        if base_name(word) in _WRAPPERS:
            is_wrapped = True
        elif not (word in _KEYWORDS or is_assignment(word) or (is_wrapped and re.fullmatch(_OF_A_WRAPPER, word))):
            break
        at += 1
    return tuple(words[:at]), tuple(words[at:])


def _steps(script: str) -> tuple[Step, ...]:
    if len(script) > _SCRIPT_CHARACTERS_MAX:
        return ()
    import shlex  # only for who writes a shell line

    lexer = shlex.shlex(
        re.sub(_COMMENT, "", script.replace("\\\n", " ")), posix=True, punctuation_chars="".join(_OPERATORS) + "<>"
    )
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        return ()  # an open quotation mark: the shell will say so
    steps: list[Step] = []
    words: list[str] = []
    is_target = False
    for token in [*tokens, ";"]:
        operator = _operator(token)
        if operator:
            before, own = _unwrapped(words)
            if own or before:
                steps.append(Step(words=own, before=before, then=operator))
            words, is_target = [], False
        elif token[0] in "<>&" and set(token) <= set("<>&|"):
            is_target = True  # the next word is a file, or a descriptor
            if words and words[-1] in ("1", "2"):
                words.pop()
        elif is_target:
            is_target = False
        else:
            words.append(token)
    return tuple(steps)


def _operator(token: str) -> str:
    """The first operator in a run of punctuation; empty for words and redirections."""
    if not set(token) <= _OPERATORS:
        return ""
    for operator in ("&&", "||", "&", "|"):
        if token.lstrip(")\n ").startswith(operator):
            return operator
    return ";"
