"""gpulayer up: the daemon. Only reads the words; node/config.py judges them, node/daemon.py runs."""

from __future__ import annotations

import gc
import sys
from typing import Annotated, Literal

from cyclopts import Parameter

from gpulayer.cli.options import key_value

# How long a thread keeps the interpreter when others wait for it. The event loop waits several times a request for the
# threads that read logs: beside 100 readers of long ones a status takes 60 ms with Python's own 5 ms, and 9 with this.
SWITCH_SECONDS = 0.0005


def up(
    *,
    data_dir: str | None = None,
    config: str | None = None,
    bind: str | None = None,
    advertise: str | None = None,
    api_port: int | None = None,
    name: str | None = None,
    label: Annotated[tuple[str, ...], Parameter(name="--label")] = (),
    log_format: Literal["auto", "json", "text"] | None = None,
    abandon_state: bool = False,
) -> int:
    """Run the daemon of this host, in the foreground, until SIGTERM or Ctrl-C; replicas go on without it.

    Flags win over $GPULAYER_* and those over the configuration file.

    Parameters
    ----------
    data_dir
        Where it keeps everything (default /var/lib/gpulayer as root, else ~/.local/state/gpulayer).
    config
        Configuration file (default /etc/gpulayer/gpulayer.toml, if it is there).
    bind
        Address to listen on, loopback only in this version (default 127.0.0.1).
    advertise
        Address that endpoints carry (default: that of --bind).
    api_port
        Port of the HTTP API on that address, 0 for any that is free (default 7450).
    name
        Name of this node (default: the host's).
    label
        K=V that `submit --label` can ask for; repeat it for several.
    log_format
        How it logs to stderr: auto and text are for people, json is a document a line (default auto).
    abandon_state
        Start although the state in the data directory cannot be read; it is put aside, and jobs are forgotten.
    """
    from gpulayer.node.config import UpOptions
    from gpulayer.node.daemon import run

    gc.enable()
    sys.setswitchinterval(SWITCH_SECONDS)
    return run(
        UpOptions(
            data_dir=data_dir,
            bind=bind,
            advertise=advertise,
            api_port=api_port,
            name=name,
            config=config,
            labels=tuple(key_value("label", text) for text in label),
            log_format=log_format,
            abandon_state=abandon_state,
        )
    )
