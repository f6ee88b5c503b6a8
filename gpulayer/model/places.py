"""Where a daemon keeps its things, as far as its clients must know too.

No I/O: the caller hands in who and which environment.
"""

from __future__ import annotations

from collections.abc import Mapping

SOCKET_NAME = "gpulayer.sock"
API_PORT = 7450
PEER_PORT = 7451
CONFIG_PATH = "/etc/gpulayer/gpulayer.toml"


def default_data_dir(environ: Mapping[str, str], uid: int) -> str:
    """`$GPULAYER_DATA_DIR`, else /var/lib/gpulayer for root, else the user's state directory (XDG)."""
    named = environ.get("GPULAYER_DATA_DIR")
    if named:
        return named
    if uid == 0:
        return "/var/lib/gpulayer"
    state_home = environ.get("XDG_STATE_HOME") or environ.get("HOME", "/nonexistent") + "/.local/state"
    return f"{state_home}/gpulayer"
