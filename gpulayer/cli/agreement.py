"""gpulayer cluster status, rotate-keys."""

from __future__ import annotations

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.render import Row, fitted_table, note, pairs, say, say_json, say_wrapped, utc


def cluster_status(*, json: bool = False, connection: Connection = LOCAL) -> None:
    """Who leads and who votes, how far the log is, and the gossip keys by their ids.

    Parameters
    ----------
    json
        One JSON document.
    """
    found = connection.client().cluster()
    if json:
        say_json(found)
        return
    keys = found["keys"]
    say_wrapped(
        pairs(
            cluster=found["cluster_id"],
            leader=found["leader"] or "none",
            voters=",".join(found["voters"]),
            term=found["term"],
            index=found["index"],
            nodes=found["nodes"],
        ),
        indent="  ",
        first="",
    )
    if found["authority"] is not None:
        say(f"authority {found['authority']}")
    if keys["ring"]:
        say()
        rows = [Row((key["id"], "seals" if key["seals"] else _why_kept(keys), utc(key["installed_at_utc"])))
                for key in keys["ring"]]  # fmt: skip
        fitted_table(("KEY", "STATE", "INSTALLED"), rows)


def _why_kept(keys: dict[str, object]) -> str:
    """Of a key that does not seal."""
    return "waits until all have it" if keys["rotation"] == "installing" else "opens still"


def cluster_rotate_keys(*, json: bool = False, connection: Connection = LOCAL) -> None:
    """Replace the key that gossip is sealed with. No node stops for it, and one that is away gets the new one later.

    Parameters
    ----------
    json
        The keys, as one JSON document.
    """
    keys = connection.client().rotate_keys()
    if json:
        say_json(keys)
        return
    newest = keys["ring"][-1]["id"]
    note(
        f"key {newest} is given to every node, and used once all that are alive have it; the old one opens for a day "
        "more. gpulayer cluster status tells how far it is"
    )
