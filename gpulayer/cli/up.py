"""gpulayer up: the daemon. Only reads the words; node/config.py judges them, node/starting.py runs."""

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
    peer_port: int | None = None,
    join: Annotated[tuple[str, ...], Parameter(name="--join")] = (),
    token: str | None = None,
    token_file: str | None = None,
    name: str | None = None,
    label: Annotated[tuple[str, ...], Parameter(name="--label")] = (),
    log_format: Literal["auto", "json", "text"] | None = None,
    abandon_state: bool = False,
) -> int:
    """Run the daemon of this host, in the foreground, until SIGTERM or Ctrl-C; replicas go on without it.

    In an empty data directory it makes a new cluster, or with --join becomes a node of another one.
    Flags win over $GPULAYER_* and those over the configuration file.

    Parameters
    ----------
    data_dir
        Where it keeps everything (default /var/lib/gpulayer as root, else ~/.local/state/gpulayer).
    config
        Configuration file (default /etc/gpulayer/gpulayer.toml, if it is there).
    bind
        Address to listen on, 0.0.0.0 or :: for all (default 127.0.0.1). Beyond loopback it speaks TLS only.
    advertise
        Address that other hosts reach this one at (default: that of --bind, or that of the way to the others).
    api_port
        Port of the HTTP API on that address, 0 for any that is free (default 7450).
    peer_port
        Port for other nodes on that address, TCP and UDP, 0 for any that is free (default 7451).
    join
        HOST[:PORT] of a node whose cluster to join; repeat it for several.
    token
        From `gpulayer token create --join`. As ps shows it to everybody, better $GPULAYER_JOIN_TOKEN or --token-file.
    token_file
        A file that has the token in it.
    name
        Name of this node (default: the host's).
    label
        K=V that `submit --label` can ask for; repeat it for several.
    log_format
        How it logs to stderr: auto and text are for people, json is a document a line (default auto).
    abandon_state
        Put aside what is in the data directory and start as a new node: its jobs and its cluster are forgotten.
    """
    from gpulayer.node.config import UpOptions
    from gpulayer.node.starting import run

    gc.enable()
    sys.setswitchinterval(SWITCH_SECONDS)
    return run(
        UpOptions(
            data_dir=data_dir,
            bind=bind,
            advertise=advertise,
            api_port=api_port,
            peer_port=peer_port,
            join=join,
            join_token=token,
            join_token_file=token_file,
            name=name,
            config=config,
            labels=tuple(key_value("label", text) for text in label),
            log_format=log_format,
            abandon_state=abandon_state,
        )
    )
