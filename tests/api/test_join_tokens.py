"""Tokens that let hosts join, and the keys of the cluster: made by admins, counted, told by id, shown once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from gpulayer.wire.join_token import parse_join_token

if TYPE_CHECKING:
    from tests.api.conftest import Daemon

HERE = {"advertise": "127.0.0.1"}


def made(daemon: Daemon, **keys: object) -> Any:
    answer = daemon.ask("POST", "/v1/join-tokens", HERE | keys)
    assert answer.status == 201, answer
    assert answer.headers["cache-control"] == "no-store"
    return answer.json


def listed(daemon: Daemon) -> dict[str, Any]:
    return {token["id"]: token for token in daemon.ask("GET", "/v1/tokens").json["tokens"]}


def test_a_join_token_is_shown_once_and_listed_without_its_secret(daemon: Daemon) -> None:
    token = made(daemon, uses=2, lasts_seconds=60)
    assert parse_join_token(token["token"]).text == token["token"]
    assert token["seed"].startswith("127.0.0.1:")
    assert token["bind"] is None
    answer = daemon.ask("GET", "/v1/tokens")
    assert token["token"] not in answer.body.decode()
    seen = listed(daemon)[token["id"]]
    assert (seen["role"], seen["uses_left"]) == ("join", 2)
    assert 0 < seen["expires_at_utc"] - time.time() <= 60


def test_it_pins_the_authority_of_the_cluster(daemon: Daemon) -> None:
    authority = daemon.ask("GET", "/v1/cluster").json["authority"]
    assert parse_join_token(made(daemon)["token"]).pin == authority


def test_a_revoked_one_is_gone_from_the_list(daemon: Daemon) -> None:
    token = made(daemon)
    assert daemon.ask("DELETE", f"/v1/tokens/{token['id']}").status == 204
    assert token["id"] not in listed(daemon)
    assert daemon.ask("DELETE", f"/v1/tokens/{token['id']}").status == 404


def test_a_node_that_only_its_own_host_reaches_makes_none_unless_it_is_told_to(daemon: Daemon) -> None:
    answer = daemon.ask("POST", "/v1/join-tokens")
    assert answer.status == 409
    assert "--bind" in answer.json["hint"]
    assert "--advertise 127.0.0.1" in answer.json["hint"]


@pytest.mark.parametrize(
    "wrong",
    [{"uses": 0}, {"uses": 1001}, {"uses": 1.5}, {"lasts_seconds": 0}, {"lasts_seconds": 1e9}, {"advertise": "a b"}],
)
def test_what_makes_no_sense_is_refused(daemon: Daemon, wrong: dict[str, object]) -> None:
    answer = daemon.ask("POST", "/v1/join-tokens", HERE | wrong)
    assert (answer.status, answer.json["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("role", ["read", "submit"])
def test_only_an_admin_lets_hosts_in_and_turns_keys(daemon: Daemon, role: str) -> None:
    assert daemon.ask("POST", "/v1/join-tokens", HERE, role=role).status == 403
    assert daemon.ask("POST", "/v1/cluster/rotate-keys", role=role).status == 403
    assert daemon.ask("GET", "/v1/cluster", role=role).status == 200


def test_a_join_token_is_no_token_of_the_api(daemon: Daemon) -> None:
    headers = {"Authorization": f"Bearer {made(daemon)['token']}"}
    assert daemon.ask("GET", "/v1/status", role="", headers=headers).status == 401


def test_a_rotation_begins_once_and_tells_ids_only(own_daemon: Daemon) -> None:
    (old,) = own_daemon.ask("GET", "/v1/cluster").json["keys"]["ring"]
    answer = own_daemon.ask("POST", "/v1/cluster/rotate-keys", {})
    assert answer.status == 200
    assert answer.json["version"] >= 2
    ids = {key["id"] for key in answer.json["ring"]}
    assert old["id"] in ids
    assert len(ids) == 2
    assert set(answer.json["ring"][0]) == {"id", "installed_at_utc", "seals"}
    assert own_daemon.ask("POST", "/v1/cluster/rotate-keys", {}).status == 409, "the old key opens for a day"
