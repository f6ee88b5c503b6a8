"""Feed a decoder what nobody would send: its seeds, then mutations of them, until the time is up or something breaks.

`python -m fuzz.run TARGET --seconds 10 --seed N`, from the repository root. A target is a module of this folder with
`one(data)`, which raises nothing for any bytes. Input number I of seed N is always the same, so that a failure is
printed as a command to paste; the input itself is written to build/fuzz/. With `--atheris` the engine of that name
drives the same targets, guided by coverage, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from types import FrameType

HERE = Path(__file__).parent
CRASHES = HERE.parent / "build" / "fuzz"
# A decoder that takes longer for less than 64 KiB can be used to stop a daemon.
INPUT_SECONDS_MAX = 2.0
INPUT_BYTES_MAX = 64 * 1024
MUTATIONS_MAX = 8
_BYTES = (0x00, 0x01, 0x0A, 0x20, 0x22, 0x5B, 0x7B, 0x7F, 0x80, 0xA0, 0xC0, 0xFF)
_TOKENS = (
    b"\xf9\x7e\x00",  # NaN in CBOR
    b"\xfb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    b"\x1b\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x3b\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\x9b\x00\x00\x00\x01\x00\x00\x00\x00",  # an array of 2**32
    b"\x5b\x7f\xff\xff\xff\xff\xff\xff\xff",
    b"\xd8\x1c\x81\xd8\x1d\x00",  # a cycle
    b"\xc2\x49\x01\x00\x00\x00\x00\x00\x00\x00\x00",
    b"NaN",
    b"1e999",
    b"-1",
    b"9" * 40,
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b'"\\ud800"',
    b"\\u0000",
    "²".encode(),
    b"\xed\xa0\x80",
    b"[" * 200,
    b"\n",
)


def targets() -> list[str]:
    return sorted(path.stem for path in HERE.glob("fuzz_*.py"))


def load(target: str) -> Callable[[bytes], None]:
    one: Callable[[bytes], None] = importlib.import_module(f"fuzz.{target}").one
    return one


def seeds(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((HERE / "seeds" / target).iterdir())] or [b""]


def mutated(rng: Random, corpus: list[bytes]) -> bytes:
    """One of the corpus, changed a few times."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.randint(1, MUTATIONS_MAX)):
        at = rng.randint(0, len(data))
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.choice(_BYTES)
            case 2:
                data[at:at] = bytes([rng.randrange(256)])
            case 3:
                data[at:at] = rng.choice(_TOKENS)
            case 4:
                del data[at : at + rng.randint(1, 8)]
            case 5:
                part = data[at : at + rng.randint(1, 64)]
                data[at:at] = part * rng.randint(1, 4)
            case 6:
                other = rng.choice(corpus)
                start = rng.randint(0, len(other))
                data[at : at + rng.randint(0, 16)] = other[start : start + rng.randint(1, 64)]
            case _:
                data[at : at + rng.randint(1, 4)] = rng.choice(_TOKENS)
    return bytes(data[:INPUT_BYTES_MAX])


def inputs(target: str, seed: int, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """The seeds themselves, then mutations without end, from number `start` on."""
    corpus = seeds(target)
    yield from ((number, data) for number, data in enumerate(corpus) if number >= start)
    number = max(start, len(corpus))
    while True:
        yield number, mutated(Random(f"{seed} {number}"), corpus)
        number += 1


class TooSlow(BaseException):
    """Not an Exception, so that no decoder takes it for a broken message."""


def _too_slow(_number: int, _frame: FrameType | None) -> None:
    raise TooSlow(f"more than {INPUT_SECONDS_MAX} seconds")


def failure(one: Callable[[bytes], None], data: bytes) -> str | None:
    """The traceback of what `one` raised, if it did."""
    signal.setitimer(signal.ITIMER_REAL, INPUT_SECONDS_MAX)
    try:
        one(data)
    except (Exception, TooSlow):  # noqa: BLE001 - finding out is the purpose
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def run(target: str, *, seconds: float, seed: int, start: int = 0, count: int | None = None) -> int:
    """0 after the time or the count; 1 at the first failure, which is printed and written down."""
    one = load(target)
    before = signal.signal(signal.SIGALRM, _too_slow)
    try:
        return _run(target, one, seconds=seconds, seed=seed, start=start, count=count)
    finally:
        signal.signal(signal.SIGALRM, before)


def _run(target: str, one: Callable[[bytes], None], *, seconds: float, seed: int, start: int, count: int | None) -> int:
    began = time.monotonic()
    done = 0
    for number, data in inputs(target, seed, start):
        if time.monotonic() - began > seconds or done == count:
            break
        found = failure(one, data)
        done += 1
        if found is not None:
            _report(target, seed, number, data, found)
            return 1
    print(f"{target}: {done} inputs in {time.monotonic() - began:.1f} s, nothing broke (seed {seed})")
    return 0


def _report(target: str, seed: int, number: int, data: bytes, found: str) -> None:
    CRASHES.mkdir(parents=True, exist_ok=True)
    path = CRASHES / f"{target}-{sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    print(found)
    print(f"{target}: input {number} of seed {seed} ({len(data)} bytes) broke it: {data[:200]!r}")
    print(f"again:      python -m fuzz.run {target} --seed {seed} --start {number} --count 1")
    print(f"the input:  python -m fuzz.run {target} --input {path}")
    print(f"for good:   cp {path} fuzz/seeds/{target}/")


def _run_atheris(target: str, seconds: float) -> None:
    try:
        import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris, or leave out --atheris")
    with atheris.instrument_imports(include=["gpulayer"]):
        one = load(target)
    grown = CRASHES / target
    grown.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={int(seconds)}",
        f"-artifact_prefix={CRASHES}/{target}-",
        f"-max_len={INPUT_BYTES_MAX}",
    ]
    atheris.Setup([sys.argv[0], *options, str(grown), str(HERE / "seeds" / target)], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz.run", description="Feed a decoder what nobody would send.")
    parser.add_argument("target", choices=[*targets(), "all"])
    parser.add_argument("--seconds", type=float, default=10.0, help="per target (10)")
    parser.add_argument("--seed", type=int, default=None, help="of the mutations; default: another one each time")
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    parser.add_argument("--count", type=int, default=None, help="how many inputs at most")
    parser.add_argument("--input", type=Path, default=None, help="only the bytes of this file")
    parser.add_argument("--atheris", action="store_true", help="with atheris, guided by coverage")
    chosen = parser.parse_args()
    seed = time.time_ns() % 2**32 if chosen.seed is None else chosen.seed
    names = targets() if chosen.target == "all" else [chosen.target]
    if chosen.input is not None:
        load(names[0])(chosen.input.read_bytes())
        return 0
    if chosen.atheris:
        _run_atheris(names[0], chosen.seconds)
        return 0
    results = [run(name, seconds=chosen.seconds, seed=seed, start=chosen.start, count=chosen.count) for name in names]
    return max(results)


if __name__ == "__main__":
    sys.exit(main())
