"""What is worth a word before a job is handed in: traps in its words, files and programs that only this shell has.

Notes on stderr; nothing is refused. Where the daemon is another host's, only the words are looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpulayer.cli.render import clean, note
from gpulayer.client.sync import Client
from gpulayer.core.replica import traps
from gpulayer.core.replica.shell_line import read
from gpulayer.model.errors import GpulayerError
from gpulayer.model.job import JobSpec


def forewarn(spec: JobSpec, client: Client) -> None:
    """One line per thing that will most likely not be as the user thinks."""
    said = [str(trap) for trap in traps.at_submit(spec)]
    if client.is_local:
        said += _files_here(spec)
        said += _programs_here(spec, client)
    for text in said:
        note(f"note: {clean(text)}")


def _files_here(spec: JobSpec) -> list[str]:
    """Where a word of the command is a file in this directory, and the job will run elsewhere."""
    if spec.workdir is not None and os.path.realpath(spec.workdir) == os.path.realpath(os.curdir):
        return []
    for path in traps.paths(spec.argv):
        if not os.path.isfile(path):
            continue
        if spec.workdir is None:
            return [f"{path} is in this directory, but the job runs in a sandbox of its own; add --workdir ."]
        if not os.path.exists(os.path.join(spec.workdir, path)):
            return [f"{path} is in this directory, and not in {spec.workdir}, where the job runs; add --workdir ."]
    return []


# --- programs -----------------------------------------------------------------------------------------------------


# In every PATH: what is found there needs no question to the daemon.
_EVERYWHERE = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")


def _programs_here(spec: JobSpec, client: Client) -> Iterator[str]:
    """Programs that this shell finds, and the job does not, or finds others of that name: an activated environment."""
    found = {name: _which(name, os.environ.get("PATH", "")) for name in _looked_up(spec)}
    here = {name: path for name, path in found.items() if path and os.path.dirname(path) not in _EVERYWHERE}
    if not here:
        return
    path_of_job = dict(spec.env).get("PATH")
    whose = "PATH is given by --env"
    if path_of_job is None:
        path_of_job, whose = _path_of_daemon(client), "PATH is the daemon's"
    for name, path in here.items():
        there = _which(name, path_of_job) if path_of_job is not None else None
        instead = f"write {path}, or add --env PATH"
        if path_of_job is not None and there is None:
            yield f"{name} is {path} here, and is not found by the job, whose {whose}; {instead}"
        elif _is_of_an_environment(path) and (there is None or not _is_same(path, there)):
            other = there or "what it finds"
            yield f"{name} is {path} here, and {other} for the job, whose {whose}; {instead}"


def _looked_up(spec: JobSpec) -> list[str]:
    """The names in the command that are looked up in a PATH, which the command itself does not change."""
    line = read(spec.argv)
    changes = any(word.startswith("PATH=") or word.endswith("activate") for word in line.words)
    names = [spec.argv[0], *(step.words[0] for step in line.steps if step.words)]
    return [] if changes else list(dict.fromkeys(name for name in names if "/" not in name))


def _path_of_daemon(client: Client) -> str | None:
    """None where it cannot be known: the daemon is another user's."""
    try:
        pid = client.daemon_pid()
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except (OSError, GpulayerError):
        return None
    found = [variable for variable in variables if variable.startswith(b"PATH=")]
    return os.fsdecode(found[0].removeprefix(b"PATH=")) if found else None


def _which(name: str, path: str) -> str | None:
    # shutil.which does the same, and takes 8 ms to import.
    for directory in path.split(os.pathsep):
        candidate = os.path.join(directory or os.curdir, name)
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return os.path.abspath(candidate)
    return None


def _is_same(one: str, other: str) -> bool:
    """/bin and /usr/bin may be one directory. What the program itself links to does not count: python of an
    environment is a link to the one it was made with.
    """
    return os.path.realpath(os.path.dirname(one)) == os.path.realpath(os.path.dirname(other))


def _is_of_an_environment(path: str) -> bool:
    root = os.path.dirname(os.path.dirname(path))
    return os.path.exists(os.path.join(root, "pyvenv.cfg")) or os.path.isdir(os.path.join(root, "conda-meta"))
