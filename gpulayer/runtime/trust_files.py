"""What a node keeps of its trust: the directory `trust/` of its data directory, everything in it for its user alone.

    node.key      the private key, made here and never sent
    joining.key   the same, while this host asks to be let in
    ca.pem        the cluster's CA
    keyring.cbor  the gossip keys, as last heard
    node.pem      the certificate, then the CA's; written last, so that with it everything is there

Blocks; called at the start, after a renewal and after a rotation.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from ssl import SSLContext, SSLError

import structlog

from gpulayer.model.errors import GpulayerError, Refused, StorageFailed
from gpulayer.model.ids import NodeId
from gpulayer.model.trust import KeyRing
from gpulayer.runtime import trust
from gpulayer.runtime.identity import atomic_write
from gpulayer.runtime.trust import REJOIN_HINT, Contexts, Identity, KeyPair
from gpulayer.wire.codec import DecodeError, decode, encode

log = structlog.get_logger()

NAME = "trust"
# Many times what is in any of them.
FILE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """All of it, checked: the pair matches, the CA has issued it, and it is this node's."""

    identity: Identity
    ca_certificate_pem: str
    certificate_pem: str
    private_key_pem: str = field(repr=False)
    key_ring: KeyRing


class TrustFiles:
    """`data_dir`: of the node, locked by the caller."""

    def __init__(self, data_dir: Path) -> None:
        self.directory = data_dir / NAME
        self.certificate_path = self.directory / "node.pem"
        self.key_path = self.directory / "node.key"
        self.joining_key_path = self.directory / "joining.key"
        self.ca_path = self.directory / "ca.pem"
        self.key_ring_path = self.directory / "keyring.cbor"

    @property
    def exist(self) -> bool:
        """Whether this node was made a member once."""
        return self.certificate_path.exists()

    def read(self, node: NodeId, *, at: datetime | None = None, may_be_expired: bool = False) -> Trust:
        """What was kept. `may_be_expired`: for the voter, which issues itself a new certificate.

        StorageFailed (code `trust_damaged`): a file is missing, unreadable, or does not fit the others. Refused: the
        certificate is another node's (`foreign_certificate`) or has expired (`certificate_expired`)."""
        self._close_to_others()
        chain, ca_pem = self._text(self.certificate_path), self._text(self.ca_path)
        private_pem = self._text(self.key_path)
        try:
            certificate_pem = trust.first_of(chain)
            trust.check_pair(certificate_pem, private_pem)
            trust.check_issued(certificate_pem, ca_pem)
            identity = trust.identity_of(certificate_pem)
            ring: KeyRing = decode(KeyRing, self._bytes(self.key_ring_path), bytes_max=FILE_BYTES_MAX)
        except GpulayerError as error:
            raise self._damaged(error.message) from error
        except DecodeError as error:
            raise self._damaged(f"{self.key_ring_path.name}: {error}") from error
        if identity.node != node:
            raise Refused(
                f"the certificate in {self.directory} is that of node {identity.node}, this is node {node}",
                hint=f"remove {self.directory} and {REJOIN_HINT}",
                code="foreign_certificate",
            )
        days = trust.days_left(certificate_pem, at=at)
        if days <= 0 and not may_be_expired:
            raise Refused(
                f"the certificate of node {node} expired {-days:.0f} days ago",
                hint=f"if this host's clock is right, {REJOIN_HINT}",
                code="certificate_expired",
            )
        return Trust(
            identity=identity,
            ca_certificate_pem=ca_pem,
            certificate_pem=certificate_pem,
            private_key_pem=private_pem,
            key_ring=ring,
        )

    def write(self, *, certificate_pem: str, private_key_pem: str, ca_certificate_pem: str, key_ring: KeyRing) -> None:
        """Durable on return. Cut short, it leaves a node that is no member, and not one with half of its keys.
        PermissionDenied: the three do not belong together; then nothing is written. StorageFailed."""
        trust.check_pair(certificate_pem, private_key_pem)
        trust.check_issued(certificate_pem, ca_certificate_pem)
        try:
            self._make_directory()
            self.certificate_path.unlink(missing_ok=True)
            atomic_write(self.key_path, private_key_pem.encode())
            atomic_write(self.ca_path, ca_certificate_pem.encode())
            atomic_write(self.key_ring_path, encode(key_ring))
            atomic_write(self.certificate_path, (certificate_pem + ca_certificate_pem).encode())
        except OSError as error:
            raise self._cannot("write", error) from error

    def key_to_join_with(self) -> KeyPair:
        """Durable on return, and the same one until has_joined(): a host that was let in, and ended before it had kept
        the answer, asks again for the same key and spends no second use of its token. StorageFailed."""
        try:
            private_pem = self.joining_key_path.read_text("ascii")
            return KeyPair(private_pem=private_pem, public_pem=trust.public_half(private_pem))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, GpulayerError) as error:
            log.warning("trust.joining_key_unreadable", path=str(self.joining_key_path), reason=str(error))
        keys = trust.new_key_pair()
        try:
            self._make_directory()
            atomic_write(self.joining_key_path, keys.private_pem.encode())
        except OSError as error:
            raise self._cannot("write", error) from error
        return keys

    def has_joined(self) -> None:
        """The next time it joins with another key. OSError."""
        self.joining_key_path.unlink(missing_ok=True)

    def replace_certificate(self, certificate_pem: str) -> None:
        """A renewed one for the same key. PermissionDenied: not of this key, or not this CA's; StorageFailed."""
        ca_pem = self._text(self.ca_path)
        trust.check_pair(certificate_pem, self._text(self.key_path))
        trust.check_issued(certificate_pem, ca_pem)
        try:
            atomic_write(self.certificate_path, (certificate_pem + ca_pem).encode())
        except OSError as error:
            raise self._cannot("write", error) from error

    def public_key_pem(self) -> str:
        """Of the pair whose private half is here. StorageFailed."""
        return trust.public_half(self._text(self.key_path))

    def remove(self) -> None:
        """It is no member any more. OSError."""
        for path in (self.certificate_path, self.key_path, self.joining_key_path, self.key_ring_path, self.ca_path):
            path.unlink(missing_ok=True)

    def write_key_ring(self, ring: KeyRing) -> None:
        """StorageFailed."""
        try:
            atomic_write(self.key_ring_path, encode(ring))
        except OSError as error:
            raise self._cannot("write", error) from error

    def contexts(self) -> Contexts:
        """For links between peers, of what the files hold now. StorageFailed."""
        client = trust.client_context(self._text(self.ca_path), check_names=False)
        try:
            client.load_cert_chain(self.certificate_path, self.key_path)
        except (OSError, SSLError) as error:
            raise self._damaged(f"{self.certificate_path.name} and {self.key_path.name}: {error}") from error
        return Contexts(server=self.server_context(ask_for_client_certificate=True), client=client)

    def server_context(self, *, ask_for_client_certificate: bool) -> SSLContext:
        """A server's, of what the files hold now; see trust.server_context. StorageFailed."""
        try:
            return trust.server_context(
                str(self.certificate_path),
                str(self.key_path),
                self._text(self.ca_path),
                ask_for_client_certificate=ask_for_client_certificate,
            )
        except (OSError, SSLError) as error:
            raise self._damaged(f"{self.certificate_path.name} and {self.key_path.name}: {error}") from error

    def _make_directory(self) -> None:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.directory.chmod(0o700)
        _sync(self.directory.parent)

    def _close_to_others(self) -> None:
        """Somebody may have copied or restored them with other modes."""
        for path, mode in ((self.directory, 0o700), (self.key_path, 0o600), (self.key_ring_path, 0o600)):
            with suppress(OSError):
                if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                    os.chmod(path, mode)
                    log.warning(
                        "trust.was_open",
                        path=str(path),
                        hint="other users of this host may have read it; join again with a new key if that matters",
                    )

    def _text(self, path: Path) -> str:
        try:
            return self._bytes(path).decode("ascii")
        except UnicodeDecodeError:
            raise self._damaged(f"{path.name} is no PEM text") from None

    def _bytes(self, path: Path) -> bytes:
        try:
            with open(path, "rb") as file:
                return file.read(FILE_BYTES_MAX)
        except FileNotFoundError:
            raise self._damaged(f"{path.name} is missing") from None
        except OSError as error:
            raise self._cannot("read", error) from error

    def _damaged(self, what: str) -> StorageFailed:
        return StorageFailed(
            f"{self.directory} is damaged: {what}",
            hint=f"restore it from a backup, or remove it and {REJOIN_HINT}",
            code="trust_damaged",
        )

    def _cannot(self, act: str, error: OSError) -> StorageFailed:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return StorageFailed(
            f"cannot {act} {error.filename or self.directory}: {error.strerror or error}",
            hint="free some space" if is_full else "check that this user may read and write there",
            code="disk_full" if is_full else None,
        )


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
