"""One request and its answer, as both clients know it: headers, bounds, and the words for what goes wrong.

Sends nothing: transport.py does it with http.client, aio_transport.py with httpx.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpulayer.client.address import Address, Loopback, Secure, UnixSocket
from gpulayer.model.errors import GpulayerError, InvalidRequest, PermissionDenied, Unreachable
from gpulayer.model.places import API_PORT, SOCKET_NAME

CONNECT_SECONDS_MAX = 5.0
# The daemon commits a write within milliseconds; half a minute covers a disk that stalls.
ANSWER_SECONDS_MAX = 30.0
# Whether a daemon serves is asked by those who would rather hear no than wait.
READY_SECONDS_MAX = 5.0
# The largest answer is a page of 1,000 jobs, about 400 bytes each; a status of 10,000 replicas is some 10 MB.
ANSWER_BYTES_MAX = 64 * 2**20
# sun_path holds 108 bytes, the last of them NUL (unix(7)).
_SOCKET_PATH_BYTES_MAX = 107


class NoAnswer(Unreachable):
    """The daemon was reached, and then did not answer: what was asked for may have happened, or not."""


def request_headers(address: Address, token: str | None) -> dict[str, str]:
    """What every request to that daemon carries."""
    host = "localhost" if isinstance(address, UnixSocket) else str(address).partition("://")[2]
    headers = {"Accept": "application/json", "Host": host}
    if token and not isinstance(address, UnixSocket):
        # The socket needs no token: whoever may open it is the admin.
        headers["Authorization"] = f"Bearer {_checked_token(token)}"
    return headers


def encoded(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def document_in(content: bytes, address: Address) -> Any:
    """The document that is answered, None where there is none."""
    if not content:
        return None
    try:
        return json.loads(content)
    except ValueError as error:
        raise _no_daemon(address, repr(content[:40])) from error


@contextmanager
def understanding(address: Address) -> Iterator[None]:
    """While a document is read: JSON that is none of ours was said by something else."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _no_daemon(address, f"{error!r:.80}") from error


def _no_daemon(address: Address, why: str) -> GpulayerError:
    return GpulayerError(f"what answers at {address} is not a gpulayer daemon ({why})", hint="check --url")


def error_in(content: bytes, status: int) -> GpulayerError:
    """What an answer of 400 and more says went wrong."""
    # Only here, so that what goes well does not pay for the model.
    from gpulayer.wire.http import error_from_json

    try:
        document = json.loads(content)
    except ValueError:
        document = None
    error = error_from_json(document, status)
    if status == 401:
        # The node speaks of headers; people do not write those.
        error.hint = (
            "give --token or set GPULAYER_TOKEN, or log in anew (gpulayer login URL); "
            "gpulayer token create, on the node itself, makes one"
        )
    return error


def no_answer(address: Address, *, in_time: bool) -> NoAnswer:
    """`in_time`: the connection ended, before the time for an answer was over."""
    what = "went away before it had answered" if in_time else "did not answer in time"
    return NoAnswer(f"the daemon at {address} {what}", hint="see its log; gpulayer status says whether it is back")


def not_connected(address: Address, error: OSError) -> GpulayerError:
    """Nothing was sent."""
    if isinstance(error, PermissionError):
        return PermissionDenied(
            f"the daemon's socket {address} belongs to another user",
            hint="run this as that user (sudo), or use --url http://127.0.0.1:7450 with --token",
        )
    # Not its own words: asyncio has others than the kernel.
    why = os.strerror(error.errno) if error.errno else str(error)
    return Unreachable(f"no daemon answers at {address} ({why})", hint=start_hint(address))


def start_hint(address: Address) -> str:
    """What to do where no daemon answers: mostly the command that starts the one which was looked for."""
    match address:
        case UnixSocket(path=path) if os.path.basename(path) == SOCKET_NAME:
            directory = os.path.dirname(path)
            is_default = directory in ("/var/lib/gpulayer", os.path.expanduser("~/.local/state/gpulayer"))
            command = "gpulayer up" if is_default else f"gpulayer up --data-dir {directory}"
            elsewhere = "; a cluster elsewhere: gpulayer login https://HOST:7450" if is_default else ""
            return f"start it with: {command}; one that was just started answers in a second{elsewhere}"
        case Secure():
            return "is a daemon running there, with --bind, and is its port open to this host?"
        case Loopback(port=port) if port != API_PORT:
            return f"check the port in the URL: a daemon listens on {API_PORT}, or on what its --api-port says"
        case _:
            return "start it with: gpulayer up"


@contextmanager
def connectable(path: str) -> Iterator[str]:
    """A name for the socket that fits into the kernel's structure; good while the block lasts."""
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES_MAX:
        yield path
        return
    # A longer path does not fit; a path through the open directory always does.
    directory = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


def _checked_token(token: str) -> str:
    cleaned = token.strip() if isinstance(token, str) else ""
    if not cleaned or not cleaned.isascii() or not cleaned.isprintable() or " " in cleaned:
        raise InvalidRequest("token: it is not a token", hint="it is one word that begins with gpl_")
    return cleaned
