"""How fast the command line starts: `python -m tests.bench.bench_cli [RUNS]`.

Limits: `gpulayer --help` at most 150 ms more than `python -c pass`; `gpulayer submit --detach` at most 200 ms in all;
`gpulayer submit --target local` at most 1 s from its own beginning to that of its command.
The yardstick is measured in the same run, turn by turn with the rest, because other work on the machine moves all of
them.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.integration.daemon import Daemon

HELP_MILLISECONDS_MAX = 150.0
SUBMIT_MILLISECONDS_MAX = 200.0
LOCAL_MILLISECONDS_MAX = 1000.0
RUNS = 20
LOCAL = "submit --target local --"


# Says when it was executed, on the clock of perf_counter().
CLOCK = "import time; print(time.perf_counter())"


def milliseconds(words: Sequence[str], env: dict[str, str]) -> float:
    """To its end; of one that says when its own command began, to that."""
    begun = time.perf_counter()
    done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    ended = time.perf_counter()
    assert done.returncode == 0, (words, done.stderr.decode())
    return ((float(done.stdout) if CLOCK in words else ended) - begun) * 1000


def measure(commands: dict[str, Sequence[str]], runs: int, env: dict[str, str]) -> dict[str, list[float]]:
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, words in commands.items():
            value = milliseconds(words, env)
            # The first turn fills the file cache and writes .pyc files.
            if turn:
                taken[name].append(value)
    return taken


def show(taken: dict[str, list[float]], runs: int) -> None:
    print(
        f"machine: {os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}; {runs} runs each"
    )
    for name, values in taken.items():
        low, high = min(values), max(values)
        print(f"{name:28} median {statistics.median(values):6.1f} ms  (min {low:6.1f}, max {high:6.1f})")


def main(runs: int) -> int:
    script = shutil.which("gpulayer", path=str(Path(sys.executable).parent))
    gpulayer = [script] if script else [sys.executable, "-m", "gpulayer"]
    with tempfile.TemporaryDirectory(prefix="gpulayer-bench-") as home:
        daemon = Daemon(Path(home)).start()
        try:
            env = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")}
            env["GPULAYER_DATA_DIR"] = str(daemon.data_dir)
            taken = measure(
                {
                    "python -c pass": [sys.executable, "-c", "pass"],
                    "gpulayer --help": [*gpulayer, "--help"],
                    "gpulayer submit --help": [*gpulayer, "submit", "--help"],
                    "gpulayer job list": [*gpulayer, "job", "list"],
                    "gpulayer submit --detach": [*gpulayer, "submit", "--detach", "--", "true"],
                    LOCAL: [*gpulayer, "submit", "--target", "local", "--", sys.executable, "-I", "-S", "-c", CLOCK],
                    f"{LOCAL} true": [*gpulayer, "submit", "--target", "local", "--", "true"],
                },
                runs,
                env,
            )
        finally:
            daemon.end()
    show(taken, runs)
    yardstick = statistics.median(taken["python -c pass"])
    more = statistics.median(taken["gpulayer --help"]) - yardstick
    submit = statistics.median(taken["gpulayer submit --detach"])
    print(f"--help: {more:.1f} ms more than the yardstick (limit {HELP_MILLISECONDS_MAX:g})")
    print(f"submit --detach: {submit:.1f} ms in all (limit {SUBMIT_MILLISECONDS_MAX:g})")
    local = statistics.median(taken[LOCAL])
    print(f"submit --target local: {local:.1f} ms until its command runs (limit {LOCAL_MILLISECONDS_MAX:g})")
    is_good = more <= HELP_MILLISECONDS_MAX and submit <= SUBMIT_MILLISECONDS_MAX and local <= LOCAL_MILLISECONDS_MAX
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
