"""Where the nodes of a cluster are, as one of them tells: so what `gpulayer login` has kept goes on leading there when
nodes come and go.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpulayer.model.address import split_host_port
from gpulayer.model.errors import StorageFailed
from gpulayer.model.places import API_PORT

if TYPE_CHECKING:
    from gpulayer.cli.connection import Connection


def endpoints_of(nodes: Iterable[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Host and port of the API of each that has one."""
    return [split_host_port(node["api"], API_PORT, "api") for node in nodes if isinstance(node.get("api"), str)]


def refresh(connection: Connection, nodes: Iterable[Mapping[str, Any]]) -> None:
    """Keep where these nodes are, if they were asked by a login of this user. The endpoint that was logged in to stays
    the first: it may be a name that no node knows of."""
    from gpulayer.client.address import Secure, find_address
    from gpulayer.client.logins import read_logins, save

    address = find_address(connection.url, connection.data_dir, os.environ)
    if not isinstance(address, Secure) or len(address.trusts) != 1 or not address.trusts[0].cluster:
        return
    known = next((each for each in read_logins(os.environ) if each.trust == address.trusts[0]), None)
    told = endpoints_of(nodes)
    if known is None or not told:
        return
    endpoints = tuple(dict.fromkeys((known.endpoints[0], *told)))
    if endpoints != known.endpoints:
        # It is asked all the same where it was before.
        with suppress(StorageFailed):
            save(replace(known, endpoints=endpoints), os.environ)
