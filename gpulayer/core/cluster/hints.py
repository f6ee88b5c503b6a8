"""What to do about each reason: one sentence per code, for reasons that came without a hint of their own.

Hints name commands with JOB in them; where one is shown, that is the job's name.
"""

from __future__ import annotations

import re
from dataclasses import replace

from gpulayer.model.replica import Reason

HINTS: dict[str, str] = {
    "queued": "wait: it is placed within moments",
    "no_capacity": "wait until something ends, or ask for less; `gpulayer job explain JOB` has every node",
    "never_fits": "ask for what there is; `gpulayer job explain JOB` has every node",
    "starting": "wait, or see what it does with `gpulayer job logs JOB`",
    "bad_command": "the program must be there and executable on the node; a name without / is looked up in the PATH of "
    "the job, which is the daemon's unless --env PATH=… gives another",
    "bad_workdir": "name a --workdir that is there on the node and may be entered, or leave it out for the sandbox",
    "spawn_failed": "see the node's log: mostly a limit of the node (processes, open files, memory) is the cause",
    "disk_full": "free space where the node keeps its data; what waits is tried again by itself",
    "exit_nonzero": "`gpulayer job logs JOB` shows what it wrote",
    "exit_zero": "nothing, if it was to end; a service is to stay: start it in the foreground, or submit it as a batch",
    "signal": "see `gpulayer job logs JOB`; signal 9 is often the kernel when memory has run out (`dmesg`)",
    "never_ready": "make it listen on $HOST:$PORT, or give it longer with --start-timeout",
    "listens_elsewhere": "make it listen on $HOST and $PORT instead of an address or port of its own",
    "port_taken": "end the process that holds the port, or restart the replica: each run gets a new port",
    "not_listening": "make it listen on $HOST:$PORT; a service without a port is submitted with --no-port",
    "only_shell_left": "start the program as the last command of its script, without &, and with exec",
    "timeout": "raise --timeout, or make the work shorter",
    "interrupted": "its host or its supervisor went down; submit it again if its work is still needed",
    "supervisor_killed": "look for the kernel's out-of-memory killer in `dmesg`; how the run ended is unknown",
    "unkillable": "a process hangs in the kernel (state D): see `dmesg`; often only a restart of the host ends it",
    "devices_not_clear": "wait: the driver gives a device back in its own time, and after 30 s it is marked unhealthy",
    "device_unavailable": "it waits for its turn again; `gpulayer status` shows who holds what",
    "device_unhealthy": "if it does not go on, cancel it and submit it again: it gets another GPU; "
    "`gpulayer resources detect` on its node says what to do about this one",
    "cancelled": "submit it again if it is still wanted",
    "replica_ended": "see the replica that ended first; --on-replica-end keep would have left the others running",
    "restart_requested": "nothing: a new run starts by itself",
    "left_background_processes": "start the last program with exec, or end the script with wait",
    "cgroup_unavailable": "its processes are followed by descent alone; with systemd, set Delegate=yes in the unit",
    "not_accepted": "nothing: it is placed again unless its node has begun with it; where one node is often the cause, "
    "look at its daemon's log and at its disk",
    "no_current_orders": "wait; if it lasts, `gpulayer status` and its node's log say why the leader is not reached",
    "node_suspect": "wait some seconds: it is alive again by then, or known not to be",
    "node_unsupervised": "nothing for the replica, which goes on; see why its node's daemon does not run: "
    "`journalctl -u gpulayer` there, and start it again",
    "node_silent": "see to its host and its network: whether the replica still runs is known once that is back",
}
_OTHERWISE = "see `gpulayer job events JOB` and `gpulayer job logs JOB`"


def hint_for(code: str) -> str:
    """What to do about a reason; a general answer for a code that is not known here (from a newer node)."""
    return HINTS.get(code, _OTHERWISE)


def with_hint(reason: Reason, job_name: str) -> Reason:
    """The reason with its own hint, else the one of its code; about that job."""
    hint = reason.hint or hint_for(reason.code)
    # A name is made of letters, digits and dashes, so it is no template.
    return replace(reason, hint=re.sub(r"\bJOB\b", job_name, hint))


def beside_explanation(hint: str) -> str:
    """The same where `job explain` is what people read already: who holds the devices is what it does not say."""
    return re.sub(r"`gpulayer job explain \S+` has every node", "`gpulayer status` shows who holds what", hint)
