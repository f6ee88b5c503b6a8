"""Certificates and their files, with the real library and a real disk; TLS over a pair of sockets."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gpulayer.model.errors import GpulayerError, InvalidRequest, PermissionDenied, Refused, StorageFailed, Unreachable
from gpulayer.model.ids import NodeId
from gpulayer.model.trust import Authority, GossipKey, KeyRing
from gpulayer.runtime import trust
from gpulayer.runtime.trust import Identity, KeyPair
from gpulayer.runtime.trust_files import Trust, TrustFiles

CLUSTER = "c-0011223344556677"
NODE = NodeId("n-0123456789abcdef")
AUTHORITY = trust.new_authority(CLUSTER)
RING = KeyRing(version=3, keys=(trust.new_gossip_key(bytes(range(32)), 5.0),))


def certificate(
    keys: KeyPair,
    *,
    authority: Authority = AUTHORITY,
    node: NodeId = NODE,
    names: tuple[str, ...] = ("127.0.0.1", "gpu1.example.org"),
    days: int = trust.CERTIFICATE_DAYS,
    at: datetime | None = None,
) -> str:
    return trust.issue(authority, node, CLUSTER, keys.public_pem, names, days, at=at)


def written(data_dir: Path, **changes: str | KeyRing) -> TrustFiles:
    keys = trust.new_key_pair()
    files = TrustFiles(data_dir)
    arguments = {
        "certificate_pem": certificate(keys),
        "private_key_pem": keys.private_pem,
        "ca_certificate_pem": AUTHORITY.certificate_pem,
        "key_ring": RING,
    }
    files.write(**{**arguments, **changes})  # type: ignore[arg-type]
    return files


# --- certificates -----------------------------------------------------------------------------------------------


def test_a_certificate_names_its_node_and_its_addresses() -> None:
    pem = certificate(trust.new_key_pair(), names=("10.0.0.5", "fd00::0:5", "GPU1.example.org", "10.0.0.5"))
    assert trust.identity_of(pem) == Identity(CLUSTER, NODE)
    assert trust.identity_of(ssl.PEM_cert_to_DER_cert(pem)) == Identity(CLUSTER, NODE)
    assert trust.names_of(pem) == ("10.0.0.5", "fd00::5", "gpu1.example.org")
    assert 364 < trust.days_left(pem) <= 365
    trust.check_issued(pem, AUTHORITY.certificate_pem)


def test_an_authority_says_whose_it_is_and_issues_no_further_one() -> None:
    ca = x509.load_pem_x509_certificate(AUTHORITY.certificate_pem.encode())
    assert ca.subject.rfc4514_string() == f"CN=gpulayer cluster {CLUSTER}"
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    assert trust.pin(AUTHORITY.certificate_pem) == trust.pin(AUTHORITY.certificate_pem + "\n# comment")
    assert trust.PIN_PATTERN.fullmatch(trust.pin(AUTHORITY.certificate_pem))


def test_secrets_are_in_no_representation() -> None:
    keys = trust.new_key_pair()
    assert keys.private_pem not in repr(keys)
    assert "PRIVATE" not in repr(AUTHORITY)
    assert repr(bytes(range(32))) not in repr(RING)
    assert keys == (keys.private_pem, keys.public_pem)


@pytest.mark.parametrize(
    "name", ["", "10.0.0.5:7451", "[::1]", "a b", "-x.org", "x" * 64, "x/../y", "*.example.org", "a\0b", "é.org"]
)
def test_what_is_no_name_is_not_certified(name: str) -> None:
    with pytest.raises(InvalidRequest, match="neither an IP address nor a DNS name"):
        certificate(trust.new_key_pair(), names=(name,))


def test_too_many_names_are_not_certified() -> None:
    with pytest.raises(InvalidRequest, match="33 names"):
        certificate(trust.new_key_pair(), names=tuple(f"10.0.0.{number}" for number in range(33)))


@pytest.mark.parametrize("node", ["", "n/x", "n x", "n\nx", "n" * 65])
def test_an_id_that_would_read_differently_in_a_certificate_is_refused(node: str) -> None:
    with pytest.raises(InvalidRequest, match="is not an identity"):
        certificate(trust.new_key_pair(), node=NodeId(node))


def test_only_keys_of_the_one_kind_are_certified() -> None:
    others = (ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048))
    for key in others:
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        with pytest.raises(InvalidRequest, match="not ECDSA on P-256"):
            trust.issue(AUTHORITY, NODE, CLUSTER, pem, ())
    with pytest.raises(InvalidRequest, match="not a public key"):
        trust.issue(AUTHORITY, NODE, CLUSTER, "garbage", ())


def test_a_certificate_of_nobody_in_particular_has_no_identity() -> None:
    for other in (AUTHORITY.certificate_pem, {"subjectAltName": (("URI", "gpulayer://c-1/n-1/x"),)}, b"garbage", {}):
        with pytest.raises(PermissionDenied) as caught:
            trust.identity_of(other)
        assert caught.value.code == "bad_certificate"
    two = {"subjectAltName": (("URI", "gpulayer://c-1/n-1"), ("URI", "gpulayer://c-1/n-2"))}
    with pytest.raises(PermissionDenied):
        trust.identity_of(two)


def test_a_certificate_is_renewed_in_time_or_when_a_name_is_missing() -> None:
    pem = certificate(trust.new_key_pair())
    assert not trust.needs_renewal(pem, ["127.0.0.1"])
    assert trust.needs_renewal(pem, ["127.0.0.1", "10.0.0.9"])
    later = datetime.now(UTC) + timedelta(days=trust.CERTIFICATE_DAYS - trust.RENEW_DAYS + 1)
    assert trust.needs_renewal(pem, [], at=later)
    assert trust.days_left(pem, at=later + timedelta(days=365)) < 0


def test_a_gossip_key_has_its_id_from_its_secret() -> None:
    assert trust.new_gossip_key(bytes(32)) == GossipKey(id=0x66687AAD, secret=bytes(32))  # sha256 of 32 zeros
    with pytest.raises(ValueError, match="32 bytes"):
        trust.new_gossip_key(b"short")


# --- files ------------------------------------------------------------------------------------------------------


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    assert not TrustFiles(tmp_path).exist
    files = written(tmp_path)
    assert files.exist
    found = files.read(NODE)
    assert found.identity == Identity(CLUSTER, NODE)
    assert found.key_ring == RING
    assert found.ca_certificate_pem == AUTHORITY.certificate_pem
    assert "PRIVATE" not in repr(found)
    assert isinstance(found, Trust)


def test_no_file_is_readable_by_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = written(tmp_path)
        files.write_key_ring(RING)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files.directory.iterdir()}
    assert modes == {"node.key": 0o600, "node.pem": 0o600, "ca.pem": 0o600, "keyring.cbor": 0o600}
    assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700


def test_a_key_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    files = written(tmp_path)
    files.key_path.chmod(0o644)
    files.directory.chmod(0o755)
    files.read(NODE)
    assert stat.S_IMODE(files.key_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(files.directory.stat().st_mode) == 0o700


def test_a_host_asks_to_be_let_in_for_one_key_until_it_is_a_member(tmp_path: Path) -> None:
    keys = TrustFiles(tmp_path).key_to_join_with()
    path = TrustFiles(tmp_path).joining_key_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert TrustFiles(tmp_path).key_to_join_with() == keys
    TrustFiles(tmp_path).has_joined()
    assert TrustFiles(tmp_path).key_to_join_with() != keys


def test_a_key_to_join_with_that_cannot_be_read_is_made_anew(tmp_path: Path) -> None:
    files = TrustFiles(tmp_path)
    files.key_to_join_with()
    files.joining_key_path.write_bytes(b"\xff")
    assert files.key_to_join_with() == files.key_to_join_with()


def _other_key(files: TrustFiles) -> None:
    files.key_path.write_text(trust.new_key_pair().private_pem)


def _other_authority(files: TrustFiles) -> None:
    files.ca_path.write_text(trust.new_authority(CLUSTER).certificate_pem)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_other_key, "the key does not belong to the certificate"),
        (_other_authority, "not issued by this cluster's authority"),
        (lambda files: files.key_path.unlink(), "node.key is missing"),
        (lambda files: files.key_ring_path.unlink(), "keyring.cbor is missing"),
        (lambda files: files.ca_path.write_text("x"), "not a certificate"),
        (lambda files: files.certificate_path.write_bytes(b"\xff"), "node.pem is no PEM text"),
        (lambda files: files.key_path.write_text("x"), "not a private key"),
        (lambda files: files.key_ring_path.write_bytes(b"\xff"), "keyring.cbor: "),
    ],
    ids=["other key", "other authority", "no key", "no ring", "no CA", "binary", "no PEM key", "broken ring"],
)
def test_files_that_do_not_fit_are_told_with_a_remedy(
    tmp_path: Path, spoil: Callable[[TrustFiles], None], words: str
) -> None:
    files = written(tmp_path)
    spoil(files)
    with pytest.raises(StorageFailed) as caught:
        files.read(NODE)
    assert words in caught.value.message
    assert caught.value.code == "trust_damaged"
    assert "gpulayer up --join" in caught.value.hint


def test_the_certificate_of_another_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=f"that of node {NODE}, this is node n-9") as caught:
        written(tmp_path).read(NodeId("n-9"))
    assert caught.value.code == "foreign_certificate"


def test_an_expired_certificate_is_refused_but_to_who_can_renew_it(tmp_path: Path) -> None:
    files = written(tmp_path)
    late = datetime.now(UTC) + timedelta(days=trust.CERTIFICATE_DAYS + 10)
    with pytest.raises(Refused, match="expired 10 days ago") as caught:
        files.read(NODE, at=late)
    assert caught.value.code == "certificate_expired"
    assert files.read(NODE, at=late, may_be_expired=True).identity.node == NODE


def test_a_renewed_certificate_replaces_the_old_one_if_it_is_of_the_same_key(tmp_path: Path) -> None:
    files = written(tmp_path)
    found = files.read(NODE)
    keys = KeyPair(found.private_key_pem, public_pem_of(found.certificate_pem))
    files.replace_certificate(certificate(keys, names=("10.9.9.9",)))
    assert trust.names_of(files.read(NODE).certificate_pem) == ("10.9.9.9",)
    with pytest.raises(PermissionDenied):
        files.replace_certificate(certificate(trust.new_key_pair()))
    with pytest.raises(PermissionDenied):
        files.replace_certificate(certificate(keys, authority=trust.new_authority(CLUSTER)))
    assert trust.names_of(files.read(NODE).certificate_pem) == ("10.9.9.9",)


def public_pem_of(pem: str) -> str:
    key = trust.read_certificate(pem).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def test_what_does_not_belong_together_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(PermissionDenied):
        written(tmp_path, private_key_pem=trust.new_key_pair().private_pem)
    assert not TrustFiles(tmp_path).exist
    with pytest.raises(PermissionDenied):
        written(tmp_path, ca_certificate_pem=trust.new_authority(CLUSTER).certificate_pem)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "trust").write_text("in the way")
    with pytest.raises(StorageFailed, match=f"cannot write {tmp_path}/trust: File exists"):
        written(tmp_path)


# --- TLS --------------------------------------------------------------------------------------------------------


def shaken(server: ssl.SSLContext, client: ssl.SSLContext, server_hostname: str | None = None) -> ssl.SSLSocket:
    """A client's end after the handshake; the server's has echoed one byte."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            try:
                with server.wrap_socket(theirs, server_side=True) as connection:
                    connection.sendall(connection.recv(1))
            except OSError:
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    ours.settimeout(5)
    try:
        connection = client.wrap_socket(ours, server_hostname=server_hostname)
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        return connection
    except BaseException:
        ours.close()
        raise
    finally:
        thread.join(5)


def test_two_nodes_of_a_cluster_shake_hands_by_tls_1_3(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = written(tmp_path / "a").contexts(), written(tmp_path / "b").contexts()
    with shaken(a.server, b.client) as connection:
        assert connection.version() == "TLSv1.3"
        assert trust.identity_of(connection.getpeercert() or {}) == Identity(CLUSTER, NODE)
        assert trust.presented_authority(connection) == AUTHORITY.certificate_pem
        assert trust.presented_authority(connection, trust.pin(AUTHORITY.certificate_pem)) == AUTHORITY.certificate_pem
        with pytest.raises(PermissionDenied):
            trust.presented_authority(connection, "sha256:" + "0" * 64)


def test_older_tls_is_not_spoken(tmp_path: Path) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shaken(written(tmp_path).contexts().server, old)


def test_a_client_that_checks_names_refuses_other_ones(tmp_path: Path) -> None:
    server = written(tmp_path).server_context(ask_for_client_certificate=False)
    client = trust.client_context(AUTHORITY.certificate_pem, check_names=True)
    shaken(server, client, "127.0.0.1").close()
    shaken(server, client, "gpu1.example.org").close()
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(server, client, "10.0.0.1")


def test_the_certificates_pass_the_strict_rules_of_rfc_5280(tmp_path: Path) -> None:
    """From 3.13 on Python asks for them by default."""
    client = trust.client_context(AUTHORITY.certificate_pem, check_names=True)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    shaken(written(tmp_path).contexts().server, client, "127.0.0.1").close()


def test_who_presents_no_pinned_authority_is_told_apart_from_who_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
    with pytest.raises(Unreachable, match="cannot reach"):
        trust.fetch_authority("127.0.0.1", port, None, seconds=1)


def test_what_is_no_certificate_is_no_ca_either() -> None:
    with pytest.raises(GpulayerError, match="not a CA certificate"):
        trust.client_context("garbage", check_names=False)
