"""My assignments against my attempts: begins, adopts, stops and forgets them, reports each end until the log shows it.

Pure. Decides nothing about a single replica (core/replica/lifecycle.py does) and nothing about what should run (the log
does). node/ feeds it: the orders for this node whenever the log changes them, once what the sandboxes hold, and what
the supervisor reports.

Nothing is started, stopped or discarded before both the first OrdersChanged and AttemptsFound were heard: with half of
the picture a daemon starts a second copy of what runs already, or ends what is wanted.

Nor is anything begun or stopped by orders that are not current (P4): a replica that waits may be placed elsewhere by
now, and one that was taken back may be wanted. What runs is adopted from them and looked after by its policy, restarts
of services included (P10). What else was found here is left alone until orders are current, and what happens to it
meanwhile is kept, so that it is judged then as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from gpulayer.core.base import Tick
from gpulayer.core.replica import lifecycle
from gpulayer.core.replica.lifecycle import Lifecycle
from gpulayer.core.replica.messages import (
    AgentEffect,
    AgentEvent,
    Announce,
    AttemptEffect,
    AttemptEvent,
    AttemptsFound,
    Discard,
    FoundAttempt,
    FoundRun,
    Order,
    OrdersChanged,
    Owed,
    ReplicaEffect,
    ReplicaEvent,
    Report,
    ReportAccepted,
    ReportRefused,
    ReportReleased,
    RestartRequested,
    RunExited,
    ShimDied,
    StopRun,
    TreeGone,
    Unkillable,
    Withdrawn,
)
from gpulayer.core.replica.reasons import unkillable
from gpulayer.model.ids import AttemptId, NodeId
from gpulayer.model.replica import Exit, Reason, ReplicaStatus
from gpulayer.model.units import NEVER, Instant

# A commit takes milliseconds, an election one to two seconds: what the log does not show after five was not proposed,
# or was lost with a leader. Saying it again is harmless.
REPORT_AGAIN_AFTER = 5.0

# What nobody ordered has no specification to say how it wants to be stopped; these are the defaults of `submit`.
LEFTOVER_SIGNAL = "TERM"
LEFTOVER_GRACE_SECONDS = 10.0

# Stories of attempts that are over, for `job explain`; about 5 KB each.
CLOSED_MAX = 200

_NO_ORDER = Reason(code="cancelled", text="no order for it: it was ended, or moved, while this node was away")
_END_KNOWN = Reason(code="replica_ended", text="its end is in the log already")
_NOT_CURRENT = Reason(
    code="no_current_orders",
    text="found when this daemon started; what becomes of it is known when the leader is heard",
)


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One attempt of the table. `is_ordered`: the log still holds its assignment."""

    order: Order
    life: Lifecycle
    is_ordered: bool = True
    reported: Instant | None = None
    """When what is owed was last said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leftover:
    """Found at the start, alive, and in no order: stopped, never followed."""

    run: int
    pid: int | None
    pids_unkillable: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Found at the start, and not yet judged: as it is by the events since then."""

    attempt: FoundAttempt
    at: Instant

    def after(self, event: ReplicaEvent) -> _Found:
        last = self.attempt.last
        if last is None:
            return self
        match event:
            case RunExited(exit=exit) if exit.run == last.run:
                return self._with(replace(last, alive=False, exit=exit))
            case TreeGone(run=run) if run == last.run:
                return self._with(replace(last, alive=False, gone=True))
            case ShimDied(run=run, at_utc=at_utc) if run == last.run:
                # The shell is ending what it left; nobody sees how.
                uptime = max(0.0, at_utc - last.started_at_utc)
                exit = Exit(run=run, ended_by="supervisor_killed", ended_at_utc=at_utc, uptime_seconds=uptime)
                dead = replace(self, attempt=replace(self.attempt, shim_alive=False))
                return dead._with(replace(last, alive=False, exit=last.exit or exit))
            case _:
                return self

    def at_now(self, now: Instant) -> FoundAttempt:
        last, first, waited = self.attempt.last, self.attempt.first_started_seconds_ago, now - self.at
        return replace(
            self.attempt,
            first_started_seconds_ago=first + waited if first is not None else None,
            last=replace(last, started_seconds_ago=last.started_seconds_ago + waited) if last is not None else None,
        )

    def _with(self, last: FoundRun) -> _Found:
        return replace(self, attempt=replace(self.attempt, last=last))


@dataclass(slots=True)
class Agent:
    """The table of this node. `advertise` is the address that endpoints carry."""

    node: NodeId
    advertise: str
    _orders: Mapping[AttemptId, Order] | None = field(default=None, init=False)
    _is_current: bool = field(default=False, init=False)
    _found: dict[AttemptId, _Found] | None = field(default=None, init=False)
    _attempts: dict[AttemptId, _Attempt] = field(default_factory=dict, init=False)
    _leftovers: dict[AttemptId, _Leftover] = field(default_factory=dict, init=False)
    _closed: dict[AttemptId, tuple[tuple[Instant, str], ...]] = field(default_factory=dict, init=False)

    @property
    def has_begun(self) -> bool:
        """Whether it has heard enough to act."""
        return self._orders is not None and self._found is not None

    @property
    def deadline(self) -> Instant:
        """When a Tick is due."""
        return min((self._deadline_of(attempt) for attempt in self._attempts.values()), default=NEVER)

    def step(self, event: AgentEvent, now: Instant) -> list[AgentEffect]:
        match event:
            case OrdersChanged(orders=orders, is_current=is_current):
                self._orders = {o.assignment.id: o for o in orders if o.assignment.node == self.node}
                self._is_current = is_current
                return self._follow_orders(now)
            case AttemptsFound(found=found):
                if self._found is not None:
                    return []  # once; what runs since then is in the table
                self._found = {each.attempt: _Found(attempt=each, at=now) for each in found}
                return self._follow_orders(now)
            case AttemptEvent(attempt=attempt_id, event=replica_event):
                return self._attempt_event(attempt_id, replica_event, now)
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)

    def statuses(self) -> dict[AttemptId, ReplicaStatus]:
        """What runs here, as the node's record says it."""
        told = {attempt_id: lifecycle.status(attempt.life) for attempt_id, attempt in self._attempts.items()}
        for attempt_id, leftover in self._leftovers.items():
            stuck = unkillable(leftover.pids_unkillable) if leftover.pids_unkillable else None
            told[attempt_id] = ReplicaStatus(
                attempt=attempt_id, state="stopping", reason=stuck or _NO_ORDER, run=leftover.run, pid=leftover.pid
            )
        for attempt_id, found in (self._found or {}).items() if self.has_begun else ():
            if (last := found.attempt.last) is not None and not last.gone:
                told[attempt_id] = ReplicaStatus(
                    attempt=attempt_id,
                    state="stopping" if last.stopping else "unready",
                    reason=_NOT_CURRENT,
                    run=last.run,
                    pid=last.pid if last.alive else None,
                )
        return dict(sorted(told.items()))

    def history(self, attempt: AttemptId) -> tuple[tuple[Instant, str], ...]:
        """What happened to it, oldest first; empty for what is not known here (any more)."""
        entry = self._attempts.get(attempt)
        return entry.life.history if entry is not None else self._closed.get(attempt, ())

    def check(self) -> None:
        """What must hold between two steps."""
        assert self.has_begun or not (self._attempts or self._leftovers)
        assert not self._attempts.keys() & self._leftovers.keys()
        assert self._found is None or not self._found.keys() & (self._attempts.keys() | self._leftovers.keys())
        assert not (self.has_begun and self._is_current and self._found), "orders are current, and not all is judged"
        assert len(self._closed) <= CLOSED_MAX
        for attempt_id, attempt in self._attempts.items():
            assert attempt.life.order.assignment.id == attempt.order.assignment.id == attempt_id
            assert attempt.is_ordered or not lifecycle.is_over(attempt.life), "over, and in no order: dropped"
            attempt.life.check()

    # --- orders -------------------------------------------------------------------------------------------------

    def _follow_orders(self, now: Instant) -> list[AgentEffect]:
        if self._orders is None or self._found is None:
            return []  # both sides must be known: orders, and what is here
        if not self._is_current:
            return self._look_after(self._orders, self._found, now)
        effects: list[AgentEffect] = []
        for attempt_id in sorted(self._attempts.keys() - self._orders.keys()):
            effects += self._unordered(attempt_id, now)
        for attempt_id in sorted(self._found.keys() - self._orders.keys()):
            effects += self._end_leftover(self._found.pop(attempt_id).at_now(now))
        for attempt_id, order in sorted(self._orders.items()):
            attempt = self._attempts.get(attempt_id)
            if attempt is not None:
                effects += self._ordered_again(attempt, order, now)
            elif attempt_id in self._leftovers:
                pass  # refused when nothing is left of it
            elif attempt_id in self._found:
                here = self._found.pop(attempt_id).at_now(now)
                effects += self._enter(order, lifecycle.adopt(order, here, now, advertise=self.advertise), now)
            elif attempt_id in self._closed:
                effects += self._refuse(order, now)
            else:
                effects += self._enter(order, lifecycle.begin(order, now, advertise=self.advertise), now)
        return effects

    def _look_after(
        self, orders: Mapping[AttemptId, Order], found: dict[AttemptId, _Found], now: Instant
    ) -> list[AgentEffect]:
        """Orders that are not current: what they say of what runs here is enough to keep it running, and no more."""
        effects: list[AgentEffect] = []
        for attempt_id in sorted(found.keys() & orders.keys()):
            here, order = found[attempt_id].at_now(now), orders[attempt_id]
            is_wanted = order.assignment.withdrawn is None and not order.outcome_known
            # What runs, and nothing else. What has ended may have been given back before this daemon started, and be
            # placed anew; and to sweep what a dead shim left would be a stop.
            if here.last is None or not here.last.alive or not here.shim_alive or not is_wanted:
                continue
            del found[attempt_id]
            # A restart that is wanted waits: it stops what runs.
            serial = min(order.assignment.restart_serial, here.last.restart_serial)
            order = replace(order, assignment=replace(order.assignment, restart_serial=serial))
            effects += self._enter(order, lifecycle.adopt(order, here, now, advertise=self.advertise), now)
        return effects

    def _refuse(self, order: Order, now: Instant) -> list[AgentEffect]:
        """An attempt is not begun twice: a batch would be executed again (P4). What became of it here was not kept."""
        reason = Reason(code="interrupted", text="it was ended here before, when no order for it was known")
        self._closed.pop(order.assignment.id, None)
        return self._enter(order, lifecycle.refuse(order, reason, now, advertise=self.advertise), now)

    def _ordered_again(self, attempt: _Attempt, order: Order, now: Instant) -> list[AgentEffect]:
        """The same assignment as before, maybe with a wish. The life cycle ignores what it has heard already."""
        attempt.order, attempt.is_ordered = order, True
        effects: list[AgentEffect] = []
        assignment = order.assignment
        effects += self._accepted(attempt, now)
        if assignment.withdrawn is not None:
            effects += self._hand_in(attempt, Withdrawn(reason=assignment.withdrawn), now)
        elif order.outcome_known:
            # Mostly what was reported from here. If not, whatever still runs has lost its purpose.
            effects += self._hand_in(attempt, Withdrawn(reason=_END_KNOWN), now)
        else:
            effects += self._hand_in(attempt, RestartRequested(serial=assignment.restart_serial), now)
        return effects

    def _accepted(self, attempt: _Attempt, now: Instant) -> list[AgentEffect]:
        """Of an order that was recalled too late. Said at once, and again like everything that is owed."""
        owed = self._owed(attempt)
        is_news = isinstance(owed, ReportAccepted) and self._report_due(attempt) <= now
        return self._told(attempt, [owed], now) if owed is not None and is_news else []

    def _unordered(self, attempt_id: AttemptId, now: Instant) -> list[AgentEffect]:
        """Its assignment left the log: mostly because its release was committed, else it was given up for lost."""
        attempt = self._attempts[attempt_id]
        attempt.is_ordered = False
        if lifecycle.is_over(attempt.life):
            self._close(attempt_id, attempt.life.history)
            return []
        return self._hand_in(attempt, Withdrawn(reason=_NO_ORDER), now)

    # --- attempts -----------------------------------------------------------------------------------------------

    def _enter(self, order: Order, stepped: lifecycle.Step, now: Instant) -> list[AgentEffect]:
        life, effects = stepped
        attempt = _Attempt(order=order, life=life)
        self._attempts[order.assignment.id] = attempt
        return [*self._told(attempt, effects, now), *self._accepted(attempt, now)]

    def _attempt_event(self, attempt_id: AttemptId, event: ReplicaEvent, now: Instant) -> list[AgentEffect]:
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            return self._hand_in(attempt, event, now)
        leftover = self._leftovers.get(attempt_id)
        if leftover is not None:
            return self._leftover_event(attempt_id, leftover, event, now)
        if self._found is not None and attempt_id in self._found:
            self._found[attempt_id] = self._found[attempt_id].after(event)
        return []

    def _hand_in(self, attempt: _Attempt, event: ReplicaEvent, now: Instant) -> list[AgentEffect]:
        attempt.life, effects = lifecycle.step(attempt.life, event, now)
        told = self._told(attempt, effects, now)
        if not attempt.is_ordered and lifecycle.is_over(attempt.life):
            self._close(attempt.life.order.assignment.id, attempt.life.history)
        return told

    def _told(self, attempt: _Attempt, effects: Iterable[ReplicaEffect], now: Instant) -> list[AgentEffect]:
        attempt_id = attempt.life.order.assignment.id
        told: list[AgentEffect] = []
        for effect in effects:
            if isinstance(effect, Report | ReportReleased | ReportRefused | ReportAccepted):
                if not attempt.is_ordered:
                    continue  # there is no assignment that it could be the end of
                attempt.reported = now
            told.append(
                AttemptEffect(attempt=attempt_id, order=attempt.order if attempt.is_ordered else None, effect=effect)
            )
        return told

    def _tick(self, now: Instant) -> list[AgentEffect]:
        effects: list[AgentEffect] = []
        for _, attempt in sorted(self._attempts.items()):
            if lifecycle.deadline(attempt.life) <= now:
                effects += self._hand_in(attempt, Tick(), now)
            owed = self._owed(attempt)
            if owed is not None and self._report_due(attempt) <= now:
                effects += self._told(attempt, [owed], now)
        return effects

    def _deadline_of(self, attempt: _Attempt) -> Instant:
        own = lifecycle.deadline(attempt.life)
        return min(own, self._report_due(attempt)) if self._owed(attempt) is not None else own

    def _owed(self, attempt: _Attempt) -> Owed | None:
        if not attempt.is_ordered:
            return None
        assignment = attempt.order.assignment
        is_recalled = assignment.recalled is not None and assignment.withdrawn is None
        return lifecycle.owed(attempt.life, outcome_known=attempt.order.outcome_known, is_recalled=is_recalled)

    @staticmethod
    def _report_due(attempt: _Attempt) -> Instant:
        return Instant(attempt.reported + REPORT_AGAIN_AFTER) if attempt.reported is not None else Instant(-math.inf)

    def _close(self, attempt_id: AttemptId, history: tuple[tuple[Instant, str], ...]) -> None:
        self._attempts.pop(attempt_id, None)
        self._leftovers.pop(attempt_id, None)
        self._closed[attempt_id] = history
        while len(self._closed) > CLOSED_MAX:
            del self._closed[next(iter(self._closed))]  # the oldest

    # --- leftovers ----------------------------------------------------------------------------------------------

    def _end_leftover(self, found: FoundAttempt) -> list[AgentEffect]:
        last = found.last
        if last is None or last.gone:
            if last is not None:
                self._close(found.attempt, ())
            return [_unordered_effect(found.attempt, Discard())]
        self._leftovers[found.attempt] = _Leftover(run=last.run, pid=last.pid if last.alive else None)
        announce = Announce(
            kind="replica.stopping",
            text=f"run {last.run} is ended: {_NO_ORDER.text}",
            data=(("run", str(last.run)), ("reason", _NO_ORDER.code)),
        )
        effects: list[ReplicaEffect] = [announce]
        if not found.shim_alive:
            effects.append(StopRun(run=last.run, signal="KILL", grace_seconds=0.0, why="supervisor_killed"))
        elif last.alive and not last.stopping:
            stop = StopRun(
                run=last.run, signal=LEFTOVER_SIGNAL, grace_seconds=LEFTOVER_GRACE_SECONDS, why=_NO_ORDER.code
            )
            effects.append(stop)
        return [_unordered_effect(found.attempt, effect) for effect in effects]

    def _leftover_event(
        self, attempt_id: AttemptId, leftover: _Leftover, event: ReplicaEvent, now: Instant
    ) -> list[AgentEffect]:
        match event:
            case TreeGone(run=run) if run == leftover.run:
                ended = Announce(kind="replica.ended", text="a leftover is gone", data=(("run", str(run)),))
                self._close(attempt_id, ())
                effects: list[AgentEffect] = [_unordered_effect(attempt_id, effect) for effect in (ended, Discard())]
                order = self._orders.get(attempt_id) if self._orders is not None else None
                return effects if order is None else effects + self._refuse(order, now)
            case Unkillable(run=run, pids=pids) if run == leftover.run and pids != leftover.pids_unkillable:
                self._leftovers[attempt_id] = replace(leftover, pids_unkillable=pids)
                return [_unordered_effect(attempt_id, Announce(kind="replica.unkillable", text=unkillable(pids).text))]
            case _:
                return []


def _unordered_effect(attempt: AttemptId, effect: ReplicaEffect) -> AttemptEffect:
    return AttemptEffect(attempt=attempt, order=None, effect=effect)
