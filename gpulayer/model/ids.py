"""Names and numbers that identify things. Making them needs chance, which the caller hands in."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

from gpulayer.model.errors import InvalidRequest

NodeId = NewType("NodeId", str)
JobId = NewType("JobId", str)
TokenId = NewType("TokenId", str)

NODE_ID_PATTERN = re.compile(r"n-[0-9a-f]{16}")
NAME_PATTERN = re.compile(r"[a-z0-9-]{1,63}")
_BASE32 = "abcdefghijklmnopqrstuvwxyz234567"


@dataclass(frozen=True, slots=True, order=True)
class ReplicaId:
    """One copy of a job: `j-abc.0`."""

    job: JobId
    index: int

    def __str__(self) -> str:
        return f"{self.job}.{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One placement of a replica: `j-abc.0.1`. Names the sandbox."""

    replica: ReplicaId
    attempt: int

    def __str__(self) -> str:
        return f"{self.replica}.{self.attempt}"


def job_id(entropy: bytes) -> JobId:
    """`j-` and ten base32 letters from at least 50 bits of chance."""
    number = int.from_bytes(entropy[:8].ljust(8, b"\0"), "big")
    return JobId("j-" + "".join(_BASE32[(number >> (5 * place)) & 31] for place in range(10)))


def node_id(entropy: bytes) -> NodeId:
    return NodeId("n-" + entropy[:8].hex())


def checked_name(text: str, what: str = "name") -> str:
    """The name itself, or InvalidRequest: names are `[a-z0-9-]{1,63}`."""
    if not NAME_PATTERN.fullmatch(text):
        raise InvalidRequest(f"{what}: {text!r} is not a name", hint="use 1 to 63 of a-z, 0-9 and -")
    return text


def name_from_command(argv: tuple[str, ...]) -> str:
    """A name for a job that was given none: the program, or the script that an interpreter runs."""
    words = [word.rsplit("/", 1)[-1] for word in argv if word]
    chosen = words[0] if words else "job"
    if re.fullmatch(r"(python[0-9.]*|bash|sh|node|ruby|perl)", chosen):
        scripts = [word for word in words[1:] if not word.startswith("-")]
        if len(argv) > 2 and argv[1] == "-m":
            scripts = [argv[2]]
        if argv[1:2] != ("-c",) and argv[1:2] != ("-lc",) and scripts:
            chosen = re.sub(r"\.(py|sh|js|rb|pl)$", "", scripts[0])
    name = re.sub(r"[^a-z0-9]+", "-", chosen.lower()).strip("-")[:40].strip("-")
    return name or "job"
