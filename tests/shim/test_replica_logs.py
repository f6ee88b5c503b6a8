"""The reader of the shim's log files, on files that the shim's writer wrote and on damaged ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulayer.runtime.replica_logs import LINE_BYTES_MAX, Cursor, LogLine, LogReader, last_lines, read, tail_cursor
from gpulayer.shim import log_format
from gpulayer.shim.log_format import RUN_ENDED, RUN_STARTED, STDERR, STDOUT, SUPERVISOR
from gpulayer.shim.log_writer import LogWriter


class Log:
    def __init__(self, path: Path, max_bytes: int = 1_000_000, keep: int = 3) -> None:
        path.mkdir(exist_ok=True)
        self.path = path
        self.writer = LogWriter(os.open(path, os.O_RDONLY), max_bytes=max_bytes, keep=keep)

    def out(self, content: bytes, stream: int = STDOUT, run: int = 1) -> None:
        self.writer.output(stream, run, memoryview(content))

    @property
    def last_segment(self) -> Path:
        return self.path / log_format.segment_name(log_format.segment_numbers(self.path)[-1])


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "logs")
    yield log
    log.writer.close()


def texts(lines: Iterator[LogLine] | list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert list(read(tmp_path / "nowhere")) == []
    assert last_lines(tmp_path / "nowhere", 5) == []
    (tmp_path / "logs").mkdir()
    assert list(read(tmp_path / "logs")) == []


def test_lines_are_put_together_from_chunks_of_their_own_stream(log: Log) -> None:
    log.out(b"one\ntw")
    log.out(b"err", STDERR)
    log.out(b"o\nthree\n")
    log.out(b"or\n", STDERR)
    assert [(line.stream, line.text) for line in read(log.path)] == [
        ("stdout", "one"), ("stdout", "two"), ("stdout", "three"), ("stderr", "error")
    ]  # fmt: skip


def test_a_character_may_be_cut_by_a_chunk_and_bytes_that_are_none_are_replaced(log: Log) -> None:
    euro = "€".encode()
    log.out(euro[:1])
    log.out(euro[1:] + b" \xff\xfe\n\xe2\x82\n")
    assert texts(read(log.path)) == ["€ ��", "�"]


def test_a_line_without_newline_waits_in_a_follower_and_is_given_at_the_end_of_its_run(log: Log) -> None:
    with LogReader(log.path) as reader:
        log.out(b"a\nbegun")
        assert texts(reader.read_available()) == ["a"]
        assert reader.read_available() == []
        assert [(line.text, line.partial) for line in reader.unfinished()] == [("begun", True)]
        log.writer.note(RUN_ENDED, 1, '{"code": 0, "uptime_seconds": 2, "ended_by": "stop:scale_down"}')
        lines = reader.read_available()
    assert [(line.text, line.partial) for line in lines] == [
        ("begun", True), ("run 1 exited with code 0 after 2.0 s (scale down)", False)
    ]  # fmt: skip


def test_a_line_is_stamped_with_its_beginning(log: Log) -> None:
    log.out(b"begun ")
    began = time.time()
    time.sleep(0.02)
    log.out(b"and ended\nnext\n")
    first, second = read(log.path)
    assert first.at_utc <= began < second.at_utc
    assert texts(read(log.path, since_utc=began)) == ["next"]


def test_an_overlong_line_is_given_in_pieces(log: Log) -> None:
    log.out(b"x" * (LINE_BYTES_MAX * 2 + 10) + b"\nnext\n" + b"y" * (LINE_BYTES_MAX + 1))
    log.out(b"z\n")
    lines = list(read(log.path))
    assert [(len(line.text), line.partial) for line in lines] == [
        (LINE_BYTES_MAX, True), (LINE_BYTES_MAX, True), (10, False), (4, False), (LINE_BYTES_MAX, True), (2, False)
    ]  # fmt: skip


def test_runs_and_the_supervisor_have_their_own_kinds(log: Log) -> None:
    log.writer.note(RUN_STARTED, 4, '{"cause": "crashed", "port": 20000}')
    log.writer.note(SUPERVISOR, 4, "restarts in 4 s\nand says so")
    log.writer.note(RUN_ENDED, 4, '{"signal": 11, "core_dumped": true, "uptime_seconds": 0.25, "left_background": 1}')
    lines = list(read(log.path))
    assert [(line.kind, line.text) for line in lines] == [
        ("run_started", "run 4 started (crashed, port 20000)"),
        ("supervisor", "restarts in 4 s"),
        ("supervisor", "and says so"),
        (
            "run_ended",
            "run 4 was ended by SIGSEGV (core dumped) after 0.2 s; 1 process was left in the background",
        ),
    ]
    assert {line.stream for line in lines} == {"supervisor"}


@pytest.mark.parametrize(
    "note",
    ["[" * 1000, '{"left_background": 1, "left_names": 5}', '{"uptime_seconds": 1%s}' % ("0" * 400), '{"code": 1e999}'],
)
def test_a_note_of_any_kind_is_a_line(log: Log, note: str) -> None:
    log.writer.note(RUN_STARTED, 4, note)
    log.writer.note(RUN_ENDED, 4, note)
    assert [line.kind for line in read(log.path)] == ["run_started", "run_ended"]


def test_a_reader_is_told_how_much_was_rotated_away_before_it_came(tmp_path: Path) -> None:
    log = Log(tmp_path / "logs", max_bytes=20_000, keep=2)
    with LogReader(log.path) as reader:
        for number in range(30):
            log.out(b"%d\n" % number)
        assert len(reader.read_available()) == 30
        for _ in range(100):
            log.out(b"x" * 999 + b"\n")
        lines = []
        while more := reader.read_available(7):
            lines += more
    kinds = [line.kind for line in lines]
    rotated = lines[kinds.index("rotated")]
    seen_bytes = sum(1000 for line in lines if line.text == "x" * 999)
    # A record's header is 24 bytes; a line that was cut by the rotation is in neither sum.
    assert seen_bytes + rotated.lost_bytes == pytest.approx(100 * 1024, rel=0.03)
    (beginning, *_) = read(log.path)
    assert beginning.kind == "rotated"
    assert beginning.lost_bytes > 0


def test_a_run_of_which_the_beginning_is_gone_says_so(tmp_path: Path) -> None:
    log = Log(tmp_path / "logs", max_bytes=20_000, keep=2)
    for run in (1, 2):
        log.writer.note(RUN_STARTED, run, "{}")
        for _ in range(30):
            log.out(b"x" * 999 + b"\n", run=run)
    assert next(read(log.path, run=2)).kind in ("rotated", "run_started")
    assert [line.kind for line in read(log.path, run=3)] == []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cursor_goes_on_exactly_where_it_was_taken(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    log = Log(tmp_path_factory.mktemp("cursor") / "logs", max_bytes=16 * 1024, keep=50)
    content = st.sampled_from([b"a\n", b"b", b"cc\ndd\nee", b"\n\n", b"f" * 3000 + b"\n", b"g" * 9000])
    for stream, chunk in data.draw(st.lists(st.tuples(st.sampled_from([STDOUT, STDERR]), content), max_size=30)):
        log.out(chunk, stream)
    with LogReader(log.path) as reader:
        whole = []
        while lines := reader.read_available():
            whole += lines
    pieces: list[LogLine] = []
    cursor = None
    while True:
        with LogReader(log.path, cursor=cursor) as reader:
            lines = reader.read_available(data.draw(st.integers(1, 5)))
            cursor = Cursor.parse(str(reader.cursor))
        if not lines:
            break
        pieces += lines
    assert pieces == whole
    log.writer.close()


def test_a_cursor_into_what_was_rotated_away_begins_with_what_is_left(tmp_path: Path) -> None:
    log = Log(tmp_path / "logs", max_bytes=20_000, keep=2)
    log.out(b"first\n")
    with LogReader(log.path) as reader:
        reader.read_available()
        cursor = reader.cursor
    for number in range(100):
        log.out(b"%d " % number + b"x" * 999 + b"\n")
    lines = list(read(log.path, cursor=cursor))
    assert lines[0].kind == "rotated"
    assert lines[-1].text.startswith("99 ")


@pytest.mark.parametrize("text", ["", "1.2", "1.2.x", "-1.2.3", "1.2.3.4"])
def test_nonsense_is_no_cursor(text: str) -> None:
    with pytest.raises(ValueError):
        Cursor.parse(text)


def test_a_torn_end_is_the_end_until_the_next_segment(log: Log) -> None:
    log.out(b"whole\n")
    log.out(b"torn\n")
    path = log.last_segment
    os.truncate(path, path.stat().st_size - 3)
    assert texts(read(log.path)) == ["whole"]
    log.writer.close()
    with LogReader(log.path) as reader:
        assert texts(reader.read_available()) == ["whole"]
        other = Log(log.path)
        other.out(b"new shim\n")
        assert [(line.kind, line.text) for line in reader.read_available()] == [
            ("gap", "26 bytes of the log cannot be read"), ("output", "new shim")
        ]  # fmt: skip
        other.writer.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_makes_a_reader_raise(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    log = Log(tmp_path_factory.mktemp("damage") / "logs", max_bytes=16 * 1024)
    for number in range(12):
        log.out(b"%d " % number + b"x" * 2500 + b"\n")
    log.writer.note(RUN_ENDED, 1, "{}")
    log.writer.close()
    for path in log.path.iterdir():
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(content) - 1))
            length = data.draw(st.integers(1, 64))
            content[at : at + length] = data.draw(st.binary(min_size=length, max_size=length))
        del content[data.draw(st.integers(0, len(content))) :]
        path.write_bytes(content)
    (log.path / "00000009.log").write_bytes(data.draw(st.binary(max_size=40)))
    (log.path / "notes.txt").write_text("not a segment")
    for line in [*read(log.path), *last_lines(log.path, 5), *read(log.path, cursor=Cursor(2, 77, 3))]:
        assert isinstance(line.text, str)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_last_lines_are_the_last_of_all_lines(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    log = Log(tmp_path_factory.mktemp("tail") / "logs", max_bytes=16 * 1024, keep=50)
    for index in range(data.draw(st.integers(0, 40))):
        count = data.draw(st.integers(1, 50))
        run = index // 10 + 1
        log.out(b"".join(b"%d.%d %s\n" % (index, line, b"x" * 30) for line in range(count)), run=run)
    count = data.draw(st.integers(0, 120))
    for wanted_run in (None, 1, 3):
        everything = list(read(log.path, run=wanted_run))
        assert last_lines(log.path, count, run=wanted_run) == (everything[-count:] if count else [])
    with LogReader(log.path, cursor=tail_cursor(log.path, count)) as reader:
        lines = reader.read_available(100_000)
    assert len(lines) >= min(count, len(list(read(log.path))))
    log.writer.close()


def test_the_last_lines_of_a_large_log_come_quickly(tmp_path: Path) -> None:
    log = Log(tmp_path / "logs", max_bytes=10_000_000, keep=3)
    line = b"2026-01-01 00:00:00 INFO a line as servers write it, one write each, with some numbers 12345\n"
    for _ in range(29_000_000 // (len(line) + 24)):
        log.out(line)
    log.writer.close()
    began = time.perf_counter()
    assert len(last_lines(log.path, 100)) == 100
    seconds = time.perf_counter() - began
    print(f"last 100 lines of 29 MB in small records: {seconds * 1000:.0f} ms")
    assert seconds < 1  # measured: below 0.15; a busy machine is not what is tested here


def test_a_writer_that_is_refused_cuts_back_counts_and_goes_on(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: no root needed to have a write refused, and a short one before it."""
    pid = os.fork()
    if pid == 0:
        try:
            import resource

            log = Log(tmp_path / "logs")
            log.out(b"kept\n")
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            log.out(b"x" * 1999 + b"\n")
            log.out(b"y" * 1999 + b"\n")
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            time.sleep(0.1)
            log.out(b"after\n")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    lines = list(read(tmp_path / "logs"))
    assert [(line.kind, line.text) for line in lines if line.kind == "output"] == [
        ("output", "kept"),
        ("output", "after"),
    ]
    assert (lines[1].kind, lines[1].lost_bytes, lines[1].lost_lines) == ("gap", 4000, 2)
