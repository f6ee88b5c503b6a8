"""How long a Python program takes until it has its first answer: `python -m tests.bench.bench_python [RUNS]`.

Limit: import and connect at most 250 ms in all. The yardstick, `python -c pass`, is measured in the same run, turn by
turn with the rest, because other work on the machine moves all of them.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

from tests.bench.bench_cli import measure, show
from tests.integration.daemon import Daemon

CONNECT_MILLISECONDS_MAX = 250.0
RUNS = 20
YARDSTICK, CONNECT = "python -c pass", "import, connect"
_AIO = "import {0}; import gpulayer as gl\nasync def ask(): await gl.aio.connect().status()\n{0}.run({1})"
PROGRAMS = {
    YARDSTICK: "pass",
    CONNECT: "import gpulayer as gl; gl.connect()",
    "import, connect, status": "import gpulayer as gl; gl.connect().status()",
    "import, connect, make a job": "import gpulayer as gl; gl.connect(); gl.service(['true'])",
    "aio: import, connect": "import gpulayer as gl; gl.aio.connect()",
    "aio on asyncio: … status": _AIO.format("asyncio", "ask()"),
    "aio on trio: … status": _AIO.format("trio", "ask"),
}


def main(runs: int) -> int:
    with tempfile.TemporaryDirectory(prefix="gpulayer-bench-") as home:
        daemon = Daemon(Path(home)).start()
        try:
            env = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")}
            env["GPULAYER_DATA_DIR"] = str(daemon.data_dir)
            taken = measure({name: [sys.executable, "-c", code] for name, code in PROGRAMS.items()}, runs, env)
        finally:
            daemon.end()
    show(taken, runs)
    connect = statistics.median(taken[CONNECT])
    print(f"{CONNECT}: {connect:.1f} ms in all (limit {CONNECT_MILLISECONDS_MAX:g})")
    return 0 if connect <= CONNECT_MILLISECONDS_MAX else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
