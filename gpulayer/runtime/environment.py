"""The environment of a run: little of the daemon's, what gpulayer tells it, and what the job asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpulayer.core.replica.messages import Order

# Who the user is, where programs and libraries are, which language and time: what a login shell would give. Everything
# else of the daemon's is its own business, its sockets, tokens and watchdog above all.
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH")
INHERITED_PREFIX = "LC_"
PATH_DEFAULT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def run_environment(
    order: Order,
    *,
    base: Mapping[str, str],
    node_name: str,
    host: str,
    port: int | None,
    run_id: str,
    sandbox: str,
    kinds: frozenset[str] = frozenset(),
) -> dict[str, str]:
    """The job's own variables win over what is inherited and what is convenient, not over what says who and where it
    is. `kinds`: of the accelerators that it was given."""
    assignment, spec = order.assignment, order.spec
    inherited = {key: value for key, value in base.items() if key in INHERITED or key.startswith(INHERITED_PREFIX)}
    uuids = ",".join(share.uuid for share in assignment.devices)
    # By UUID and in the bus's order, so that no two tools on the host number the devices differently. An empty list
    # means none, where no variable would mean all.
    # Python holds output to a pipe back, 8 KiB at a time: the log of a service would be empty for minutes, and without
    # its last words after a kill. It costs a program 14 µs a line instead of 1; an empty value turns it off.
    convenient = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}
    if "rocm" in kinds:
        # Alone: AMD's libraries read CUDA_VISIBLE_DEVICES as well, and an empty one would hide the device again.
        convenient["ROCR_VISIBLE_DEVICES"] = uuids
    else:
        convenient |= {"CUDA_VISIBLE_DEVICES": uuids, "ROCR_VISIBLE_DEVICES": ""}
    fixed = {
        "GPULAYER_JOB_ID": assignment.replica.job,
        "GPULAYER_JOB_NAME": order.job_name,
        "GPULAYER_REPLICA": str(assignment.replica.index),
        "GPULAYER_REPLICAS": str(spec.replicas),
        "GPULAYER_RUN_ID": run_id,
        "GPULAYER_NODE": node_name,
        "GPULAYER_SANDBOX": sandbox,
    }
    if port is not None:
        convenient["HOST"] = host
        fixed["PORT"] = str(port)
    return {"PATH": PATH_DEFAULT, **inherited, **convenient, **dict(spec.env), **fixed}
