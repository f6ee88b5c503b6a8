"""Each fuzz target stands its seeds and some hundred mutations; the runner tells how to see a failure again."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import run as fuzz


@pytest.mark.parametrize("target", fuzz.targets())
def test_nothing_breaks_it(target: str) -> None:
    assert fuzz.run(target, seconds=30, seed=1, count=300) == 0


def test_every_target_has_seeds() -> None:
    assert fuzz.targets()
    for target in fuzz.targets():
        assert any(fuzz.seeds(target)), target


def test_an_input_can_be_made_again_from_its_number() -> None:
    stream = fuzz.inputs("fuzz_offsets", seed=7)
    numbered = dict(next(stream) for _ in range(50))
    assert next(fuzz.inputs("fuzz_offsets", seed=7, start=40)) == (40, numbered[40])
    assert next(fuzz.inputs("fuzz_offsets", seed=8, start=40)) != (40, numbered[40])


@pytest.mark.parametrize("breaks", ["raises", "hangs"])
def test_a_failure_is_printed_as_a_command_and_kept(
    breaks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(data: bytes) -> None:
        while b"3" in data:
            if breaks == "raises":
                raise KeyError("three")

    monkeypatch.setattr(fuzz, "load", lambda target: one)
    monkeypatch.setattr(fuzz, "CRASHES", tmp_path)
    monkeypatch.setattr(fuzz, "INPUT_SECONDS_MAX", 0.1)
    assert fuzz.run("fuzz_offsets", seconds=30, seed=1) == 1
    said = capsys.readouterr().out
    assert ("KeyError: 'three'" if breaks == "raises" else "TooSlow") in said
    assert "python -m fuzz.run fuzz_offsets --seed 1 --start 0 --count 1" in said
    (kept,) = tmp_path.iterdir()
    assert b"3" in kept.read_bytes()
