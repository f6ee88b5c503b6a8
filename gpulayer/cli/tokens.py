"""gpulayer token create, list, revoke."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.render import Row, fitted_table, note, say, say_json, utc
from gpulayer.model.access import APPROVED_SECONDS, APPROVED_SECONDS_ALONE
from gpulayer.model.errors import InvalidRequest
from gpulayer.model.units import format_duration, parse_duration


def token_create(
    *,
    role: Literal["admin", "submit", "read"] | None = None,
    label: str = "",
    join: bool = False,
    uses: int | None = None,
    lasts: Annotated[str | None, Parameter(name="--for")] = None,
    advertise: str | None = None,
    json: bool = False,
    connection: Connection = LOCAL,
) -> None:
    """Make a token and print it, alone, on stdout; with --join the command for the next host. It is never shown again.

    Parameters
    ----------
    role
        Of a token for the API: read may look; submit may also submit, cancel and restart jobs; admin everything.
    label
        What it is for, to know it by in the list.
    join
        A token that lets hosts join the cluster, as the command to run on them.
    uses
        How many hosts it lets in (default 1).
    lasts
        For how long, such as 15m or 24h (default 1h).
    advertise
        Address to join by (default: the one of this node). 127.0.0.1: for more nodes on this host.
    json
        One JSON document, with the id.
    """
    client = connection.client()
    if join:
        if role is not None or label:
            raise InvalidRequest("--join and --role are for different tokens", hint="create one after the other")
        seconds = parse_duration(lasts if lasts is not None else "1h", "--for")
        made = client.create_join_token(
            uses=1 if uses is None else uses, lasts_seconds=seconds, advertise=advertise or ""
        )
        if json:
            say_json(made)
            return
        say(_command_to_join(made))
        hosts = "1 host" if made["uses_left"] == 1 else f"{made['uses_left']} hosts"
        note(
            f"lets {hosts} in within {format_duration(seconds)}, each with this command; "
            f"revoke it with: gpulayer token revoke {made['id']}"
        )
        return
    if role is None:
        raise InvalidRequest(
            "what kind of token?", hint="--role admin, submit or read for the API; --join for a host that joins"
        )
    if uses is not None or lasts is not None or advertise is not None:
        raise InvalidRequest("--uses, --for and --advertise are for --join", hint="leave them out, or say --join")
    made = client.create_token(role, label)
    if json:
        say_json(made)
        return
    say(made["token"])
    note(f"role {made['role']}; revoke it with: gpulayer token revoke {made['id']}")


def _command_to_join(made: dict[str, Any]) -> str:
    """The token as a variable: who may list processes sees their words, and not what they were given beside."""
    if made["bind"] is not None:
        where = f"--bind {made['bind']}"
    else:  # one more node on this host: what it has of its own is not what the first one has
        where = f"--data-dir ./gpulayer-{made['id']} --api-port 0 --peer-port 0"
    return f"GPULAYER_JOIN_TOKEN={made['token']} gpulayer up {where} --join {shlex.quote(made['seed'])}"


def token_list(*, json: bool = False, connection: Connection = LOCAL) -> None:
    """Tokens by id, role and label, those for joining with what is left of them; never the secrets.

    Parameters
    ----------
    json
        One JSON document: an array.
    """
    found = connection.client().tokens()
    if json:
        say_json(found)
        return
    rows = [
        Row((token["id"], token["role"], utc(token["created_at_utc"]), token["label"] or _left_of(token)))
        for token in found
    ]
    fitted_table(("ID", "ROLE", "CREATED", "LABEL"), rows, is_whole_elsewhere=True)


def _left_of(token: dict[str, Any]) -> str:
    if token["uses_left"] is None:
        return ""
    uses = "1 use" if token["uses_left"] == 1 else f"{token['uses_left']} uses"
    return f"{uses} left, until {utc(token['expires_at_utc'])}"


def token_revoke(token_id: str, /, *, connection: Connection = LOCAL) -> None:
    """Refuse a token from now on; other nodes hear of it within seconds.

    Parameters
    ----------
    token_id
        As `gpulayer token list` shows it.
    """
    connection.client().revoke_token(token_id)
    alone = format_duration(APPROVED_SECONDS_ALONE)
    note(
        f"token {token_id} is revoked: nobody joins and nothing is changed with it any more, and in "
        f"{format_duration(APPROVED_SECONDS)} no node answers it (one that does not reach the log: in {alone})"
    )
