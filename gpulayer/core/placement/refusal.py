"""Why a node was passed over: one value per reason, with its numbers, and the sentences that people read.

Refusals are values, not errors: any node that is asked can compute them again from the same state (P6, P9).
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

from gpulayer.model.replica import Reason
from gpulayer.model.units import MILLI, format_gpus, format_size

# What fits a line of a terminal; the rest is a matter for `job explain`.
GROUPS_SHOWN = 4
NAMES_SHOWN = 3
MODELS_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlaceable:
    """Nothing new goes there now: a mark, or what was observed (`reason`)."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SameJobAlreadyThere:
    """The job spreads over nodes (spread=node)."""

    node: str
    replica: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldForEarlier:
    """What is free there is kept for a job before it in the queue (plan.py says when)."""

    node: str
    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingLabel:
    node: str
    key: str
    needed: str
    there: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAccelerators:
    """`undetected`: there may be some, but they could not be found out about, for these reasons."""

    node: str
    needed_milli: int
    undetected: tuple[str, ...] = ()
    excluded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongAcceleratorKind:
    node: str
    needed: str
    there: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongVendor:
    node: str
    needed: str
    there: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongModel:
    node: str
    needed: tuple[str, ...]
    there: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLittleGpuMemory:
    """`largest_mib` is what the largest GPU would give: all of its memory, or the share's part of it."""

    node: str
    needed_mib: int
    largest_mib: int
    needed_milli: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFree:
    """What keeps the GPUs that match and are not free, in words; equal ones together."""

    in_use: tuple[str, ...] = ()
    """By others: processes that gpulayer did not start, another daemon of the host, a local run."""
    unhealthy: tuple[str, ...] = ()
    held: int = 0
    """By replicas of this cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnhealthyDevices:
    """Enough GPUs that match, but too few that are well."""

    node: str
    needed_milli: int
    free: int
    all: int
    others: NotFree


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesInUse:
    """Enough GPUs that match and are well, but others hold some. `free` and `all` count those that match."""

    node: str
    needed_milli: int
    free: int
    all: int
    others: NotFree


@dataclass(frozen=True, slots=True, kw_only=True)
class NotEnoughGpusFree:
    """Whole GPUs: `free` and `all` count those that match; `excluded` are more that the configuration takes out."""

    node: str
    needed: int
    free: int
    all: int
    others: NotFree = NotFree()
    excluded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoShareFree:
    node: str
    needed_milli: int
    largest_free_milli: int
    all: int
    others: NotFree = NotFree()


@dataclass(frozen=True, slots=True, kw_only=True)
class TooFewCpus:
    node: str
    needed_milli: int
    free_milli: int
    all_milli: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TooLittleMemory:
    node: str
    needed_mib: int
    free_mib: int
    all_mib: int


Refusal: TypeAlias = (
    NotPlaceable
    | SameJobAlreadyThere
    | HeldForEarlier
    | MissingLabel
    | NoAccelerators
    | WrongAcceleratorKind
    | WrongVendor
    | WrongModel
    | TooLittleGpuMemory
    | UnhealthyDevices
    | DevicesInUse
    | NotEnoughGpusFree
    | NoShareFree
    | TooFewCpus
    | TooLittleMemory
)


def code_of(refusal: Refusal) -> str:
    """A stable word for programs: the class's name, as in `not_enough_gpus_free`."""
    name = type(refusal).__name__
    return "".join("_" + char.lower() if char.isupper() else char for char in name).lstrip("_")


def is_permanent(refusal: Refusal) -> bool:
    """It could not run there even if the node were empty: only another node, or less asked for, helps."""
    match refusal:
        case NotEnoughGpusFree(needed=needed, all=all_gpus):
            return needed > all_gpus
        case TooFewCpus(needed_milli=needed, all_milli=all_milli):
            return needed > all_milli
        case TooLittleMemory(needed_mib=needed, all_mib=all_mib):
            return needed > all_mib
        case MissingLabel() | WrongAcceleratorKind() | WrongVendor() | WrongModel():
            return True
        case NoAccelerators(undetected=why):
            return not why  # a driver that fails may answer in a moment
        case TooLittleGpuMemory():
            return True
        case NotPlaceable() | SameJobAlreadyThere() | HeldForEarlier():
            return False
        case UnhealthyDevices() | DevicesInUse() | NoShareFree():
            return False
        case _:
            assert_never(refusal)


def explain(refusal: Refusal) -> str:
    """One sentence: `0 of 1 GPU free on n1`."""
    return _sentence(refusal, refusal.node)


def _sentence(refusal: Refusal, where: str) -> str:
    match refusal:
        case NotPlaceable(reason=reason):
            return f"nothing is placed on {where}: {reason}"
        case SameJobAlreadyThere(replica=replica):
            return f"replica {replica} of this job is on {where} already (spread=node)"
        case HeldForEarlier(job=job):
            return f"{where} is kept for job {job}, which is before it in the queue"
        case MissingLabel(key=key, needed=needed, there=None):
            return f"label {key}={needed} is not on {where}"
        case MissingLabel(key=key, needed=needed, there=there):
            return f"label {key} is {there} on {where}, {needed} needed"
        case NoAccelerators(needed_milli=needed, undetected=(), excluded=excluded):
            return f"no GPU on {where}{_excluded(excluded)}, {format_gpus(needed)} needed"
        case NoAccelerators(needed_milli=needed, undetected=why):
            return f"no GPU was detected on {where} ({_listed(why)}), {format_gpus(needed)} needed"
        case WrongAcceleratorKind(needed=needed, there=kinds):
            return f"GPUs on {where} are {_listed(kinds)}, {needed} needed"
        case WrongVendor(needed=needed, there=vendors):
            return f"GPUs on {where} are {_listed(vendors)}, {needed} needed"
        case WrongModel(needed=patterns, there=models):
            return (
                f"GPUs on {where} are {_listed(models)}, {' or '.join(each or repr(each) for each in patterns)} needed"
            )
        case TooLittleGpuMemory(needed_mib=needed_mib, largest_mib=largest_mib, needed_milli=milli):
            part = f"{format_gpus(milli)} of the " if milli < MILLI else ""
            largest, needed = _told_apart(largest_mib, needed_mib)
            return f"{part}largest GPU on {where} has {largest}, {needed} needed"
        case UnhealthyDevices() | DevicesInUse():
            return _too_few(where, refusal.free, refusal.all, refusal.needed_milli, refusal.others)
        case NotEnoughGpusFree(needed=needed, all=all_gpus, excluded=excluded) if is_permanent(refusal):
            such = f"{all_gpus} such GPU{'' if all_gpus == 1 else 's'}"
            return f"{such} on {where}{_excluded(excluded, ' more')}, {needed} needed"
        case NotEnoughGpusFree(needed=needed, free=free, all=all_gpus, others=others):
            return _too_few(where, free, all_gpus, needed * MILLI, others)
        case NoShareFree(needed_milli=needed, largest_free_milli=0, all=all_gpus, others=others):
            return _too_few(where, 0, all_gpus, needed, others)
        case NoShareFree(needed_milli=needed, largest_free_milli=free, others=others):
            most = f"at most {format_gpus(free)} of one GPU"
            return f"{most} free on {where}, {format_gpus(needed)} needed{_whose(others)}"
        case TooFewCpus(needed_milli=needed, all_milli=all_milli) if is_permanent(refusal):
            return f"{_cpus(all_milli)} CPUs on {where}, {_cpus(needed)} needed"
        case TooFewCpus(needed_milli=needed, free_milli=free, all_milli=all_milli):
            return f"{_cpus(free)} of {_cpus(all_milli)} CPUs free on {where}, {_cpus(needed)} needed"
        case TooLittleMemory(needed_mib=needed_mib, all_mib=all_mib) if is_permanent(refusal):
            there, needed = _told_apart(all_mib, needed_mib)
            return f"{there} memory on {where}, {needed} needed"
        case TooLittleMemory(needed_mib=needed_mib, free_mib=free_mib, all_mib=all_mib):
            there, needed = _told_apart(max(0, free_mib), needed_mib)
            return f"{there} of {format_size(all_mib)} memory free on {where}, {needed} needed"
        case _:
            assert_never(refusal)


def _too_few(where: str, free: int, all_gpus: int, needed_milli: int, others: NotFree) -> str:
    # What is needed goes without saying where one whole GPU would do.
    more = "" if needed_milli == MILLI else f", {format_gpus(needed_milli)} needed"
    return f"{free} of {_gpus(all_gpus)} free on {where}{more}{_whose(others)}"


def _whose(others: NotFree) -> str:
    """Nothing where all are held by replicas, as is the rule."""
    named = [*others.in_use, *others.unhealthy]
    if not named:
        return ""
    told = named[:NAMES_SHOWN]
    told += [f"{len(named) - NAMES_SHOWN} more"] if len(named) > NAMES_SHOWN else []
    told += [f"{others.held} held"] if others.held else []
    return f" ({'; '.join(told)})"


def _excluded(number: int, more: str = "") -> str:
    return f" ({number}{more} {'is' if number == 1 else 'are'} excluded by the configuration)" if number else ""


def _told_apart(there_mib: int, needed_mib: int) -> tuple[str, str]:
    """Both sizes, to the MiB where they would look the same."""
    there, needed = format_size(there_mib), format_size(needed_mib)
    return (there, needed) if there != needed else (f"{there_mib}MiB", f"{needed_mib}MiB")


def summary(refusals: Iterable[Refusal]) -> str:
    """All of them in one line, equal ones together, the most frequent first: `1 node: 0 of 1 GPU free on n1`."""
    refusals = sorted(set(refusals), key=lambda refusal: (refusal.node, code_of(refusal)))
    if not refusals:
        return "no node is known yet"
    grouped: dict[Refusal, list[str]] = {}
    for refusal in refusals:
        grouped.setdefault(replace(refusal, node=""), []).append(refusal.node)
    told = sorted(
        ((-len(nodes), _sentence(refusal, _listed(nodes))) for refusal, nodes in grouped.items()),
    )
    sentences = [sentence for _, sentence in told[:GROUPS_SHOWN]]
    if len(told) > GROUPS_SHOWN:
        others = -sum(count for count, _ in told[GROUPS_SHOWN:])
        sentences.append(f"other reasons on {others} more")
    nodes = len({refusal.node for refusal in refusals})
    text = f"{nodes} node{'' if nodes == 1 else 's'}: " + "; ".join(sentences)
    return f"cannot ever run here: {text}" if all(map(is_permanent, refusals)) else text


def waiting_reason(refusals: Iterable[Refusal]) -> Reason:
    """What a waiting replica says of itself: `never_fits` where only a person can help, else `no_capacity`."""
    refusals = tuple(refusals)
    may_pass = [refusal for refusal in refusals if not is_permanent(refusal)]
    if refusals and not may_pass:
        return Reason(code="never_fits", text=summary(refusals), hint=_what_there_is(refusals))
    if not refusals:
        hint = "it is placed as soon as a node has joined"
    elif any(isinstance(refusal, NoAccelerators) and refusal.undetected for refusal in refusals):
        hint = "see `gpulayer resources detect` on that node; it starts by itself when its driver answers"
    elif all(isinstance(refusal, SameJobAlreadyThere) for refusal in may_pass):
        hint = "add a node, or submit with --spread any so that replicas may share one"
    elif all(isinstance(refusal, UnhealthyDevices) for refusal in may_pass):
        hint = "its GPUs are not well; `gpulayer resources detect` on that node says what to do"
    elif any(map(_is_for_others, may_pass)):
        hint = (
            "it starts by itself when those have ended; "
            'foreign_processes = "allow" lets it share a GPU with programs that were not submitted'
        )
    else:
        hint = "it starts by itself as soon as there is room; `gpulayer job explain JOB` has every node"
    return Reason(code="no_capacity", text=summary(refusals), hint=hint)


def _is_for_others(refusal: Refusal) -> bool:
    match refusal:
        case DevicesInUse(others=others) | NotEnoughGpusFree(others=others) | NoShareFree(others=others):
            return bool(others.in_use)
        case _:
            return False


def _what_there_is(refusals: Iterable[Refusal]) -> str:
    """Over all nodes: what was meant, or what could be asked for instead."""
    refusals = tuple(refusals)
    if all(isinstance(refusal, NoAccelerators) for refusal in refusals):
        return "leave out --gpus; `gpulayer resources detect` on that node says why there is none"
    wrong_models = [refusal for refusal in refusals if isinstance(refusal, WrongModel)]
    too_small = [refusal for refusal in refusals if isinstance(refusal, TooLittleGpuMemory)]
    otherwise = ", or add a node that has it; `gpulayer job explain JOB` has every node"
    if len({refusal.node for refusal in refusals}) == 1:
        otherwise = "; see `gpulayer resources`"
    if wrong_models:
        models = sorted({re.sub(r"^\d+ x ", "", model) for refusal in wrong_models for model in refusal.there})
        near = _nearest(wrong_models[0].needed, models)
        if near:
            return f"did you mean --gpu-model {shlex.quote(near)}? A pattern is compared with the whole name"
        more = f" and {len(models) - MODELS_SHOWN} more" if len(models) > MODELS_SHOWN else ""
        return f"ask for one of {', '.join(models[:MODELS_SHOWN])}{more}{otherwise}"
    if too_small:
        largest = max(too_small, key=lambda refusal: (refusal.largest_mib, refusal.node))
        return f"ask for {format_size(largest.largest_mib)} at most{otherwise}"
    return f"ask for what there is{otherwise}"


def _nearest(patterns: Iterable[str], models: Sequence[str]) -> str:
    """The model that was meant: one that holds the pattern's letters and digits, else one with a name much alike."""
    plain = {_plain(model): model for model in models}
    for pattern in map(_plain, patterns):
        holding = [model for name, model in plain.items() if pattern and pattern in name]
        # Few people type a name as a whole. Other letters are a slip, other digits another model; nor is H100 A100.
        words = {_plain(word): model for model in models for word in [model, *re.split(r"[\s-]+", model)]}
        near = [word for word in words if re.sub(r"\D", "", word) == re.sub(r"\D", "", pattern)]
        alike = difflib.get_close_matches(pattern, near, n=1, cutoff=0.8)
        if holding or alike:
            return holding[0] if holding else words[alike[0]]
    return ""


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _listed(words: Iterable[str]) -> str:
    words = list(words)
    shown = ", ".join(words[:NAMES_SHOWN])
    return shown if len(words) <= NAMES_SHOWN else f"{shown} and {len(words) - NAMES_SHOWN} more"


def _gpus(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"


def _cpus(milli: int) -> str:
    return f"{max(0, milli) / MILLI:g}"


def counted(words: Iterable[str]) -> tuple[str, ...]:
    """Models and the like, each once, in order of name, with how often where that is more than once."""
    return tuple(word if number == 1 else f"{number} x {word}" for word, number in sorted(Counter(words).items()))
