"""A node's side of its orders: asks the leader for them, keeps up with changes, and knows whether they are current.

Pure. The agent does what the orders say; runtime/order_store.py makes them durable; node/orders.py feeds this.

    ask ── Orders with the serial of the asking ──> answered ── OrdersConfirmed, OrdersDelta ──> …
     ^                                                 │
     └── a gap, a pause, a new link, OrdersDenied, three seconds of silence

What holds (P4): nothing is acted on before it is durable, and nothing that comes from below the highest stamp heard is
taken, also after a restart. While an asking is open only its answer counts: a confirmation that waited in a buffer
while this node or its link stood still says nothing about now.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import assert_never

from gpulayer.core.base import Tick
from gpulayer.core.orders.messages import (
    FollowerEffect,
    FollowerEvent,
    FollowOrders,
    FromLeader,
    HeardOrders,
    LeaderReached,
    LeaderUnreached,
    Orders,
    OrdersAsked,
    OrdersConfirmed,
    OrdersDelta,
    OrdersDenied,
    OrdersHeard,
    OrdersPersisted,
    OrderStamp,
    Paused,
    Persist,
    RegistryLearned,
    ToLeader,
)
from gpulayer.core.replica.messages import Order
from gpulayer.model.ids import NodeId
from gpulayer.model.units import NEVER, Duration, Instant

# Three confirmations: one may be lost with a slow moment, and the next be late.
CURRENT_SECONDS = Duration(3.0)
ASK_AGAIN_SECONDS = Duration(1.0)
# Below it a pause is the ordinary lateness of a busy host; the confirmations in the buffers are hardly older.
PAUSE_SECONDS_MAX = Duration(1.0)
HISTORY_MAX = 200

NOTHING_HEARD = HeardOrders(stamp=OrderStamp(0, 0, 0))
_LONG_AGO = Instant(-NEVER)


class Follower:
    """Events in, effects out. The first Tick, which is due at once, tells what is known from before."""

    def __init__(self, kept: HeardOrders | None = None) -> None:
        """`kept`: what the store holds; None where nothing was ever heard."""
        self._durable = kept or NOTHING_HEARD
        self._heard = self._durable
        """The newest; the same object as what is durable once it is."""
        self._writing: HeardOrders | None = None
        self._leader: NodeId | None = None
        self._serial = 0
        self._ask_at = NEVER
        self._is_answered = False
        self._answer: HeardOrders | None = None
        """The newest answer, until it is durable: what is older is not current, however lately we heard."""
        self._current_until = _LONG_AGO
        self._told: FollowOrders | None = None
        self._parts: list[Orders] = []
        """Of an answer that is not all here."""
        self._refused = ""
        self._history: deque[tuple[Instant, str]] = deque(maxlen=HISTORY_MAX)

    @property
    def deadline(self) -> Instant:
        if self._told is None:
            return _LONG_AGO
        return min(self._ask_at, self._current_until if self._told.is_current or self._is_answered else NEVER)

    @property
    def stamp(self) -> OrderStamp:
        """The highest heard."""
        return self._heard.stamp

    @property
    def is_current(self) -> bool:
        """As it was told last."""
        return self._told is not None and self._told.is_current

    @property
    def refused(self) -> str:
        """Why the newest answer was not taken; empty when it was. For people: it does not go away by itself."""
        return self._refused

    def history(self) -> tuple[tuple[Instant, str], ...]:
        return tuple(self._history)

    def step(self, event: FollowerEvent, now: Instant) -> list[FollowerEffect]:
        effects = self._begin() if self._told is None else []
        match event:
            case LeaderReached(node=node):
                self._leader = node
                self._ask(now, f"the leader {node} is reached")
            case LeaderUnreached():
                self._leader, self._is_answered, self._ask_at = None, False, NEVER
                self._note(now, "no leader is reached")
            case FromLeader(node=node, message=message):
                if node == self._leader:  # else a last word over a link that is gone
                    effects += self._from_leader(message, now)
            case OrdersPersisted(stamp=stamp):
                effects += self._persisted(stamp)
            case Paused(seconds=seconds):
                if seconds > PAUSE_SECONDS_MAX:
                    self._distrust(now, f"stood still for {seconds:.1f} s")
            case Tick():
                pass
            case _:
                assert_never(event)
        return [*effects, *self._proceed(now)]

    def check(self) -> None:
        """Asserts what must hold between two steps."""
        assert self._durable.stamp <= self._heard.stamp, "what is durable was heard"
        if self._writing is None:
            assert self._durable is self._heard, "heard, and not on its way to the disk"
        else:
            assert self._durable.stamp <= self._writing.stamp <= self._heard.stamp
        if self._told is not None:
            assert self._told.orders is self._durable.orders, "what is acted on is durable"
            assert not self._told.is_current or self._answer is None, "acts on what is older than the answer"
        assert self._leader is not None or self._ask_at == NEVER, "nobody to ask"
        assert not (self._is_answered and self._ask_at != NEVER), "answered, and asking"

    # --- asking ---------------------------------------------------------------------------------------------------

    def _ask(self, now: Instant, why: str) -> None:
        self._is_answered = False
        self._serial += 1
        self._parts = []
        self._ask_at = now if self._leader is not None else NEVER
        self._note(now, f"asks for orders: {why}")

    def _distrust(self, now: Instant, why: str) -> None:
        """What is held may be old: not current before the answer to a new asking."""
        self._current_until = _LONG_AGO
        self._ask(now, why)

    def _begin(self) -> list[FollowerEffect]:
        self._told = FollowOrders(orders=self._durable.orders, is_current=False)
        return [*self._learned(None, self._durable), self._told]

    def _proceed(self, now: Instant) -> list[FollowerEffect]:
        effects: list[FollowerEffect] = []
        if self._is_answered and self._current_until <= now:
            self._ask(now, f"nothing was confirmed for {CURRENT_SECONDS:g} s")
        if self._ask_at <= now:
            assert self._leader is not None
            self._ask_at = Instant(now + ASK_AGAIN_SECONDS)
            effects.append(ToLeader(node=self._leader, message=OrdersAsked(serial=self._serial, heard=self.stamp)))
        if self._writing is None and self._heard is not self._durable:
            self._writing = self._heard
            effects.append(Persist(stamp=self._heard.stamp, orders=self._heard.orders, registry=self._heard.registry))
        is_current = now < self._current_until and self._answer is None
        told = self._told
        if told is None or told.is_current != is_current or told.orders is not self._durable.orders:
            self._told = FollowOrders(orders=self._durable.orders, is_current=is_current)
            effects.append(self._told)
            if told is not None and told.is_current != is_current:
                self._note(now, f"orders of {_text(self._durable.stamp)} are {'' if is_current else 'not '}current")
        return effects

    # --- answers --------------------------------------------------------------------------------------------------

    def _from_leader(
        self, message: Orders | OrdersDelta | OrdersConfirmed | OrdersDenied, now: Instant
    ) -> list[FollowerEffect]:
        match message:
            case Orders():
                return self._part(message, now) if message.serial == self._serial else []
            case OrdersDelta():
                # Before the answer it may be one from before the asking; the answer holds all that it could say.
                return self._changed(message, now) if self._is_answered else []
            case OrdersConfirmed(stamp=stamp):
                if self._is_answered and stamp == self.stamp:
                    self._current_until = Instant(now + CURRENT_SECONDS)
                elif self._is_answered and stamp > self.stamp:
                    self._distrust(now, f"{_text(stamp)} is confirmed, {_text(self.stamp)} is what came")
                return []
            case OrdersDenied(leader=leader):
                if self._is_answered:
                    self._distrust(now, "who led does not lead any more")
                self._ask_at = Instant(now + ASK_AGAIN_SECONDS)
                self._note(now, f"denied; {leader or 'nobody that it knows'} leads")
                return []
            case _:
                assert_never(message)

    def _part(self, part: Orders, now: Instant) -> list[FollowerEffect]:
        """The answer once its last part is here. Parts come in their order; what does not follow is of a lost one."""
        if part.part == 0:
            self._parts = []
        elif part.part != len(self._parts) or self._parts[0].stamp != part.stamp or self._parts[0].parts != part.parts:
            return []
        self._parts.append(part)
        if len(self._parts) < part.parts:
            if not self._is_answered:
                self._ask_at = Instant(now + ASK_AGAIN_SECONDS)  # it is on its way
            return []
        first, orders = self._parts[0], tuple(order for each in self._parts for order in each.orders)
        self._parts = []
        return self._answered(replace(first, orders=orders), now)

    def _answered(self, answer: Orders, now: Instant) -> list[FollowerEffect]:
        if answer.stamp < self.stamp:
            text = (
                f"orders of {_text(answer.stamp)} from {self._leader} are not followed: {_text(self.stamp)} was heard"
            )
            if text != self._refused:
                self._note(now, text)
            self._refused = text
            return []  # asked again, until somebody answers who knows what we know
        self._refused = ""
        self._is_answered, self._ask_at = True, NEVER
        self._current_until = Instant(now + CURRENT_SECONDS)
        effects = self._hear(HeardOrders(stamp=answer.stamp, orders=answer.orders, registry=answer.registry), now)
        self._answer = self._heard if self._heard is not self._durable else None
        return effects

    def _changed(self, delta: OrdersDelta, now: Instant) -> list[FollowerEffect]:
        if delta.stamp <= self.stamp:
            return []  # heard already
        if delta.after != self.stamp:
            self._distrust(now, f"{_text(delta.after)} was missed")
            return []
        self._current_until = Instant(now + CURRENT_SECONDS)
        orders = {order.assignment.id: order for order in self._heard.orders}
        for attempt in delta.gone:
            orders.pop(attempt, None)
        orders |= {order.assignment.id: order for order in delta.changed}
        registry = self._heard.registry
        if delta.admitted or delta.removed:
            registry = tuple(sorted({*registry, *delta.admitted} - set(delta.removed)))
        return self._hear(HeardOrders(stamp=delta.stamp, orders=tuple(orders.values()), registry=registry), now)

    def _hear(self, heard: HeardOrders, now: Instant) -> list[FollowerEffect]:
        before = self._heard
        if _same(heard.orders, before.orders):
            # The same object for equal ones: a new stamp is no news for the agent, and without one, none for the disk.
            heard = replace(heard, orders=before.orders)
            if heard == before:
                return []
        self._heard = heard
        self._note(now, f"heard {_text(heard.stamp)}: {len(heard.orders)} orders")
        return self._learned(before, heard)

    def _learned(self, before: HeardOrders | None, heard: HeardOrders) -> list[FollowerEffect]:
        """Who may exist is no order, and harms nobody if it is forgotten again: it does not wait for the disk."""
        if not heard.registry or (before is not None and before.registry == heard.registry):
            return []
        return [RegistryLearned(nodes=frozenset(heard.registry))]

    def _persisted(self, stamp: OrderStamp) -> list[FollowerEffect]:
        if self._writing is None or self._writing.stamp != stamp:
            return []
        self._durable, self._writing = self._writing, None
        # What was on its way to the disk before the answer came may be durable now, and the answer not yet.
        if self._answer is not None and (self._durable is self._answer or stamp > self._answer.stamp):
            self._answer = None
        if self._leader is None:
            return []
        return [ToLeader(node=self._leader, message=OrdersHeard(stamp=stamp))]

    def _note(self, now: Instant, text: str) -> None:
        self._history.append((now, text))


def _same(new: tuple[Order, ...], old: tuple[Order, ...]) -> bool:
    return len(new) == len(old) and {o.assignment.id: o for o in new} == {o.assignment.id: o for o in old}


def _text(stamp: OrderStamp) -> str:
    return f"term {stamp.term} index {stamp.index}" + (
        f" of generation {stamp.generation}" if stamp.generation != 1 else ""
    )
