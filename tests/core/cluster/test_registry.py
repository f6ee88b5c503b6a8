"""Who is let into the cluster, under which name, how often by one token, and who is let go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulayer.core.cluster.apply import Accepted, Rejected
from gpulayer.core.cluster.commands import (
    CreateCluster,
    CreateJoinToken,
    FoundTrust,
    JoinNode,
    RemoveNode,
    RevokeToken,
    StopJob,
)
from gpulayer.core.cluster.trust import key_id
from gpulayer.core.leader import JOIN_TOKENS_KEPT_SECONDS, overdue
from gpulayer.model.ids import JobId, NodeId, TokenId
from gpulayer.model.trust import Authority, GossipKey
from gpulayer.wire.codec import decode, encode
from tests.core.cluster.states import CANCELLED, Cluster, admit, capabilities, ended, gpu, service, submit, succeeded

SECRET = b"s" * 32
FOUNDED = FoundTrust(
    authority=Authority(certificate_pem="CERT", private_key_pem="PRIVATE"),
    key=GossipKey(id=key_id(SECRET), secret=SECRET),
)


def token(id: str = "t-1", *, uses: int = 1, lasts: float = 3600.0) -> CreateJoinToken:
    return CreateJoinToken(token=TokenId(id), digest=f"digest-{id}", uses=uses, expires_at_utc=lasts)


def join(name: str, *, node: str = "", token: str = "t-1", derived: bool = False, **more: Any) -> JoinNode:
    return JoinNode(
        node=NodeId(node or f"n-{name}"),
        name=name,
        name_is_derived=derived,
        advertise="10.0.0.9",
        capabilities=more.pop("capabilities", capabilities()),
        token_digest=f"digest-{token}",
        **more,
    )


def founded(*more: Any) -> Cluster:
    return Cluster(CreateCluster(cluster_id="c-1"), admit("n1", gpu("g0")), FOUNDED, *more)


def accepted(cluster: Cluster) -> Accepted:
    result = cluster.applied[-1].result
    assert isinstance(result, Accepted), result
    return result


def code(cluster: Cluster) -> str:
    result = cluster.applied[-1].result
    assert isinstance(result, Rejected), result
    return result.code


def uses_left(cluster: Cluster, id: str = "t-1") -> int:
    return cluster.state.join_tokens[TokenId(id)].uses_left


# --- joining --------------------------------------------------------------------------------------------------------


def test_a_host_with_a_token_becomes_a_node_and_spends_one_use() -> None:
    cluster = founded(token(uses=2), join("n2"))
    assert accepted(cluster).name == "n2"
    assert cluster.kinds == ["node.admitted"]
    assert uses_left(cluster) == 1
    assert cluster.state.nodes[NodeId("n-n2")].advertise == "10.0.0.9"


def test_a_token_is_refused_when_it_is_unknown_used_up_or_expired_and_the_code_says_which() -> None:
    cluster = founded(token(lasts=100.0))
    cluster.do(join("n2", token="t-9"))
    assert code(cluster) == "bad_token"
    cluster.do(join("n2"), join("n3"))
    assert code(cluster) == "token_used_up"
    cluster.do(token("t-2", lasts=100.0))
    cluster.do(join("n3", token="t-2"), seconds_later=200.0)
    assert code(cluster) == "token_expired"
    assert "n-n3" not in cluster.state.nodes


def test_a_refused_host_spends_nothing() -> None:
    cluster = founded(token(), join("n1", node="n-other"))
    assert code(cluster) == "duplicate_name"
    cluster.do(join("n2", capabilities=capabilities(gpu("g0"), gpu("g0"))))
    assert code(cluster) == "invalid_request"
    assert uses_left(cluster) == 1


def test_a_derived_name_in_use_gets_a_number_and_an_explicit_one_is_refused() -> None:
    cluster = founded(token(uses=3), join("n1", node="n-a", derived=True))
    assert accepted(cluster).name == "n1-2"
    cluster.do(join("n1", node="n-b", derived=True))
    assert accepted(cluster).name == "n1-3"
    cluster.do(join("n1", node="n-c"))
    assert code(cluster) == "duplicate_name"


def test_a_known_node_that_joins_again_keeps_its_name_and_its_time_of_admission() -> None:
    """Its certificate was lost or has expired."""
    cluster = founded(token(uses=3), join("n1", node="n-a", derived=True))
    first = cluster.state.nodes[NodeId("n-a")]
    cluster.do(join("n1", node="n-a", derived=True))
    assert accepted(cluster).name == "n1-2"
    assert cluster.kinds == ["node.rejoined"]
    assert cluster.state.nodes[NodeId("n-a")] == first
    assert uses_left(cluster) == 1


def test_who_lost_the_answer_asks_again_with_the_same_key_and_spends_nothing() -> None:
    cluster = founded(token(), join("n2", key_digest="k"))
    cluster.do(join("n2", key_digest="k"))
    assert accepted(cluster).name == "n2"
    assert uses_left(cluster) == 0
    cluster.do(join("n2", key_digest="other"))
    assert code(cluster) == "token_used_up", "a token that was spent certifies no other key"
    cluster.do(join("n3", key_digest="k"))
    assert code(cluster) == "token_used_up"


def test_a_revoked_token_lets_nobody_in() -> None:
    cluster = founded(token(), RevokeToken(token=TokenId("t-1")))
    assert cluster.kinds == ["join_token.revoked"]
    cluster.do(join("n2"))
    assert code(cluster) == "bad_token"


def test_no_token_can_be_made_before_there_is_an_authority() -> None:
    cluster = Cluster(CreateCluster(cluster_id="c-1"), token())
    assert code(cluster) == "refused"


@pytest.mark.parametrize(
    "wrong",
    [
        token(uses=0),
        token(uses=1001),
        token(lasts=0.0),
        token(lasts=1e9),
        token(lasts=float("nan")),
        replace(token(), digest=""),
        replace(token(), token=TokenId("")),
    ],
)
def test_a_token_has_bounds(wrong: CreateJoinToken) -> None:
    cluster = founded(wrong)
    assert code(cluster) == "invalid_request"
    assert not cluster.state.join_tokens


def test_an_expired_token_is_forgotten_a_day_later_and_a_good_one_never() -> None:
    cluster = founded(token(lasts=100.0), token("t-2", lasts=20 * 86400.0))
    cluster.do(admit("n1"), seconds_later=100.0)
    assert overdue(cluster.state).join_tokens == ()
    cluster.do(admit("n1"), seconds_later=JOIN_TOKENS_KEPT_SECONDS)
    command = overdue(cluster.state)
    assert command.join_tokens == ("t-1",)
    cluster.do(replace(command, join_tokens=(TokenId("t-1"), TokenId("t-2"))))
    assert list(cluster.state.join_tokens) == ["t-2"]


def test_no_event_and_no_refusal_has_a_secret_in_it() -> None:
    cluster = founded(token(), join("n2"), join("n3"), RevokeToken(token=TokenId("t-1")))
    told = repr([(applied.events, applied.result) for applied in cluster.applied])
    for secret in ("PRIVATE", "digest-t-1", repr(SECRET)[2:-1]):
        assert secret not in told


# --- leaving --------------------------------------------------------------------------------------------------------


def test_a_node_with_assignments_is_not_removed_and_one_without_is() -> None:
    cluster = founded(submit(service(gpus=1)))
    cluster.plan()
    cluster.do(RemoveNode(node=NodeId("n-n1")))
    assert code(cluster) == "refused"
    assert "web.0" in cluster.applied[-1].result.message  # type: ignore[union-attr]
    cluster.do(StopJob(job=JobId("j-web"), reason=CANCELLED), ended(succeeded()), RemoveNode(node=NodeId("n-n1")))
    assert cluster.kinds == ["node.removed"]
    assert not cluster.state.nodes
    cluster.do(RemoveNode(node=NodeId("n-n1")))
    assert code(cluster) == "not_found"


def test_a_removed_node_comes_back_as_a_new_one_with_a_new_token() -> None:
    cluster = founded(token(uses=2), join("n2"), RemoveNode(node=NodeId("n-n2")), join("n2"))
    assert cluster.kinds == ["node.admitted"]


# --- what was stored before -----------------------------------------------------------------------------------------


def test_a_state_without_trust_is_read_as_it_was() -> None:
    state = Cluster(CreateCluster(cluster_id="c-1"), admit("n1")).state
    assert state.authority is None
    assert b"authority" not in encode(state), "what was not there before is not written either"
    assert decode(type(state), encode(state)) == state


def test_a_state_with_trust_comes_back_from_its_bytes() -> None:
    state = founded(token(), join("n2", key_digest="k")).state
    assert decode(type(state), encode(state)) == state
