"""Where the command line begins: which commands there are, and which module each is in.

Starting fast is part of the product, so nothing is imported here that the command at hand does not need: commands are
named by "module:function" and imported when they are asked for, and the lists of commands are printed from these
tables, without cyclopts (75 ms) or rich.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpulayer import __version__
from gpulayer.cli import failure
from gpulayer.cli.words import with_command_marked, with_globals_last

if TYPE_CHECKING:
    from cyclopts import App

HELP = """The hosts you have become one machine: services and batch jobs, kept running, found, explained.

Start a daemon with `gpulayer up`, hand it work with `gpulayer submit`, see all of it with `gpulayer status`.
JOB is a name, an id, or an unambiguous beginning of one; JOB.2 names a replica of it."""

# name -> (module:function, one line). In the order in which people meet them.
_COMMANDS = {
    "up": ("gpulayer.cli.up:up", "Run the daemon, in the foreground."),
    "systemd": ("gpulayer.cli.systemd:systemd", "Install the systemd unit of the daemon, or print it."),
    "demo": ("gpulayer.cli.demo:demo", "A service, two replicas, one killed and restarted; cleans up after itself."),
    "status": ("gpulayer.cli.cluster:status", "The cluster on one screen."),
    "submit": ("gpulayer.cli.submit:submit", "Hand in a command: a batch, or with --service one that is kept running."),
    "events": ("gpulayer.cli.cluster:events", "The event feed: every change once, with an offset to go on from."),
    "audit": ("gpulayer.cli.audit:audit", "Compare what runs with what should; exit code 1 on any difference."),
    "login": ("gpulayer.cli.login:login", "Talk to a cluster from elsewhere: keep its CA and a token."),
    "logout": ("gpulayer.cli.login:logout", "Forget a cluster's CA and token."),
    "leave": ("gpulayer.cli.leave:leave", "Let the daemon leave and end; refused while replicas run."),
    "completion": ("gpulayer.cli.completion:completion", "Print, or install, the completion for bash, zsh or fish."),
}
_GROUPS = {
    "job": (
        "One job, or the list of them.",
        {
            "list": ("gpulayer.cli.jobs:job_list", "Jobs, newest first."),
            "status": ("gpulayer.cli.jobs:job_status", "State, endpoints and reasons, one line per replica."),
            "logs": ("gpulayer.cli.jobs:job_logs", "What its replicas wrote, and a line for each restart."),
            "endpoints": ("gpulayer.cli.jobs:job_endpoints", "host:port of each replica that is ready."),
            "events": ("gpulayer.cli.jobs:job_events", "What happened to it."),
            "explain": ("gpulayer.cli.jobs:job_explain", "Why it is where and how it is, node by node."),
            "wait": ("gpulayer.cli.jobs:job_wait", "Return when it has ended; exit code 0 if it succeeded."),
            "restart": ("gpulayer.cli.jobs:job_restart", "Replace its processes by new ones, or that of one replica."),
            "cancel": ("gpulayer.cli.jobs:job_cancel", "Stop every replica of it, or of several."),
        },
    ),
    "node": (
        "The hosts that the cluster consists of.",
        {
            "list": ("gpulayer.cli.nodes:node_list", "Nodes: alive or since when not, what is free, what is wrong."),
            "status": ("gpulayer.cli.nodes:node_status", "All that is known of one node, and what runs there."),
        },
    ),
    "resources": (
        "What there is of GPUs, CPUs, memory and disk.",
        {
            "detect": ("gpulayer.cli.resources:resources_detect", "What this machine has; asks no daemon."),
            "list": ("gpulayer.cli.resources:resources_list", "Stock over the cluster: idle and all, by model."),
        },
    ),
    "cluster": (
        "Who leads, and the keys that the cluster has.",
        {
            "status": ("gpulayer.cli.agreement:cluster_status", "Leader, voters, term and index of the log, keys."),
            "rotate-keys": (
                "gpulayer.cli.agreement:cluster_rotate_keys",
                "Replace the key that gossip is sealed with.",
            ),
        },
    ),
    "token": (
        "Tokens: for clients that do not use the daemon's socket, and for hosts that join.",
        {
            "create": ("gpulayer.cli.tokens:token_create", "Make a token and print it; it is never shown again."),
            "list": ("gpulayer.cli.tokens:token_list", "Tokens by id, role and label; never the secrets."),
            "revoke": ("gpulayer.cli.tokens:token_revoke", "Refuse a token from now on."),
        },
    ),
}
# What people are used to from other programs.
_ELSEWHERE = {"stop": "cancel", "kill": "cancel", "delete": "cancel", "rm": "cancel", "ls": "list", "ps": "list"}
_HELP_FLAGS = ("--help", "-h")


def make_app() -> App:
    """The command tree. Making it imports no command."""
    from cyclopts import App, Parameter

    from gpulayer.cli.help import Pages

    app = App(
        name="gpulayer",
        help=HELP,
        version=__version__,
        help_format="plaintext",
        help_formatter=Pages(),
        # A flag is given or left out; --no-X for each would only be more words to read.
        default_parameter=Parameter(negative=(), show_default=False),
        result_action="return_value",
    )
    for name, (where, _) in _COMMANDS.items():
        app.command(where, name=name)
    for name, (line, commands) in _GROUPS.items():
        group = App(name=name, help=line)
        for child, (where, _) in commands.items():
            group.command(where, name=child)
        app.command(group)
    return app


def __getattr__(name: str) -> object:
    """`app`, for tools that look for it by this name; made when asked for."""
    if name == "app":
        return make_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `words` are the arguments without the program's name.

    As the program itself (`words` left out) it ends the process, unless that was the daemon.
    """
    _occupy_standard_descriptors()
    given = _as_options(list(sys.argv[1:] if words is None else words))
    code = failure.guarded(given, lambda: _run(given))
    if words is None and given[:1] != ["up"]:
        # All is written by now. Taking down the interpreter in good order would be a tenth of what a command takes.
        sys.stderr.flush()
        os._exit(code)
    return code


def _occupy_standard_descriptors() -> None:
    """0, 1 and 2, where whoever started us closed them: the first file that we open would become stderr."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free one, which is this
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))


def _run(words: list[str]) -> int:
    # Nothing of what is imported from here to the command is ever garbage, and looking for some takes a tenth of the
    # time. On again where a command begins to work: connection.py, up.py, demo.py.
    gc.disable()
    page = _page_without_cyclopts(words)
    if page is not None:
        print(page)
        return 0
    tokens = with_command_marked(with_globals_last(words))
    code = make_app()(tokens, exit_on_error=False, print_error=False)
    return code if isinstance(code, int) else 0


def _as_options(words: list[str]) -> list[str]:
    """`gpulayer help [COMMAND]` and `gpulayer version`, as people try them."""
    if words[:1] == ["help"]:
        return [*words[1:], "--help"]
    return ["--version"] if words == ["version"] else words


def command_names(words: Sequence[str]) -> list[str]:
    """What could be written where the command is: after `gpulayer`, or after the group that `words` begins with."""
    group = next((word for word in words if word in _GROUPS), None) if len(words) > 1 else None
    return list(_GROUPS[group][1]) if group is not None else [*_COMMANDS, *_GROUPS]


def command_meant(words: Sequence[str]) -> str:
    """`job logs` for `gpulayer logs web`, `job cancel` for `gpulayer job stop web`; empty where nothing is near."""
    group, word = words[:2] if len(words) > 1 and words[0] in _GROUPS else ("", words[0] if words else "")
    for name, (_, commands) in _GROUPS.items():
        for meant in (word, _ELSEWHERE.get(word)):
            if meant in commands and group in ("", name):
                return f"{name} {meant}"
    return ""


def _page_without_cyclopts(words: list[str]) -> str | None:
    """What `gpulayer --version`, `gpulayer --help` and `gpulayer job --help` print."""
    if words == ["--version"]:
        return __version__
    asked = [word for word in words if word not in _HELP_FLAGS]
    if len(words) > 2 or len(asked) > 1 or (asked and (words[0] not in _GROUPS)):
        return None
    from gpulayer.cli.help import group_page

    if asked:
        line, commands = _GROUPS[asked[0]]
        rows = {name: words for name, (_, words) in commands.items()}
        return group_page(f"gpulayer {asked[0]} COMMAND", line, {"Commands": rows})
    rows = {name: line for name, (_, line) in _COMMANDS.items()}
    rows |= {f"{group} {name}": words for group, (_, made) in _GROUPS.items() for name, (_, words) in made.items()}
    options = {"--help, -h": "This page, or that of a command: gpulayer submit --help.", "--version": "The version."}
    return group_page("gpulayer COMMAND", HELP, {"Commands": rows, "Options": options})
