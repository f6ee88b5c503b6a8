"""The options that say which daemon is asked, and as whom; every command that asks one has them."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

if TYPE_CHECKING:
    from gpulayer.client.sync import Client

_GROUP = Group("Which daemon", sort_key=100)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True)
class Connection:
    """Left out, all three: $GPULAYER_URL, else the unix socket of this user's daemon, else the cluster that this user
    is logged in to."""

    url: Annotated[
        str | None,
        Parameter(help="https://HOST:7450, http://127.0.0.1:7450 or unix:///path/gpulayer.sock ($GPULAYER_URL)."),
    ] = None
    token: Annotated[str | None, Parameter(help="API token, for http and https ($GPULAYER_TOKEN).")] = None
    data_dir: Annotated[
        str | None, Parameter(help="Data directory of the daemon on this host ($GPULAYER_DATA_DIR).")
    ] = None

    def names_a_daemon(self) -> bool:
        """Whether one is named by a URL, or has made its socket where this user's daemon has it."""
        from gpulayer.client.address import UnixSocket, find_address

        address = find_address(self.url, self.data_dir, os.environ)
        if not isinstance(address, UnixSocket) or self.url or (os.environ.get("GPULAYER_URL") and not self.data_dir):
            return True
        try:
            os.stat(address.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            pass  # it is not for us to see: whoever asks there hears why
        return True

    def starting_daemon(self) -> int | None:
        """The process of a daemon that has this user's data directory; its socket comes a moment later."""
        from gpulayer.client.address import UnixSocket, find_address

        address = find_address(self.url, self.data_dir, os.environ)
        if not isinstance(address, UnixSocket) or self.url:
            return None
        lock = os.path.join(os.path.dirname(address.path), "lock")
        try:
            with open(lock) as file:
                pid = int(file.read(32))
            # What stands there may be of yesterday. To try the lock could keep a daemon from getting it.
            held = [os.path.join(f"/proc/{pid}/fd", name) for name in os.listdir(f"/proc/{pid}/fd")]
            return pid if any(os.path.realpath(path) == os.path.realpath(lock) for path in held) else None
        except (OSError, ValueError):
            return None

    def client(self, *, meanwhile: str = "the job runs on; Ctrl-C leaves it") -> Client:
        """`meanwhile`: what is said of what is followed while no daemon answers."""
        from gpulayer.cli.render import note
        from gpulayer.client.stream import Absence
        from gpulayer.client.sync import connect

        def tell(is_away: bool) -> None:
            if is_away:
                note(f"no daemon answers; waiting for it to come back ({meanwhile})")
            else:
                note("the daemon is back")

        gc.enable()
        client = connect(self.url, self.token, self.data_dir)
        client.absence = Absence(tell)
        return client


LOCAL = Connection()
