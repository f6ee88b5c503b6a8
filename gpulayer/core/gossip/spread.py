"""Which rumours are still to be told, and which fit into the packet at hand.

A rumour is told a bounded number of times, rarest first, riding on packets that leave anyway; what is about life and
death also gets packets of its own until it is through, the rest only for its first round. Hearing a rumour again is
counted as telling it: who has heard it often enough may be silent (feedback; Demers et al. 1987, §1.4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpulayer.core.gossip.messages import Alive, Dead, Delta, Left, Message, Newer, Rumour, Suspect, Vouch
from gpulayer.core.gossip.profile import Profile
from gpulayer.model.ids import NodeId
from gpulayer.model.units import NEVER, Instant

# A rumour about nearly every member and its record at once; above it the most told one goes.
RUMOURS_MAX = 8192
# So many that do not fit are passed over for smaller ones before a packet is taken as full.
MISFITS_MAX = 16
# Smaller than any message: with less room the packet is full.
LEAST_BYTES = 8
# Packets that a rumour gets for its own sake where it is not urgent: more than one, so that it grows; whom it does not
# reach so, the packets of probes will.
ROUTINE_PACKETS = 2
# A vouch is news for a moment only; one that would be told later holds up a timer that should run.
VOUCH_LIFE = 2.0

_Key = tuple[NodeId, str]


@dataclass(slots=True)
class _Item:
    message: Rumour
    size: int
    told: int
    """Times."""
    is_urgent: bool
    times: int
    """At most; 0: as often as the number of members asks for."""
    expires: Instant


class Spread:
    """`size_of`: bytes of a message in a packet."""

    def __init__(self, profile: Profile, size_of: Callable[[Message], int]) -> None:
        self._profile = profile
        self._size_of = size_of
        self._items: dict[_Key, _Item] = {}
        self._tiers: list[dict[_Key, None]] = [{}]
        """Keys by the number of times told; within a tier the one that has waited longest first."""
        self._subjects: dict[NodeId, set[_Key]] = {}
        self._fresh: set[_Key] = set()
        """Those that deserve a packet of their own."""

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_pressing(self) -> bool:
        """Whether packets should be sent for the sake of rumours alone."""
        return bool(self._fresh)

    def add(self, rumour: Rumour, now: Instant, *, is_urgent: bool = True, times: int = 0) -> None:
        """Tell it, `times` at most (0: as often as the number of members asks for); what it overtakes is told no more.
        The caller has judged that it is news."""
        key = _key(rumour)
        for other in list(self._subjects.get(key[0], ())):
            if other == key or _overtakes(rumour, self._items[other].message):
                self._remove(other)
        if len(self._items) >= RUMOURS_MAX:
            self._remove(next(iter(next(tier for tier in reversed(self._tiers) if tier))))
        expires = Instant(now + VOUCH_LIFE) if isinstance(rumour, Vouch) else NEVER
        self._items[key] = _Item(rumour, self._size_of(rumour), 0, is_urgent, times, expires)
        self._tiers[0][key] = None
        self._subjects.setdefault(key[0], set()).add(key)
        self._fresh.add(key)

    def heard_again(self, rumour: Rumour, members: int) -> None:
        """Somebody told us what we are telling. Of life and death nobody can hear too much."""
        item = self._items.get(_key(rumour))
        if item is not None and not item.is_urgent and item.message == rumour:
            self._told(_key(rumour), item, members)

    def forget(self, node: NodeId) -> None:
        for key in list(self._subjects.get(node, ())):
            self._remove(key)

    def pending(self, node: NodeId, kind: type[Rumour]) -> Rumour | None:
        """What is being told of `node` in messages of this kind."""
        for key in self._subjects.get(node, ()):
            if isinstance(self._items[key].message, kind):
                return self._items[key].message
        return None

    def pack(
        self, room: int, members: int, now: Instant, without: tuple[Message, ...] = (), *, is_heard: bool = True
    ) -> list[Rumour]:
        """Rumours for one packet with `room` bytes left, the least told first; they count as told if `is_heard`.
        `members`: the live ones. `without`: what the packet holds already."""
        if not self._items:
            return []
        picked: list[tuple[_Key, _Item]] = []
        misfits = 0
        for tier in self._tiers:
            for key in list(tier):
                if room < LEAST_BYTES or misfits >= MISFITS_MAX:
                    break
                item = self._items[key]
                if item.expires <= now:
                    self._remove(key)
                elif item.size > room:
                    misfits += 1
                elif item.message not in without:
                    room -= item.size
                    picked.append((key, item))
        if is_heard:
            for key, item in picked:
                self._told(key, item, members)
        return [item.message for _, item in picked]

    def check(self) -> None:
        assert len(self._items) <= RUMOURS_MAX, len(self._items)
        assert sum(map(len, self._tiers)) == len(self._items), "a rumour is in no tier, or in two"
        assert sum(map(len, self._subjects.values())) == len(self._items), "a rumour's subject does not know it"
        assert self._fresh <= self._items.keys(), self._fresh - self._items.keys()
        for key, item in self._items.items():
            assert key in self._tiers[item.told], (key, item)

    def _told(self, key: _Key, item: _Item, members: int) -> None:
        if item.told + 1 >= self._limit(item, members):
            self._remove(key)
            return
        del self._tiers[item.told][key]
        item.told += 1
        if item.told == len(self._tiers):
            self._tiers.append({})
        self._tiers[item.told][key] = None
        if not item.is_urgent and item.told >= ROUTINE_PACKETS:
            self._fresh.discard(key)

    def _limit(self, item: _Item, members: int) -> int:
        return item.times or max(1, self._profile.transmissions(members))

    def _remove(self, key: _Key) -> None:
        item = self._items.pop(key)
        del self._tiers[item.told][key]
        self._fresh.discard(key)
        of_subject = self._subjects[key[0]]
        of_subject.discard(key)
        if not of_subject:
            del self._subjects[key[0]]


def _key(rumour: Rumour) -> _Key:
    """One rumour per subject and kind; a suspicion is one per reporter, since their number counts."""
    match rumour:
        case Alive(run=run):
            return run.node, "alive"
        case Suspect(node=node, reporter=reporter):
            return node, f"suspect {reporter}"
        case Vouch(node=node, witness=witness):
            return node, f"vouch {witness}"
        case _:
            return rumour.node, type(rumour).__name__


def _overtakes(new: Rumour, old: Rumour) -> bool:
    """SWIM §4.2: what is newer about a member makes the older untrue. Its record is another matter, though how far that
    is an Alive says, too."""
    if isinstance(old, Newer):
        return isinstance(new, Alive) and _version(old) <= _version(new)
    if isinstance(new, Delta | Newer) or isinstance(old, Delta):
        return False
    match new:
        case Alive():
            if isinstance(old, Left):
                return old.epoch < new.run.epoch
            return not isinstance(old, Alive) and _order(old) < _order(new)
        case Suspect():
            if isinstance(old, Alive):
                return _order(old) <= _order(new)
            return isinstance(old, Suspect | Vouch) and _order(old) < _order(new)
        case Dead() | Left():
            return True
        case Vouch():
            return False


def _version(rumour: Alive | Newer) -> tuple[int, int, int]:
    epoch = rumour.run.epoch if isinstance(rumour, Alive) else rumour.epoch
    return epoch, rumour.gc_version, rumour.version


def _order(rumour: Alive | Suspect | Dead | Left | Vouch) -> tuple[int, int]:
    epoch = rumour.run.epoch if isinstance(rumour, Alive) else rumour.epoch
    return epoch, rumour.incarnation
