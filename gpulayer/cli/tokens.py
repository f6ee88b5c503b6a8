"""gpulayer token create, list, revoke."""

from __future__ import annotations

from typing import Literal

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.render import Row, fitted_table, note, say, say_json, utc


def token_create(
    *,
    role: Literal["admin", "submit", "read"],
    label: str = "",
    json: bool = False,
    connection: Connection = LOCAL,
) -> None:
    """Make an API token and print it, alone, on stdout. It is never shown again.

    Parameters
    ----------
    role
        read may look; submit may also submit, cancel and restart jobs; admin everything.
    label
        What it is for, to know it by in the list.
    json
        One JSON document, with the id.
    """
    made = connection.client().create_token(role, label)
    if json:
        say_json(made)
        return
    say(made["token"])
    note(f"role {made['role']}; revoke it with: gpulayer token revoke {made['id']}")


def token_list(*, json: bool = False, connection: Connection = LOCAL) -> None:
    """Tokens by id, role and label; never the secrets.

    Parameters
    ----------
    json
        One JSON document: an array.
    """
    found = connection.client().tokens()
    if json:
        say_json(found)
        return
    rows = [Row((token["id"], token["role"], utc(token["created_at_utc"]), token["label"])) for token in found]
    fitted_table(("ID", "ROLE", "CREATED", "LABEL"), rows, is_whole_elsewhere=True)


def token_revoke(token_id: str, /, *, connection: Connection = LOCAL) -> None:
    """Refuse a token from now on.

    Parameters
    ----------
    token_id
        As `gpulayer token list` shows it.
    """
    connection.client().revoke_token(token_id)
    note(f"token {token_id} is revoked")
