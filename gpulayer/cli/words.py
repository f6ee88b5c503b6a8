"""The words of a command line before they are parsed: two rules that a parser of options does not know.

`gpulayer --url U job list` means `gpulayer job list --url U`; and after `submit`, the first word that is no option
begins the command, which nobody may read as options of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

GLOBALS = ("--url", "--token", "--data-dir")
# As in app.py, which a test holds this against.
GROUPS = ("job", "node", "resources", "cluster", "token")

# Options of submit that take no value; all others take one. A test holds this against submit's own signature.
SUBMIT_FLAGS = frozenset(
    ("--service", "--no-port", "--detach", "--dry-run", "--json", "--help", "-h", "--version"),
)


def with_globals_last(words: Sequence[str]) -> list[str]:
    """Options that say which daemon, given before the command, moved behind the words that name it."""
    moved: list[str] = []
    rest = list(words)
    while rest:
        if rest[0] in GLOBALS and len(rest) > 1:
            moved += rest[:2]
            del rest[:2]
        elif rest[0].startswith(tuple(name + "=" for name in GLOBALS)):
            moved.append(rest.pop(0))
        else:
            break
    is_nested = len(rest) > 1 and rest[0] in GROUPS and not rest[1].startswith("-")
    named = 2 if is_nested else min(1, len(rest))
    return rest[:named] + moved + rest[named:]


def with_command_marked(words: Sequence[str]) -> list[str]:
    """For submit: `--` put before the command, where it was left out."""
    if not words or words[0] != "submit":
        return list(words)
    place = command_place(words)
    if place == len(words) or words[place] == "--":
        return list(words)
    return [*words[:place], "--", *words[place:]]


def command_place(words: Sequence[str]) -> int:
    """Where in `submit …` the options end: the index of `--`, or of the command's first word, or the length."""
    place = 1
    while place < len(words):
        word = words[place]
        if word == "--" or not word.startswith("-") or word == "-":
            return place
        place += 1 if word in SUBMIT_FLAGS or "=" in word else 2
    return len(words)


def is_attached_batch(words: Sequence[str]) -> bool:
    """Whether this submits a batch and stays: then exit codes below 125 belong to the job (as in `docker run`).

    As far as the words say; a file may say that it is a service.
    """
    options = with_globals_last(words)
    if not options or options[0] != "submit":
        return False
    own = options[1 : command_place(options)]
    return not {"--service", "--detach", "--dry-run", "--help", "-h", "--version"} & {
        word.partition("=")[0] for word in own
    }
