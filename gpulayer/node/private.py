"""A node of its own for one `gpulayer submit --target local`: a child of that command, and gone with it.

    python -P -m gpulayer.node.private [DATA_DIR]

The same composition as `gpulayer up`, by the same configuration and with the same device locks, in a directory of its
own (runtime/private_dirs.py) and on its unix socket alone. What it is to do it is asked for by HTTP, as any node.

stdin is a pipe: at its end, or after SIGTERM or SIGINT, everything is stopped as its job says, nothing is left, and the
process ends. On stdout it tells, a JSON document a line: `{"directory": …}`, the data directory that it has made;
`{"ready": true}`; or `{"error": {"kind", "code", "message", "hint"}}` before it ends with 1. On stderr it logs what is
wrong. If it is killed, its replicas end with it: they are tethered (shim/shim.py).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from gpulayer.api.server import bind_sockets
from gpulayer.core.cluster.commands import StopJob
from gpulayer.model.errors import GpulayerError, NotFound, Refused
from gpulayer.model.places import SOCKET_NAME
from gpulayer.model.replica import Reason
from gpulayer.node.config import Config, Neighbour, UpOptions, load_config
from gpulayer.node.facade import Facade
from gpulayer.node.notify import ServiceNotifier
from gpulayer.node.starting import run_node
from gpulayer.runtime.identity import known_node_id, open_data_dir
from gpulayer.runtime.private_dirs import end_runs, open_private_dir, remove, remove_leftovers
from gpulayer.runtime.telemetry import configure_logs

# A driver that hangs is given up by then (runtime/accelerators/nvml.py): a job for a GPU is refused for the reason.
FIRST_LOOK_SECONDS = 4.0
# After everything was stopped, until the command has shown the end of its output.
LAST_WORDS_SECONDS_MAX = 2.0
# To make a data directory takes as long as a few files take to be synced.
NEIGHBOUR_SECONDS_MAX = 10.0
# Its log is nobody else's and is gone with it, so a device that others come and go on may fill it.
OBSERVED_SECONDS = 0.5

_STOPPED = Reason(code="cancelled", text="the command that it ran for has ended")


def main(words: Sequence[str]) -> int:
    """The life of a private node; its exit code."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.umask(0o077)
    try:
        _serve(load_config(UpOptions(data_dir=words[0] if words else None), os.environ, uid=os.getuid()))
    except GpulayerError as error:
        _tell(
            {
                "error": {
                    "kind": error.default_code,
                    "code": error.code,
                    "message": error.message,
                    "hint": error.hint,
                }
            }
        )
        return 1
    return 0


def _serve(config: Config) -> None:
    configure_logs(config.log_format, least=logging.WARNING)
    with open_private_dir(config.data_dir) as data:
        try:
            _tell({"directory": str(data.path)})
            private = replace(
                config,
                data_dir=data.path,
                api_port=None,
                peer_port=None,
                shares_devices_with=_neighbour(config),
                tethered=True,
                first_look_seconds=FIRST_LOOK_SECONDS,
                observed_seconds=OBSERVED_SECONDS,
            )
            beside = partial(_until_the_end, data_dir=config.data_dir)
            with bind_sockets(unix_path=data.path / SOCKET_NAME, host=config.bind, port=None) as sockets:
                trio.run(partial(run_node, private, data, sockets, None, ServiceNotifier({}), beside=beside))
        finally:
            # Mostly there is none: but a log that cannot be written any more has kept nothing from running.
            end_runs(data.path)
            remove(data.path)


def _neighbour(config: Config) -> Neighbour | None:
    """The node of whoever runs `gpulayer up` by this configuration, now or later. Declared devices are its."""
    if not config.accelerators:
        return None
    deadline = time.monotonic() + NEIGHBOUR_SECONDS_MAX
    while (node_id := known_node_id(config.data_dir)) is None:
        try:
            with open_data_dir(config.data_dir) as data:
                node_id = data.node_id
        except Refused as error:
            # Somebody else makes it just now.
            if error.code != "data_dir_in_use" or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
    return Neighbour(data_dir=config.data_dir, node_id=node_id)


async def _until_the_end(node: Facade, *, data_dir: Path) -> None:
    async with trio.open_nursery() as nursery:
        asked, parent_gone = trio.Event(), trio.Event()
        nursery.start_soon(_wait_for_parent, asked, parent_gone)
        nursery.start_soon(_wait_for_signal, asked)
        nursery.start_soon(_tell_ready, node, data_dir)
        await asked.wait()
        try:
            await _stop_all(node)
            # Who reads what the job wrote last is not to find nobody.
            with trio.move_on_after(LAST_WORDS_SECONDS_MAX):
                await parent_gone.wait()
            await node.leave()
        except GpulayerError:
            # What cannot be written down is done by the shims.
            node.stop_requested.set()
        nursery.cancel_scope.cancel()


async def _wait_for_parent(asked: trio.Event, parent_gone: trio.Event) -> None:
    while True:
        await trio.lowlevel.wait_readable(sys.stdin.fileno())
        if not os.read(sys.stdin.fileno(), 1024):
            asked.set()
            parent_gone.set()
            return


async def _wait_for_signal(asked: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
        async for _ in received:
            asked.set()


async def _tell_ready(node: Facade, data_dir: Path) -> None:
    seen = 0
    while node.not_ready:
        seen = await node.wait_for_change(seen)
    _tell({"ready": True})
    # Beside the job, which shall not wait for the traces of others.
    await trio.to_thread.run_sync(remove_leftovers, data_dir, abandon_on_cancel=True)


async def _stop_all(node: Facade) -> None:
    """Until nothing lives, also of what is submitted meanwhile."""
    while live := [job for job in node.state.jobs.values() if job.is_live]:
        seen = node.version_of_view
        for job in live:
            if job.stopping is None:
                with suppress(Refused, NotFound):  # it ended meanwhile
                    await node.propose(StopJob(job=job.id, reason=_STOPPED))
        await node.wait_for_change(seen)


def _tell(document: object) -> None:
    with suppress(BrokenPipeError):  # whoever wanted to know is gone, and stdin says so, too
        os.write(sys.stdout.fileno(), json.dumps(document).encode() + b"\n")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # All that was held is given back by the kernel; taking down the interpreter first would be waited for.
    os._exit(code)
