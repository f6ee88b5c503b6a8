"""What the agreement is made of: who leads and votes, how far the log is; and the keys that close a cluster to others.

Keys are told by their ids and states. A secret of the cluster is in no answer.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gpulayer.api.query import Query
from gpulayer.api.requests import answer, body_of, node_of
from gpulayer.core.cluster.commands import InstallKey
from gpulayer.model.cluster import ClusterState
from gpulayer.runtime import trust
from gpulayer.wire.http import Json, key_ring_to_json, parse_empty


async def cluster_status(request: Request) -> Response:
    Query(request, ())
    node = node_of(request)
    state = node.state
    voters = sorted(seen.name for seen in node.table().nodes.values() if seen.is_voter)
    return answer(
        {
            "cluster_id": state.cluster_id,
            "leader": node.leader_name or None,
            "voters": voters,
            "standbys": [],
            "term": state.term,
            "index": state.index,
            "generation": state.generation,
            "nodes": len(state.nodes),
            "authority": trust.pin(state.authority.certificate_pem) if state.authority is not None else None,
            "keys": _keys(state),
        }
    )


async def rotate_keys(request: Request) -> Response:
    """The first step. The leader takes the second one when every live node has the key, and the last a day later."""
    node = node_of(request)
    Query(request, ())
    parse_empty(body_of(request))
    await node.propose(InstallKey(key=trust.new_gossip_key(node.new_secret())))
    return answer(_keys(node.state))


def _keys(state: ClusterState) -> Json:
    return key_ring_to_json(state.key_ring)


ROUTES = [
    Route("/v1/cluster", cluster_status, methods=["GET"]),
    Route("/v1/cluster/rotate-keys", rotate_keys, methods=["POST"]),
]
