"""How long `gpulayer resources detect` takes: `python -m tests.bench.bench_resources [RUNS]`.

Limits: 400 ms on a machine of eight (fake) GPUs, 5 s where the driver hangs. The yardsticks are measured in the same
run, turn by turn with the rest, because other work on the machine moves all of them. Of the runs with a driver that
hangs there are a fifth as many: each waits for seconds.
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
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.fakes.nvml import FakeNvml

GPUS = 8
DETECT_MILLISECONDS_MAX = 400.0
HANGING_MILLISECONDS_MAX = 5000.0
RUNS = 20


def milliseconds(words: Sequence[str], env: Mapping[str, str], code: int = 0) -> float:
    begun = time.perf_counter()
    done = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    taken = (time.perf_counter() - begun) * 1000
    assert done.returncode == code, (words, done.stdout.decode(), done.stderr.decode())
    return taken


def told(name: str, values: Sequence[float]) -> float:
    median, spread = statistics.median(values), statistics.stdev(values)
    print(f"{name:34} median {median:6.1f} ms  (min {min(values):6.1f}, max {max(values):6.1f}, stdev {spread:5.1f})")
    return median


def main(runs: int) -> int:
    script = shutil.which("gpulayer", path=str(Path(sys.executable).parent))
    gpulayer = [script] if script else [sys.executable, "-m", "gpulayer"]
    with tempfile.TemporaryDirectory(prefix="gpulayer-bench-") as home:
        fake = FakeNvml(Path(home), gpus=GPUS)
        fake.link_to_switch(*range(GPUS))
        env = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")}
        with_driver = env | fake.env()
        detect = [*gpulayer, "resources", "detect", "--data-dir", f"{home}/data"]
        commands: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
            "python -c pass": ([sys.executable, "-c", "pass"], env),
            "python -c 'import pynvml'": ([sys.executable, "-c", "import pynvml"], env),
            "resources detect, no driver": (detect, env),
            f"resources detect, {GPUS} GPUs": (detect, with_driver),
            f"resources detect --json, {GPUS} GPUs": ([*detect, "--json"], with_driver),
        }
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(runs + 1):
            for name, (words, environment) in commands.items():
                value = milliseconds(words, environment)
                # The first turn fills the file cache and writes .pyc files.
                if turn:
                    taken[name].append(value)
        fake.hang("nvmlDeviceGetCount_v2")
        hanging = [milliseconds(detect, with_driver, code=1) for _ in range(max(2, runs // 5))]
    print(
        f"machine: {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {platform.platform()}, "
        f"Python {platform.python_version()}; {runs} runs each"
    )
    medians = {name: told(name, values) for name, values in taken.items()}
    hangs = told("resources detect, the driver hangs", hanging)
    print(f"limits: {DETECT_MILLISECONDS_MAX:g} ms on {GPUS} GPUs, {HANGING_MILLISECONDS_MAX:g} ms where it hangs")
    is_fast = all(median <= DETECT_MILLISECONDS_MAX for median in medians.values())
    return 0 if is_fast and hangs <= HANGING_MILLISECONDS_MAX else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS))
