"""The registry: which nodes the cluster has, what they have, and what is said when that changes."""

from __future__ import annotations

import hmac
from collections import Counter
from dataclasses import replace

from gpulayer.core.cluster.applied import Accepted, Applied, Rejected, counted, event_of, free_name, rejected
from gpulayer.core.cluster.commands import AdmitNode, CreateCluster, JoinNode, RemoveNode
from gpulayer.model.cluster import ClusterState
from gpulayer.model.event import Event
from gpulayer.model.ids import NAME_PATTERN, JobId, NodeId
from gpulayer.model.node import Accelerator, Capabilities, Node
from gpulayer.model.trust import JoinToken
from gpulayer.model.units import format_duration, format_gpus, format_size

# One event has a sentence for each of so many devices.
DEVICES_TOLD_MAX = 8
NODES_MAX = 4096


def create_cluster(state: ClusterState, command: CreateCluster) -> Applied:
    if state.cluster_id:
        return rejected(state, "refused", f"this log belongs to cluster {state.cluster_id} already")
    if not command.cluster_id:
        return rejected(state, "invalid_request", "a cluster needs an id")
    created = replace(state, cluster_id=command.cluster_id)
    event = event_of(created, "cluster.created", f"cluster {command.cluster_id} created")
    return Applied(state=created, result=Accepted(), events=(event,))


def admit_node(state: ClusterState, command: AdmitNode) -> Applied:
    wrong = _wrong_with(state, command)
    if wrong is not None:
        return Applied(state=state, result=wrong)
    namesake = _namesake(state, command.node, command.name)
    if namesake is not None:
        return rejected(state, "refused", *_name_in_use(namesake))
    return _entered(state, command, command.name)


def join_node(state: ClusterState, command: JoinNode) -> Applied:
    token = _token_with(state, command.token_digest)
    refusal = _refusal_of_token(state, token, command) or _wrong_with(state, command)
    if refusal is not None:
        return Applied(state=state, result=refusal)
    assert token is not None
    name = command.name
    known = state.nodes.get(command.node)
    if known is not None and command.name_is_derived:
        name = known.name
    namesake = _namesake(state, command.node, name)
    if namesake is not None:
        if not command.name_is_derived:
            return rejected(state, "duplicate_name", *_name_in_use(namesake))
        name = free_name({node.name for node in state.nodes.values()}, name)
    use = (command.node, command.key_digest)
    if not _is_repeated(token, command):
        token = replace(token, uses_left=token.uses_left - 1, spent=(*token.spent, use))
        state = replace(state, join_tokens={**state.join_tokens, token.id: token})
    return _entered(state, command, name, token)


def remove_node(state: ClusterState, command: RemoveNode) -> Applied:
    node = state.nodes.get(command.node)
    if node is None:
        return rejected(state, "not_found", f"there is no node {command.node}", "see gpulayer node list")
    held = state.assignments(node.id)
    if held:
        # Voters agree in the words too, whatever the order of their mappings.
        held.sort(key=lambda each: (each.replica.job, each.replica.index))
        shown = ", ".join(_shown(state, each.replica.job, each.replica.index) for each in held[:5])
        more = f" and {len(held) - 5} more" if len(held) > 5 else ""
        return rejected(
            state,
            "refused",
            f"{counted(len(held), 'replica')} of node {node.name} {'is' if len(held) == 1 else 'are'} not released "
            f"({shown}{more})",
            "cancel those jobs first, or let the node leave with gpulayer leave --stop-all",
        )
    removed = replace(state, nodes={id: each for id, each in state.nodes.items() if id != node.id})
    event = event_of(
        removed,
        "node.removed",
        f"node {node.name} is no longer of this cluster",
        node=node.name,
        data=(("id", node.id),),
    )
    return Applied(state=removed, result=Accepted(name=node.name), events=(event,))


# --- tokens and names -----------------------------------------------------------------------------------------------


def _token_with(state: ClusterState, digest: str) -> JoinToken | None:
    found = None
    for token in state.join_tokens.values():  # all of them, so that the time tells nothing about which one it was
        if hmac.compare_digest(token.digest.encode(), digest.encode()):
            found = token
    return found


def _refusal_of_token(state: ClusterState, token: JoinToken | None, command: JoinNode) -> Rejected | None:
    if token is None:
        return Rejected(
            code="bad_token",
            message="this join token is not known to the cluster",
            hint="it was mistyped, revoked, or expired long ago; gpulayer token create --join makes a new one",
        )
    if state.time_utc >= token.expires_at_utc:
        ago = format_duration(state.time_utc - token.expires_at_utc)
        return Rejected(
            code="token_expired",
            message=f"join token {token.id} expired {ago} ago",
            hint="gpulayer token create --join makes a new one; --for says how long it is good",
        )
    if token.uses_left == 0 and not _is_repeated(token, command):
        return Rejected(
            code="token_used_up",
            message=f"join token {token.id} has no uses left; it has let {counted(len(token.spent), 'host')} in",
            hint="gpulayer token create --join makes a new one; --uses N lets N hosts in",
        )
    return None


def _is_repeated(token: JoinToken, command: JoinNode) -> bool:
    """Whether this node has spent a use already, and asks again for the same key."""
    return bool(command.key_digest) and (command.node, command.key_digest) in token.spent


def _namesake(state: ClusterState, node: NodeId, name: str) -> Node | None:
    return next((each for each in state.nodes.values() if each.name == name and each.id != node), None)


def _name_in_use(namesake: Node) -> tuple[str, str]:
    """Message and hint."""
    return f"node name {namesake.name} is in use by {namesake.id}", "start this node with another --name"


def _shown(state: ClusterState, job: JobId, index: int) -> str:
    return f"{state.jobs[job].name}.{index}"


# --- entries ---------------------------------------------------------------------------------------------------------


def _wrong_with(state: ClusterState, command: AdmitNode | JoinNode) -> Rejected | None:
    if not NAME_PATTERN.fullmatch(command.name) or not command.node:
        message, hint = f"node name {command.name!r} is not a name", "use 1 to 63 of a-z, 0-9 and -"
    elif wrong := _nonsense_in(command.capabilities):
        message, hint = f"node {command.name}: {wrong}", "check its configuration"
    elif command.node not in state.nodes and len(state.nodes) >= NODES_MAX:
        message, hint = (
            f"the cluster has {NODES_MAX} nodes, and can have no more",
            "remove nodes that are gone for good",
        )
    else:
        return None
    return Rejected(code="invalid_request", message=message, hint=hint)


def _entered(state: ClusterState, command: AdmitNode | JoinNode, name: str, token: JoinToken | None = None) -> Applied:
    """The node as it says it is, under `name`; it keeps the time of its first admission, and its marks."""
    known = state.nodes.get(command.node)
    node = Node(
        id=command.node,
        name=name,
        capabilities=command.capabilities,
        advertise=command.advertise,
        admitted_at_utc=known.admitted_at_utc if known else state.time_utc,
        marks=known.marks if known else (),
    )
    if node == known and token is None:
        return Applied(state=state, result=Accepted(name=node.name))
    entered = replace(state, nodes={**state.nodes, node.id: node})
    data = (("id", node.id), *((("join_token", token.id),) if token is not None else ()))
    events: tuple[Event, ...] = ()
    if known is None:
        events = (event_of(entered, "node.admitted", _what_it_has(node), node=node.name, data=data),)
    elif node != known:
        events = (event_of(entered, "node.changed", what_changed(known, node), node=node.name, data=data),)
    if known is not None and token is not None:
        text = f"node {node.name} joined again, and has a new certificate"
        events += (event_of(entered, "node.rejoined", text, node=node.name, data=data),)
    return Applied(state=entered, result=Accepted(name=node.name), events=events)


def _nonsense_in(capabilities: Capabilities) -> str:
    uuids = Counter(device.uuid for device in capabilities.accelerators)
    twice = sorted(uuid for uuid, count in uuids.items() if count > 1)
    if twice:
        return f"accelerator {twice[0]} is there twice"
    if capabilities.cpus_milli < 0 or capabilities.memory_mib < 0:
        return f"{capabilities.cpus_milli} milli-CPUs and {capabilities.memory_mib} MiB of memory are no amounts"
    return ""


def _what_it_has(node: Node) -> str:
    gpus = len([device for device in node.capabilities.accelerators if device.kind != "cpu"])
    text = f"node {node.name} joined at {node.advertise} with {counted(gpus, 'GPU')}"
    has = node.capabilities
    if has.gpu_detect == "error":
        text += f"; gpu_detect=error: {'; '.join(has.undetected)}"
    return text


def what_changed(old: Node, new: Node) -> str:
    changes = []
    if old.name != new.name:
        changes.append(f"it was called {old.name}")
    if old.advertise != new.advertise:
        changes.append(f"it is reached at {new.advertise}, was {old.advertise}")
    changes += _what_changed_in_devices(old.capabilities, new.capabilities)
    if not changes:
        changes.append("its CPUs, memory, labels or drivers are others")
    return f"node {new.name} changed: " + "; ".join(changes)


def _what_changed_in_devices(old: Capabilities, new: Capabilities) -> list[str]:
    """What people want to hear of devices: which one, and why. The rest is counted."""
    before = {device.uuid: device for device in old.accelerators}
    after = {device.uuid: device for device in new.accelerators}
    told = []
    if _detection(old) != _detection(new):
        told.append(_detection(new))
    if before.keys() != after.keys():
        told.append(f"it has {counted(len(after), 'accelerator')}, had {len(before)}")
    for uuid, device in sorted(after.items()):
        was = before.get(uuid)
        name = _called(device)
        if device.unhealthy != (was.unhealthy if was is not None else ""):
            told.append(f"{name} is unhealthy: {device.unhealthy}" if device.unhealthy else f"{name} is well again")
        if device.foreign != (was.foreign if was is not None else ""):
            told.append(
                f"{name} is used by others: {device.foreign}" if device.foreign else f"{name} is free of others"
            )
    if not told and old.accelerators != new.accelerators:
        facts = {uuid: _what_changed_in_facts(before[uuid], device) for uuid, device in sorted(after.items())}
        told = [f"{_called(after[uuid])} has {text}" for uuid, text in facts.items() if text]
        told = told or ["facts of its accelerators are others"]
    if len(told) > DEVICES_TOLD_MAX:
        told = [*told[:DEVICES_TOLD_MAX], f"and {len(told) - DEVICES_TOLD_MAX} more"]
    return told


def _called(device: Accelerator) -> str:
    """`GPU-ecdd… (GPU 0, A100)`: the whole UUID, as a log is searched for it."""
    number = f"GPU {device.index}" if device.index is not None else ""
    known_as = ", ".join(word for word in (number, device.model) if word)
    return f"{device.uuid} ({known_as})" if known_as else device.uuid


def _what_changed_in_facts(was: Accelerator, now: Accelerator) -> str:
    """`memory 40GiB, was 80GiB`. Health and who uses it are told otherwise."""
    pairs = [
        ("kind", was.kind, now.kind),
        ("vendor", was.vendor, now.vendor),
        ("model", was.model, now.model),
        ("memory", format_size(was.memory_mib), format_size(now.memory_mib)),
        ("source", was.source, now.source),
        ("number", was.index, now.index),
        ("compute capability", was.compute_capability, now.compute_capability),
        ("PCI address", was.pci_bus_id, now.pci_bus_id),
        ("NUMA node", was.numa_node, now.numa_node),
        ("NVLink to", ", ".join(was.nvlink_peers), ", ".join(now.nvlink_peers)),
        ("parent", was.parent, now.parent),
        ("used by others", format_gpus(was.foreign_milli), format_gpus(now.foreign_milli)),
    ]
    none = (None, "")
    return ", ".join(
        f"{what} {'none' if after in none else after}, was {'none' if before in none else before}"
        for what, before, after in pairs
        if before != after
    )


def _detection(capabilities: Capabilities) -> str:
    why = "; ".join(capabilities.undetected) if capabilities.gpu_detect == "error" else ""
    return f"gpu_detect={capabilities.gpu_detect}" + (f": {why}" if why else "")
