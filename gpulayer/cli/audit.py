"""gpulayer audit: does every host run what it should, and nothing else?"""

from __future__ import annotations

from gpulayer.cli.connection import LOCAL, Connection
from gpulayer.cli.render import clean, counted, note, say, say_json


def audit(*, json: bool = False, connection: Connection = LOCAL) -> int:
    """Compare what runs on each host with what should; exit code 1 on any difference, or where a node cannot be asked.

    Parameters
    ----------
    json
        One JSON document.
    """
    found = connection.client().audit()
    differences, nodes = found["differences"], found["nodes"]
    silent = [each for each in nodes if each["error"] is not None]
    code = 1 if differences or silent else 0
    if json:
        say_json(found)
        return code
    for difference in differences:
        pids = ",".join(str(pid) for pid in difference["pids"])
        where = f"{difference['node']}: " if len(nodes) > 1 else ""
        say(f"{where}{difference['kind']}: {clean(difference['text'])}{pids and f' (pid {pids})'}")
        if difference["hint"]:
            note(f"hint: {clean(difference['hint'])}")
    for each in silent:
        say(f"{each['node']}: not checked: {clean(each['error'])}")
    say(
        f"{counted(len(differences), 'difference')}; {counted(found['replicas_checked'], 'replica')} and "
        f"{counted(found['processes_seen'], 'process', 'processes')} checked on "
        f"{', '.join(each['node'] for each in nodes if each['error'] is None)}"
    )
    return code
