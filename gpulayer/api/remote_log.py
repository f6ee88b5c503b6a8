"""One attempt's log on another node, as far as it has been fetched. Sends nothing itself: it says what to ask of the
node next, and is told what that answered (api/local.py), so that log_merge.py reads it like a file.
"""

from __future__ import annotations

from collections import deque

from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.runtime.replica_logs import Cursor, LogLine
from gpulayer.wire.http import Json


class RemoteLog:
    """Made, begun once, then asked and answered in turn."""

    def __init__(self, attempt: AttemptId, node: NodeId) -> None:
        self.attempt = attempt
        self.node = node
        self.is_behind = True
        """There may be more of it than is here: nothing can be said yet of what its next line is."""
        self.cursor = Cursor(0, 0, 0)
        """After the last line that was taken."""
        self._fetched: Cursor | None = None
        """After the last line that is here; None: at the beginning, or where `tail` says."""
        self._lines: deque[tuple[LogLine, Cursor]] = deque()
        self._begun: list[LogLine] = []
        self._since_utc: float | None = None
        self._run: int | None = None
        self._tail: int | None = None
        self._seen: list[int] | None = None
        self._until: list[int] | None = None
        self._is_until_now = False
        self._is_missing = False

    def begin(self, *, since_utc: float | None, run: int | None, cursor: Cursor | None, tail: int | None) -> None:
        self._since_utc, self._run, self._tail, self._fetched = since_utc, run, tail, cursor
        self.cursor = cursor or Cursor(0, 0, 0)

    # --- fetching ---------------------------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether it is worth asking: what was fetched is used up."""
        return not self._lines

    @property
    def is_worth_a_look(self) -> bool:
        """Whether there may be news where it ended when it was last asked."""
        return not self._lines and not self._is_until_now

    def question(self) -> Json:
        return {
            "attempt": str(self.attempt),
            "run": self._run,
            "since": self._since_utc,
            "tail": self._tail,
            "after": None if self._fetched is None else str(self._fetched),
            "seen": self._seen,
            "until": self._until,
            "is_until_now": self._is_until_now,
        }

    def answered(self, answer: Json) -> None:
        """LookupError, TypeError or ValueError where it is no answer to the question."""
        self._is_missing = False
        if answer["lines"] is not None:
            for at_utc, stream, run, text, kind, after in answer["lines"]:
                self._lines.append((LogLine(float(at_utc), stream, int(run), str(text), kind), Cursor.parse(after)))
            self._begun = [
                LogLine(float(at_utc), stream, int(run), str(text), "output", True)
                for at_utc, stream, run, text in answer["begun"]
            ]
            self._fetched = Cursor.parse(answer["after"])
        self._seen, self._until = answer["seen"], answer["until"]
        self.is_behind = not answer["is_at_end"]

    def missing(self, text: str, at_utc: float) -> None:
        """Its node does not answer, or no more. Said once, as a line; the rest goes on without it, until it does."""
        if not self._is_missing:
            self._is_missing = True
            place = self._lines[-1][1] if self._lines else self.cursor
            self._lines.append((LogLine(at_utc, "supervisor", self._run or 0, text, "gap"), place))
        self.is_behind = False

    # --- reading, as log_merge.FileLog ------------------------------------------------------------------------------

    def next_line(self) -> LogLine | None:
        if not self._lines:
            return None
        line, self.cursor = self._lines.popleft()
        return line

    def unfinished(self) -> list[LogLine]:
        return self._begun

    def has_grown(self) -> bool:
        return bool(self._lines) or self.is_behind

    def look(self) -> None:
        pass

    def was_read(self) -> None:
        pass

    def stop_at_present_end(self) -> None:
        """Where that is, its node says: it has to be asked once more."""
        self._is_until_now, self._until, self.is_behind = True, None, not self._is_missing

    def go_on(self) -> None:
        self._is_until_now, self._until, self._seen = False, None, None

    def close(self) -> None:
        pass
