"""The numbers of the protocol. All nodes of a cluster use the same; tests shorten some."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds, unless a name says otherwise. The defaults are for a local network."""

    probe_interval: float = 0.4
    """One round; multiplied by local health score + 1. When somebody begins to probe a given member is exponential with
    this mean at any N: one in a hundred waits for 4.6 of it, and for one more until that has failed (SWIM §3.1)."""
    probe_jitter: float = 0.1
    """± this part of the interval."""
    direct_timeout: float = 0.2
    """What is left of the round is for the relays and the stream."""
    relays: int = 3
    nack_part: float = 0.8
    """Of the indirect window; after this part of it a relay says that it heard nothing."""
    gossip_interval: float = 0.2
    gossip_fanout: int = 3
    transmit_factor: int = 6
    """A rumour is sent at most this · ceil(log10(N + 1)) times."""
    delta_transmissions: int = 1
    """Of a small change that rides along, at any N: whom it misses hears of its version, and pulls."""
    delta_owner_transmissions: int = 3
    """By its owner: so many chains begin."""
    suspicion_min: float = 3.0
    suspicion_per_log10: float = 1.5
    suspicion_max_factor: float = 6.0
    confirmations: int = 2
    witnesses: int = 4
    health_max: int = 8
    health_unreliable: int = 4
    """From this score on a reporter's word confirms nothing."""
    impaired_after: float = 30.0
    accusations_min: int = 3
    accusations_part: float = 0.2
    accusations_window: float = 10.0
    """More than max(min, part · N) suspicions begun here within the window: the trouble is mine."""
    late_wake: float = 0.3
    sync_interval: float = 10.0
    reconnect_interval: float = 10.0
    refusal_grace: float = 0.1
    """Between the second refusal and the death that it proves: for a word that the member lives after all."""
    tombstone: float = 24 * 3600.0
    record_tombstone: float = 120.0
    """So long a deleted key of our record is remembered; who misses it for longer is sent the whole record."""
    leave_timeout: float = 3.0
    leave_acks: int = 3
    link_idle: float = 60.0
    packet_bytes_max: int = 1200
    delta_bytes_max: int = 600
    """A change above this is announced and pulled, not pushed."""
    pull_jitter: float = 0.5
    members_max: int = 4096
    new_members_per_packet: int = 32
    incarnation_jump_max: int = 1000

    def suspicion_bounds(self, members: int) -> tuple[float, float]:
        """(T_min, T_max) in a cluster of so many live members."""
        least = max(self.suspicion_min, self.suspicion_per_log10 * math.log10(max(members, 1)))
        return least, self.suspicion_max_factor * least

    def confirmations_wanted(self, members: int, able: int) -> int:
        """K: how many others must confirm before a suspicion has its shortest timeout. `able`: live members that are
        not suspected themselves, this one too. One of them began the suspicion, so no more than the rest can confirm
        it; a node that doubts all others has nobody to confirm it, and waits all the same."""
        if members <= 3:
            return 0
        return min(1 if members <= 5 else self.confirmations, self.confirmations, max(1, able - 1))

    def suspicion_timeout(self, members: int, able: int, confirmed: int) -> float:
        """Lifeguard's: T_max − (T_max − T_min) · log(C + 1) / log(K + 1), never below T_min."""
        least, most = self.suspicion_bounds(members)
        wanted = self.confirmations_wanted(members, able)
        if wanted == 0:
            return least
        return max(least, most - (most - least) * math.log(confirmed + 1) / math.log(wanted + 1))

    def transmissions(self, members: int) -> int:
        return self.transmit_factor * math.ceil(math.log10(members + 1))
