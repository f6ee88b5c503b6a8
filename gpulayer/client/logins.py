"""What `gpulayer login` keeps for this user: of each cluster its CA, a token, and where its nodes are.

One file for each cluster in $XDG_CONFIG_HOME/gpulayer/logins, for its owner alone. Standard library only: every command
of a laptop reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import ssl
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from gpulayer.client.address import Secure, Trust
from gpulayer.model.errors import InvalidRequest, PermissionDenied, StorageFailed

LOGIN_BYTES_MAX = 256 * 1024
URLS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    cluster: str
    """Its id."""
    endpoints: tuple[tuple[str, int], ...]
    """Host and port of the API of its nodes; the one that was logged in to first."""
    ca_pem: str = field(repr=False)
    token: str = field(repr=False)

    @property
    def trust(self) -> Trust:
        return Trust(cluster=self.cluster, ca_pem=self.ca_pem, token=self.token)

    @property
    def address(self) -> Secure:
        return Secure(self.endpoints, (self.trust,))


def fingerprint(ca_pem: str) -> str:
    """`sha256:…` of the certificate, as join tokens name it, too. InvalidRequest: it is none."""
    try:
        return "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(ca_pem.strip())).hexdigest()
    except ValueError as error:
        raise InvalidRequest(
            f"not a certificate in PEM: {error}", hint="it begins with -----BEGIN CERTIFICATE"
        ) from error


def logins_directory(environ: Mapping[str, str]) -> str:
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/nonexistent"), ".config")
    return os.path.join(home, "gpulayer", "logins")


def read_logins(environ: Mapping[str, str]) -> list[Login]:
    """All of them, by cluster. PermissionDenied for a file that others could have read or written."""
    directory = logins_directory(environ)
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StorageFailed(f"cannot read {directory}: {error.strerror}", hint="is HOME right?") from error
    return [_read(os.path.join(directory, name)) for name in names]


def _read(path: str) -> Login:
    try:
        # Not through a link that somebody else made.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            content = file.read(LOGIN_BYTES_MAX)
    except OSError as error:
        raise StorageFailed(f"cannot read {path}: {error.strerror}", hint="log in again: gpulayer login URL") from error
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.geteuid():
        raise PermissionDenied(f"{path} has a token in it, and others may read or write it", hint=f"chmod 600 {path}")
    try:
        document = json.loads(content)
        return Login(
            cluster=str(document["cluster"]),
            endpoints=tuple((str(host), int(port)) for host, port in document["endpoints"]) or _nothing(),
            ca_pem=str(document["ca_pem"]),
            token=str(document["token"]),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise StorageFailed(f"{path} is damaged: {error!r:.80}", hint="remove it, and log in again") from error


def _nothing() -> tuple[tuple[str, int], ...]:
    raise ValueError("no node is named")


def save(login: Login, environ: Mapping[str, str]) -> str:
    """Instead of what was kept of that cluster; the path. Never readable by others, not for an instant."""
    directory = logins_directory(environ)
    path = _path_of(login.cluster, environ)
    document = {
        "cluster": login.cluster,
        "endpoints": login.endpoints[:URLS_MAX],
        "ca_pem": login.ca_pem,
        "token": login.token,
    }
    try:
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        new = f"{path}.{os.getpid()}.new"
        with suppress(FileNotFoundError):
            os.unlink(new)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w") as file:
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(descriptor)
            os.replace(new, path)
        except BaseException:
            os.unlink(new)
            raise
    except OSError as error:
        raise StorageFailed(
            f"cannot write {path}: {error.strerror}", hint="is there room, and is HOME right?"
        ) from error
    return path


def forget(login: Login, environ: Mapping[str, str]) -> None:
    path = _path_of(login.cluster, environ)
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageFailed(f"cannot remove {path}: {error.strerror}") from error


def _path_of(cluster: str, environ: Mapping[str, str]) -> str:
    # It came from a server, and becomes a name of a file.
    if (
        not cluster
        or len(cluster) > 100
        or not all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in cluster)
    ):
        raise InvalidRequest(f"{cluster!r:.120} is no id of a cluster", hint="what answers there is no gpulayer daemon")
    return os.path.join(logins_directory(environ), f"{cluster}.json")
