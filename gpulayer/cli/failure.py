"""How errors end: text on stderr (what happened, and a hint what to do) and an exit code. The only place that does
either.

Exit codes: 0 done; 1 failed; 2 the words were wrong; 3 no daemon answers; 4 no such thing; 5 refused; 124 waited long
enough; 130 interrupted; 141 nobody reads the output any more. In a batch that stays attached, 125 stands for 1 to 5,
because those belong to the job.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from gpulayer.cli.words import is_attached_batch, with_globals_last
from gpulayer.model.errors import (
    GpulayerError,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Refused,
    Unreachable,
    WaitTimeout,
)

if TYPE_CHECKING:
    from cyclopts import CycloptsError

FAILED = 1
WORDS_WRONG = 2
NO_DAEMON = 3
NOT_FOUND = 4
REFUSED = 5
WAITED = 124
NOT_THE_JOBS_OWN = 125
INTERRUPTED = 128 + 2
OUTPUT_CLOSED = 128 + 13
"""What a shell reports for SIGPIPE, which is how other programs end here."""

# --mem is near to --memory (0.67), --gres not to --restart (0.55): as difflib counts.
_NEAR = 0.6

_OUTPUT_REFUSED = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))

_CODES: tuple[tuple[type[GpulayerError], int], ...] = (
    (InvalidRequest, WORDS_WRONG),
    (Unreachable, NO_DAEMON),
    (NotFound, NOT_FOUND),
    (Refused, REFUSED),
    (PermissionDenied, REFUSED),
    (WaitTimeout, WAITED),
)


class Interrupted(GpulayerError):
    """Ctrl-C while something was waited for that goes on."""

    default_code = "interrupted"


class SubmitFailed(Exception):
    """Carries an error of `submit` out to here, with what the words alone do not say when there is a file."""

    def __init__(self, error: GpulayerError, *, is_attached_batch: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_attached_batch = is_attached_batch


def guarded(words: Sequence[str], command: Callable[[], int]) -> int:
    """The exit code of `command`; what it raises is told on stderr."""
    try:
        # A name that is no UTF-8 must not end the command that shows it.
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        code = command()
        sys.stdout.flush()
        return code
    except GpulayerError as error:
        return _tell(error, is_attached_batch(words))
    except SubmitFailed as carried:
        return _tell(carried.error, carried.is_attached_batch)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_up(sys.stdout)
        return OUTPUT_CLOSED
    except OSError as error:
        # All else that reads or writes says itself what it could not do.
        if error.errno not in _OUTPUT_REFUSED:
            raise
        _give_up(sys.stdout)
        return _tell(GpulayerError(f"cannot write the output: {error.strerror}"), is_attached_batch(words))
    except Exception as error:
        # Named only here, because importing it costs more than some commands take in all.
        from cyclopts import CycloptsError

        if not isinstance(error, CycloptsError):
            raise
        return _tell(_as_invalid(error, words), is_attached_batch(words))


def _give_up(stream: TextIO) -> None:
    """Python flushes it once more at its end, and would complain about it then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell(error: GpulayerError, attached: bool) -> int:
    sys.stdout.flush()
    try:
        print(f"gpulayer: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
    except OSError:
        _give_up(sys.stderr)  # the exit code says it
    if isinstance(error, Interrupted):
        return INTERRUPTED
    code = next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
    return NOT_THE_JOBS_OWN if attached and code <= REFUSED else code


def _as_invalid(error: CycloptsError, words: Sequence[str]) -> InvalidRequest:
    """cyclopts says what was wrong and the nearest right word in one sentence; here they are message and hint."""
    message, _, nearest = " ".join(str(error).split()).partition(" Did you mean ")
    nearest, _, _ = nearest.partition(" Available commands")
    message, _, _ = message.partition(" Available commands: ")
    command = " ".join(["gpulayer", *(getattr(error, "command_chain", None) or ())])
    if command == "gpulayer submit" and any(word.partition("=")[0] == "--port" for word in words):
        return InvalidRequest(
            "submit has no option --port", hint="gpulayer chooses the port and sets $PORT; drop --port"
        )
    nearest = nearest.strip(" ?.").strip(chr(34))
    if message.startswith("Unknown command"):
        from gpulayer.cli.app import command_meant, command_names

        meant = command_meant(with_globals_last(words))
        listed = f"commands: {', '.join(command_names(words))}"
        hint = f"did you mean gpulayer {meant}?" if meant else f"did you mean {nearest}?" if nearest else listed
    elif nearest and _is_near(message, nearest):
        hint = f"did you mean {nearest}?"
    elif "--wait requires an argument" in message:
        hint = "say how long, e.g. --wait 30s"
    else:
        hint = f"see {command} --help"
    return InvalidRequest(message.rstrip("."), hint=hint)


def _is_near(message: str, nearest: str) -> bool:
    """Of options, cyclopts compares the hyphens, too, and finds --start-timeout near to --partition."""
    if not message.startswith("Unknown option: --"):
        return True
    import difflib

    word = message.removeprefix("Unknown option: --").strip(" .")
    return bool(difflib.get_close_matches(word, [nearest.removeprefix("--")], cutoff=_NEAR))
