"""This node's certificate while it runs: in time a new one, also when the node is called by another name.

The voter issues its own; every other node asks the voter. The key pair stays; what is served changes with the file.
"""

from __future__ import annotations

from functools import partial
from ipaddress import ip_address
from ssl import SSLContext

import structlog
import trio

from gpulayer.model.errors import GpulayerError
from gpulayer.model.ids import NodeId
from gpulayer.node.config import Config
from gpulayer.node.following import Following
from gpulayer.node.place import Place
from gpulayer.node.voting import Voting
from gpulayer.runtime import trust
from gpulayer.runtime.trust_files import TrustFiles
from gpulayer.wire.peer import CertificateGiven, CertificateWanted

log = structlog.get_logger()

LOOKS_SECONDS = 6 * 3600.0


class Certificates:
    def __init__(self, *, node: NodeId, config: Config, files: TrustFiles, place: Place) -> None:
        self.files = files
        self._node, self._config, self._place = node, config, place
        self._tls: SSLContext | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What others call this node, for its certificate and the Host header."""
        names = [self._config.advertise, self._config.name]
        if not ip_address(self._config.bind).is_unspecified:
            names.append(self._config.bind)
        return trust.checked_names(tuple(dict.fromkeys(names)))

    @property
    def ca_pem(self) -> str:
        """Of the cluster's authority; empty where it has none yet."""
        if not self.files.exist:
            return ""
        try:
            return self.files.ca_path.read_text("ascii")
        except OSError:
            return ""

    def api_tls(self) -> SSLContext:
        """What the API is served with now. StorageFailed."""
        if self._tls is None:
            self._tls = self.files.server_context(ask_for_client_certificate=False)
        return self._tls

    async def run(self) -> None:
        """Looks for good whether there has to be a new one, once the node has its place."""
        while True:
            try:
                held = await trio.to_thread.run_sync(partial(self.files.read, self._node, may_be_expired=True))
                if trust.needs_renewal(held.certificate_pem, self.names):
                    await self._renew()
            except GpulayerError as error:
                log.warning("certificate.not_looked_at", reason=error.message)
            await trio.sleep(LOOKS_SECONDS)

    async def _renew(self) -> None:
        half = self._place.half
        if isinstance(half, Voting):
            await trio.to_thread.run_sync(half.certify_self, self.files, self.names)
            await self._use()
        elif isinstance(half, Following) and half.voter is not None:
            wanted = CertificateWanted(public_key_pem=self.files.public_key_pem(), names=self.names)
            self._place.send(half.voter, wanted)

    async def take(self, given: CertificateGiven) -> None:
        """By the voter, as asked."""
        try:
            await trio.to_thread.run_sync(self.files.replace_certificate, given.certificate_pem)
            await self._use()
            log.info("certificate.renewed", names=trust.names_of(given.certificate_pem))
        except GpulayerError as error:
            log.warning("certificate.not_taken", reason=error.message)

    async def _use(self) -> None:
        """What the files hold now, from the next handshake on."""
        contexts = await trio.to_thread.run_sync(self.files.contexts)
        if self._place.mesh is not None:
            self._place.mesh.use_contexts(contexts)
        self._tls = None
