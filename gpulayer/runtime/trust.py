"""Certificates and keys: the cluster's authority, a node's certificate, their files, and TLS contexts made of them.

A node certificate is what makes a host a member: signed by the cluster's CA, it names the node as a URI,
`gpulayer://<cluster>/<node>`. Peers judge that name, whatever address they met at; clients of the API judge the IP
addresses and DNS names that it has beside it. ECDSA on P-256 throughout, TLS 1.3 only.

Knows no sockets but for `fetch_authority`, and decides nothing about who may join.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, NamedTuple, cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gpulayer.model.errors import InvalidRequest, PermissionDenied, Unreachable
from gpulayer.model.ids import NodeId
from gpulayer.model.trust import Authority, GossipKey, KeyRing

CERTIFICATE_DAYS = 365
# A node that was off for as long as this comes back with the certificate that it has.
RENEW_DAYS = CERTIFICATE_DAYS // 3
# The CA has no successor: it outlives the cluster.
AUTHORITY_DAYS = 50 * 365
# Clocks of hosts differ; a certificate is not refused because its reader's is behind.
BACKDATED = timedelta(days=1)
NAMES_MAX = 32
GOSSIP_SECRET_BYTES = 32
# More than a rotation has at any moment.
RING_KEYS_MAX = 4
PEM_CHARS_MAX = 16 * 1024
PIN_PATTERN = re.compile(r"sha256:[0-9a-f]{64}")

_IDENTITY = re.compile(r"gpulayer://([A-Za-z0-9._-]{1,64})/([A-Za-z0-9._-]{1,64})")
_DNS_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*")
REJOIN_HINT = "join it again: gpulayer up --join HOST:PORT --token TOKEN"


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose certificate it is."""

    cluster_id: str
    node: NodeId

    def __str__(self) -> str:
        return f"gpulayer://{self.cluster_id}/{self.node}"


class KeyPair(NamedTuple):
    private_pem: str
    public_pem: str

    def __repr__(self) -> str:
        return "KeyPair(…)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """For links between peers; made anew when the certificate was renewed."""

    server: ssl.SSLContext
    client: ssl.SSLContext


# --- making -----------------------------------------------------------------------------------------------------


def new_authority(cluster_id: str, *, at: datetime | None = None) -> Authority:
    """A CA of its own for a new cluster. InvalidRequest: a cluster id that no certificate could name."""
    _checked_identity(cluster_id, "n")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"gpulayer cluster {cluster_id}"[:64])])
    since = (at or datetime.now(UTC)) - BACKDATED
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(since + BACKDATED + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate_pem=_pem(certificate), private_key_pem=_private_pem(key))


def new_key_pair() -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    return KeyPair(private_pem=_private_pem(key), public_pem=_public_pem(key.public_key()))


def public_half(private_pem: str) -> str:
    """The public key (PEM) of a private one."""
    return _public_pem(_private_key(private_pem).public_key())


def issue(
    authority: Authority,
    node: NodeId,
    cluster_id: str,
    public_key_pem: str,
    names: Sequence[str],
    days: int = CERTIFICATE_DAYS,
    *,
    at: datetime | None = None,
) -> str:
    """A node's certificate, as PEM. `names`: the IP addresses and DNS names that its API is called by.

    InvalidRequest: a key that is not ECDSA on P-256, or something that is no name.
    """
    identity = _checked_identity(cluster_id, node)
    public_key = _public_key(public_key_pem)
    ca, ca_key = read_certificate(authority.certificate_pem), _private_key(authority.private_key_pem)
    since = (at or datetime.now(UTC)) - BACKDATED
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)]))
        .issuer_name(ca.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(since + BACKDATED + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.UniformResourceIdentifier(str(identity)), *map(_general_name, checked_names(names))]
            ),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(cast(ec.EllipticCurvePublicKey, ca.public_key())),
            critical=False,
        )
    )
    return _pem(builder.sign(ca_key, hashes.SHA256()))


def new_gossip_key(secret: bytes, installed_at_utc: float = 0.0) -> GossipKey:
    """`secret`: 32 bytes of chance."""
    if len(secret) != GOSSIP_SECRET_BYTES:
        raise ValueError(f"a gossip key has {GOSSIP_SECRET_BYTES} bytes, not {len(secret)}")
    return GossipKey(
        id=int.from_bytes(sha256(secret).digest()[:4], "big"), secret=secret, installed_at_utc=installed_at_utc
    )


def is_usable(ring: KeyRing) -> bool:
    """Whether these are keys, as new_gossip_key() makes them, and not too many."""
    return 0 < len(ring.keys) <= RING_KEYS_MAX and all(
        len(key.secret) == GOSSIP_SECRET_BYTES and key.id == new_gossip_key(key.secret).id for key in ring.keys
    )


def checked_names(names: Sequence[str]) -> tuple[str, ...]:
    """Without repetition, IP addresses in their usual form. InvalidRequest: too many, or one that is no name."""
    found = dict.fromkeys(_checked_name(name) for name in names)
    if len(found) > NAMES_MAX:
        raise InvalidRequest(
            f"{len(found)} names for one certificate, {NAMES_MAX} at most", hint="name the node by fewer --api-name"
        )
    return tuple(found)


# --- reading ----------------------------------------------------------------------------------------------------


def read_certificate(pem: str) -> x509.Certificate:
    """The first certificate of the text. InvalidRequest: there is none."""
    try:
        return x509.load_pem_x509_certificate(pem[:PEM_CHARS_MAX].encode())
    except ValueError as error:
        raise InvalidRequest(f"not a certificate: {error}", hint="a PEM text is expected") from error


def first_of(chain_pem: str) -> str:
    """The first certificate of a PEM text, alone. InvalidRequest: there is none."""
    return _pem(read_certificate(chain_pem))


def pin(certificate_pem: str) -> str:
    """`sha256:…` of the certificate's DER: enough to know the CA by."""
    return f"sha256:{read_certificate(certificate_pem).fingerprint(hashes.SHA256()).hex()}"


def identity_of(certificate: Mapping[str, Any] | str | bytes | x509.Certificate) -> Identity:
    """Whose it is: of a verified peer's `getpeercert()`, a PEM text, or DER. PermissionDenied: not of a gpulayer node.

    Says nothing about who signed it: TLS, or check_issued(), does.
    """
    found = [match for uri in _uris(certificate) if (match := _IDENTITY.fullmatch(uri))]
    if len(found) != 1:
        raise PermissionDenied(
            "the certificate is not that of a gpulayer node",
            hint="is the address that of a gpulayer peer port?",
            code="bad_certificate",
        )
    return Identity(found[0][1], NodeId(found[0][2]))


def check_issued(certificate_pem: str, authority_pem: str) -> None:
    """That the CA has signed it. PermissionDenied."""
    try:
        read_certificate(certificate_pem).verify_directly_issued_by(read_certificate(authority_pem))
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise PermissionDenied(
            "the certificate was not issued by this cluster's authority", hint=REJOIN_HINT, code="bad_certificate"
        ) from error


def check_pair(certificate_pem: str, private_pem: str) -> None:
    """That the key is the certificate's. PermissionDenied."""
    certified = cast(ec.EllipticCurvePublicKey, read_certificate(certificate_pem).public_key())
    if _public_pem(certified) != _public_pem(_private_key(private_pem).public_key()):
        raise PermissionDenied("the key does not belong to the certificate", hint=REJOIN_HINT, code="bad_certificate")


def names_of(certificate_pem: str) -> tuple[str, ...]:
    """Its IP addresses and DNS names."""
    names = _alternative_names(read_certificate(certificate_pem))
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return (*addresses, *names.get_values_for_type(x509.DNSName))


def days_left(certificate_pem: str, *, at: datetime | None = None) -> float:
    """Until it expires; negative when it has."""
    ends = read_certificate(certificate_pem).not_valid_after_utc
    return (ends - (at or datetime.now(UTC))).total_seconds() / 86400


def needs_renewal(certificate_pem: str, names: Sequence[str], *, at: datetime | None = None) -> bool:
    """It runs out within RENEW_DAYS, or lacks one of the names."""
    return days_left(certificate_pem, at=at) < RENEW_DAYS or not {*checked_names(names)} <= {*names_of(certificate_pem)}


# --- TLS --------------------------------------------------------------------------------------------------------


def server_context(
    certificate_path: str, key_path: str, authority_pem: str, *, ask_for_client_certificate: bool
) -> ssl.SSLContext:
    """`ask_for_client_certificate`: one that is shown must be the CA's; none is no failure here, and the caller's to
    judge (a joiner has none). The chain that is sent has the CA at its end, for those who know it by its pin."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Peers keep their links; a ticket would be one more secret, and a write that nobody waits for.
    context.num_tickets = 0
    context.load_cert_chain(certificate_path, key_path)
    if ask_for_client_certificate:
        context.verify_mode = ssl.CERT_OPTIONAL
        context.load_verify_locations(cadata=authority_pem)
    return context


def client_context(authority_pem: str, *, check_names: bool) -> ssl.SSLContext:
    """Trusts this CA and nobody else. `check_names`: the address called must be among the certificate's names; peers
    look at the node's identity instead."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = check_names
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=authority_pem)
    except ssl.SSLError as error:
        raise InvalidRequest(f"not a CA certificate: {error}", hint="a PEM text is expected") from error
    return context


def join_context() -> ssl.SSLContext:
    """Shows no certificate and verifies none: only to look at what the other end presents, never to send anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def presented_authority(connection: ssl.SSLSocket | ssl.SSLObject, pinned: str | None = None) -> str:
    """The CA certificate (PEM) that a server presented at the end of its chain. Nothing is proved yet: with a `pinned`
    CA it is that one, and a second connection that trusts it alone shows whether the server's own is issued by it.

    PermissionDenied (code `wrong_authority`): it presents another CA, or none.
    """
    for der in reversed(_presented_chain(connection)):
        certificate = x509.load_der_x509_certificate(der)
        found = f"sha256:{sha256(der).hexdigest()}"
        if found == pinned or (pinned is None and certificate.issuer == certificate.subject):
            return _pem(certificate)
    raise PermissionDenied(
        "the certificate authority found there is not the one that the token names"
        if pinned
        else "no certificate authority is presented there",
        hint="is it the address of the cluster that the token is for? Someone may be in between",
        code="wrong_authority",
    )


def fetch_authority(host: str, port: int, pinned: str | None, *, seconds: float) -> str:
    """The CA certificate of the cluster at this address, by its pin. Blocks, connects, sends nothing.

    Unreachable; PermissionDenied (code `wrong_authority`)."""
    try:
        with (
            socket.create_connection((host, port), timeout=seconds) as plain,
            join_context().wrap_socket(plain, do_handshake_on_connect=True) as connection,
        ):
            return presented_authority(connection, pinned)
    except ssl.SSLError as error:
        raise Unreachable(
            f"no gpulayer at {host}:{port}: {error.reason or error}", hint="is it the peer port of a node (7451)?"
        ) from error
    except OSError as error:
        raise Unreachable(
            f"cannot reach {host}:{port}: {error.strerror or error}", hint="is a node running there?"
        ) from error


# --- within -----------------------------------------------------------------------------------------------------


def _presented_chain(connection: ssl.SSLSocket | ssl.SSLObject) -> list[bytes]:
    public = getattr(connection, "get_unverified_chain", None)
    if public is not None:  # from Python 3.13 on
        return list(public() or ())
    inner: Any = connection._sslobj  # type: ignore[union-attr]
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in inner.get_unverified_chain() or ()]


def _uris(certificate: Mapping[str, Any] | str | bytes | x509.Certificate) -> list[str]:
    if isinstance(certificate, Mapping):
        return [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    try:
        if isinstance(certificate, bytes):
            certificate = x509.load_der_x509_certificate(certificate)
        elif isinstance(certificate, str):
            certificate = read_certificate(certificate)
        return _alternative_names(certificate).get_values_for_type(x509.UniformResourceIdentifier)
    except ValueError:
        return []


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _checked_identity(cluster_id: str, node: str) -> Identity:
    identity = Identity(cluster_id, NodeId(node))
    if not _IDENTITY.fullmatch(str(identity)):
        raise InvalidRequest(f"{identity!s:.200} is not an identity", hint="ids have 1 to 64 of A-Z, a-z, 0-9, . _ -")
    return identity


def _checked_name(name: str) -> str:
    try:
        return str(ip_address(name))
    except ValueError:
        if not _DNS_NAME.fullmatch(name):
            raise InvalidRequest(
                f"{name!r:.300} is neither an IP address nor a DNS name", hint="write it without a port and brackets"
            ) from None
        return name.lower()


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _public_key(pem: str) -> ec.EllipticCurvePublicKey:
    try:
        key = load_pem_public_key(pem[:PEM_CHARS_MAX].encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidRequest("not a public key", hint="a PEM text of an ECDSA key is expected") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise InvalidRequest("the public key is not ECDSA on P-256", hint="make one with curve P-256 (prime256v1)")
    return key


def _private_key(pem: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(pem[:PEM_CHARS_MAX].encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # Without the cause's words: they might quote what they could not read.
        raise InvalidRequest("not a private key", hint="a PEM text of an ECDSA key is expected") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InvalidRequest("the private key is not ECDSA", hint="make one with curve P-256 (prime256v1)")
    return key


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _private_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _public_pem(key: ec.EllipticCurvePublicKey) -> str:
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
