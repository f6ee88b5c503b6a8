"""The address that others see is the one that the route gives, and nothing is sent to find it."""

from __future__ import annotations

from ipaddress import ip_address

from gpulayer.model.address import Address
from gpulayer.runtime.routes import default_source, source_towards


def test_the_way_to_loopback_is_loopback() -> None:
    assert source_towards(Address("127.0.0.1", 7451)) == "127.0.0.1"


def test_a_way_that_does_not_exist_has_no_address() -> None:
    # A scope is needed for link-local addresses, so there is no route without one.
    assert source_towards(Address("fe80::1", 7451)) is None


def test_the_default_route_never_gives_what_is_of_no_use_elsewhere() -> None:
    found = default_source()
    assert found is None or Address(str(ip_address(found)), 1).is_usable_elsewhere
