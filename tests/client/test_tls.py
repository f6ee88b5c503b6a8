"""Clients over TLS: whom they believe, with which token, and what `gpulayer login` keeps for that."""

from __future__ import annotations

import json
import os
import pty
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

import gpulayer as gl
from gpulayer.client.address import Secure, UnixSocket, find_address
from gpulayer.client.logins import Login, fingerprint, logins_directory, read_logins, save
from gpulayer.runtime import trust
from tests.node.nodes import Node, running
from tests.runtime.test_peer_links import AUTHORITY, CLUSTER

SECONDS_MAX = 20.0
EVERYWHERE = "0.0.0.0"
OTHER = trust.new_authority("c-other")


async def in_thread(call: Any, *arguments: Any, **keywords: Any) -> Any:
    with trio.fail_after(2 * SECONDS_MAX):
        return await trio.to_thread.run_sync(partial(call, *arguments, **keywords), abandon_on_cancel=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user who has no daemon."""
    for name in list(os.environ):
        if name.startswith("GPULAYER_"):
            monkeypatch.delenv(name)
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(path / "config"))
    return path


def url_of(node: Node) -> str:
    return f"https://127.0.0.1:{node.port}"


def login_of(*nodes: Node, token: str, pem: str = AUTHORITY.certificate_pem, cluster: str = CLUSTER) -> Login:
    return Login(cluster=cluster, endpoints=tuple(("127.0.0.1", n.port) for n in nodes), ca_pem=pem, token=token)


def cli(*words: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpulayer", *words],
        input=stdin, capture_output=True, text=True, timeout=SECONDS_MAX, env={**os.environ, **environ}, check=False,
    )  # fmt: skip


# --- whom they believe ----------------------------------------------------------------------------------------------


async def test_a_login_is_found_by_url_by_cluster_and_alone(tmp_path: Path, home: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        save(login_of(node, token=await node.token("admin")), os.environ)
        for url in (url_of(node), CLUSTER):
            client = gl.connect(url)
            assert await in_thread(client.jobs) == []
            assert client.url == url_of(node)
        async with gl.aio.connect(url_of(node)) as client:
            assert await client.jobs() == []


async def test_another_node_of_the_cluster_is_known_by_its_certificate(tmp_path: Path, home: Path) -> None:
    async with running(tmp_path, "ab", bind=EVERYWHERE) as (a, b):
        save(login_of(a, token="gpl_wrong", pem=OTHER.certificate_pem, cluster="c-other"), os.environ)
        save(login_of(a, token=await a.token("admin")), os.environ)
        assert await in_thread(gl.connect(url_of(b)).jobs) == []
        async with gl.aio.connect(url_of(b)) as client:
            assert await client.jobs() == []


async def test_a_node_that_does_not_answer_is_passed_over(tmp_path: Path, home: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        login = login_of(node, token=await node.token("admin"))
        gone = ("127.0.0.1", _closed_port())
        save(
            Login(cluster=CLUSTER, endpoints=(gone, *login.endpoints), ca_pem=login.ca_pem, token=login.token),
            os.environ,
        )
        client = gl.connect(CLUSTER)
        assert await in_thread(client.jobs) == []
        assert await in_thread(client.jobs) == []
        async with gl.aio.connect(CLUSTER) as other:
            assert await other.jobs() == []


def _closed_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def test_where_no_node_answers_all_were_tried(home: Path) -> None:
    endpoints = tuple(("127.0.0.1", _closed_port()) for _ in range(3))
    save(Login(cluster=CLUSTER, endpoints=endpoints, ca_pem=AUTHORITY.certificate_pem, token="gpl_x"), os.environ)
    with pytest.raises(gl.Unreachable, match="nor at 2 other nodes of that cluster"):
        await in_thread(gl.connect(CLUSTER).jobs)
    async with gl.aio.connect(CLUSTER) as client:
        with pytest.raises(gl.Unreachable, match="nor at 2 other nodes of that cluster"):
            await client.jobs()


async def test_who_shows_another_certificate_gets_no_token(tmp_path: Path, home: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        save(login_of(node, token="gpl_x", pem=OTHER.certificate_pem), os.environ)
        with pytest.raises(gl.PermissionDenied) as denied:
            await in_thread(gl.connect(url_of(node)).jobs)
        assert denied.value.code == "wrong_authority"
        async with gl.aio.connect(url_of(node)) as client:
            with pytest.raises(gl.PermissionDenied) as denied:
                await client.jobs()
        assert denied.value.code == "wrong_authority"
        assert f"gpulayer login {url_of(node)}" in denied.value.hint


async def test_the_authority_may_come_from_a_file(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = home / "ca.pem"
    ca.write_text(AUTHORITY.certificate_pem)
    monkeypatch.setenv("GPULAYER_CA_FILE", str(ca))
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        token = await node.token("admin")
        assert await in_thread(gl.connect(url_of(node), token).jobs) == []
        with pytest.raises(gl.PermissionDenied, match="needs a token"):
            await in_thread(gl.connect(url_of(node)).jobs)
        monkeypatch.setenv("GPULAYER_TOKEN", token)
        assert await in_thread(gl.connect(url_of(node)).jobs) == []
    for text in ("", "nothing"):
        ca.write_text(text)
        with pytest.raises(gl.InvalidRequest):
            await in_thread(gl.connect("https://127.0.0.1:7450").jobs)


def test_an_https_url_that_nobody_logged_in_to_says_how(home: Path) -> None:
    for connect in (gl.connect, gl.aio.connect):
        with pytest.raises(gl.PermissionDenied) as denied:
            connect("https://10.0.0.5")
        assert denied.value.hint.startswith("gpulayer login https://10.0.0.5:7450")


async def test_a_stream_over_tls_comes_as_it_is_made(tmp_path: Path, home: Path) -> None:
    async with running(tmp_path, "ab", bind=EVERYWHERE) as (a, b):
        save(login_of(b, token=await a.token("admin")), os.environ)
        job = await a.place("web", b)
        b.write(job, 0, "hello\n")

        def first_line() -> str:
            lines = gl.connect(CLUSTER).job("web").logs(follow=True)
            try:
                return next(lines).text
            finally:
                lines.close()

        assert await in_thread(first_line) == "hello"
        async with gl.aio.connect(CLUSTER) as client:
            with trio.fail_after(SECONDS_MAX):
                async for line in (await client.job("web")).logs(follow=True):
                    assert line.text == "hello"
                    break


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_a_login_is_its_owners_alone(home: Path) -> None:
    login = Login(cluster="c-1", endpoints=(("10.0.0.5", 7450),), ca_pem=AUTHORITY.certificate_pem, token="gpl_secret")
    path = save(login, os.environ)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(logins_directory(os.environ)).st_mode) == 0o700
    assert read_logins(os.environ) == [login]
    assert "gpl_secret" not in repr(login) + repr(login.address)
    os.chmod(path, 0o640)
    with pytest.raises(gl.PermissionDenied, match="others may read"):
        read_logins(os.environ)


@pytest.mark.parametrize("cluster", ["", "../c", "c/1", "c" * 200, "c-\n"])
def test_a_cluster_id_that_is_no_name_of_a_file_is_refused(home: Path, cluster: str) -> None:
    with pytest.raises(gl.InvalidRequest):
        save(Login(cluster=cluster, endpoints=(("h", 1),), ca_pem="", token="t"), os.environ)
    assert not Path(logins_directory(os.environ)).exists()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"cluster": "c", "endpoints": [], "ca_pem": "", "token": ""}'])
def test_a_damaged_login_is_said(home: Path, content: str) -> None:
    path = Path(save(Login(cluster="c-1", endpoints=(("h", 1),), ca_pem="", token="t"), os.environ))
    path.write_text(content)
    with pytest.raises(gl.GpulayerError, match="damaged"):
        read_logins(os.environ)


@pytest.mark.skipif(os.path.exists("/var/lib/gpulayer/gpulayer.sock"), reason="a daemon runs here")
def test_the_socket_of_a_daemon_comes_before_a_login(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login = Login(cluster="c-1", endpoints=(("10.0.0.5", 7450),), ca_pem=AUTHORITY.certificate_pem, token="t")
    assert isinstance(find_address(None, None, os.environ), UnixSocket)
    save(login, os.environ)
    assert find_address(None, None, os.environ) == login.address
    assert isinstance(find_address(None, "/elsewhere", os.environ), UnixSocket)
    monkeypatch.setenv("GPULAYER_DATA_DIR", "/elsewhere")
    assert isinstance(find_address(None, None, os.environ), UnixSocket)
    monkeypatch.delenv("GPULAYER_DATA_DIR")
    save(Login(cluster="c-2", endpoints=(("10.0.0.6", 7450),), ca_pem="", token="t"), os.environ)
    with pytest.raises(gl.InvalidRequest, match="logged in to 2 clusters"):
        find_address(None, None, os.environ)
    assert find_address("https://10.0.0.5:7450", None, os.environ) == login.address
    found = find_address("https://10.0.0.7", None, os.environ)
    assert isinstance(found, Secure)
    assert [each.cluster for each in found.trusts] == ["c-1", "c-2"]


# --- gpulayer login -------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_the_pin_of_join_tokens() -> None:
    assert fingerprint(AUTHORITY.certificate_pem) == trust.pin(AUTHORITY.certificate_pem)


async def test_login_pins_the_authority_and_keeps_the_token(tmp_path: Path, home: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        token = await node.token("admin")
        (home / "token").write_text(token + "\n")
        pin = trust.pin(AUTHORITY.certificate_pem)
        words = ("login", url_of(node), "--fingerprint", pin, "--token-file", str(home / "token"))
        done = await in_thread(cli, *words)
        assert done.returncode == 0, done.stderr
        assert token not in done.stdout + done.stderr
        (kept,) = read_logins(os.environ)
        assert (kept.cluster, kept.token, kept.ca_pem) == (CLUSTER, token, AUTHORITY.certificate_pem)
        listed = json.loads((await in_thread(cli, "job", "list", "--json", "--url", url_of(node))).stdout)
        assert listed == []
        shown = json.loads((await in_thread(cli, "login", "--list", "--json")).stdout)
        assert [(each["cluster"], each["fingerprint"]) for each in shown] == [(CLUSTER, pin)]
        assert token not in json.dumps(shown)
        again = await in_thread(cli, "login", url_of(node), GPULAYER_TOKEN=token)
        assert again.returncode == 0, "the authority is known by now"
        gone = await in_thread(cli, "logout", url_of(node))
        assert (gone.returncode, read_logins(os.environ)) == (0, [])
        assert (await in_thread(cli, "logout", url_of(node))).returncode == 4


async def test_login_refuses_what_is_not_certain(tmp_path: Path, home: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        token, pin = await node.token("admin"), trust.pin(AUTHORITY.certificate_pem)
        nobody = await in_thread(cli, "login", url_of(node), GPULAYER_TOKEN=token)
        assert nobody.returncode == 2
        assert f"--fingerprint {pin}" in nobody.stderr
        wrong = trust.pin(OTHER.certificate_pem)
        other = await in_thread(cli, "login", url_of(node), "--fingerprint", wrong, GPULAYER_TOKEN=token)
        assert other.returncode == 5
        assert pin in other.stderr
        no_pin = await in_thread(cli, "login", url_of(node), "--fingerprint", "abc", GPULAYER_TOKEN=token)
        assert no_pin.returncode == 2
        no_token = await in_thread(cli, "login", url_of(node), "--fingerprint", pin)
        assert no_token.returncode == 2
        bad_token = await in_thread(cli, "login", url_of(node), "--fingerprint", pin, GPULAYER_TOKEN="gpl_no")
        assert bad_token.returncode == 5
        of_hosts = await in_thread(cli, "login", url_of(node), "--fingerprint", pin, GPULAYER_TOKEN="gpj_secret.pin")
        assert of_hosts.returncode == 2
        assert "--role" in of_hosts.stderr
        assert "secret" not in of_hosts.stderr
        assert read_logins(os.environ) == []


async def test_login_refuses_an_authority_that_has_changed(tmp_path: Path, home: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        save(login_of(node, token="gpl_x", pem=OTHER.certificate_pem), os.environ)
        done = await in_thread(cli, "login", url_of(node), GPULAYER_TOKEN=await node.token("admin"))
        assert done.returncode == 5
        assert "has changed" in done.stderr


async def test_login_asks_a_person_and_hides_the_token(tmp_path: Path, home: Path) -> None:
    async with running(tmp_path, "a", bind=EVERYWHERE) as (node,):
        token = await node.token("admin")
        said = await in_thread(_at_terminal, ["login", url_of(node)], [("Type yes", "yes"), ("Token", token)])
        assert trust.pin(AUTHORITY.certificate_pem) in said
        assert token not in said
        assert [each.token for each in read_logins(os.environ)] == [token]


def _at_terminal(words: list[str], answers: list[tuple[str, str]]) -> str:
    """What is shown; each answer is typed once its question stands there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "gpulayer", *words])
    said, until = "", time.monotonic() + SECONDS_MAX
    try:
        while time.monotonic() < until:
            try:
                said += os.read(terminal, 4096).decode()
            except OSError:
                break  # its end
            if answers and answers[0][0] in said:
                time.sleep(0.1)  # getpass throws away what was typed before it had asked
                os.write(terminal, answers.pop(0)[1].encode() + b"\n")
        return said
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:7450", "unix:///run/gpulayer.sock", "https://h/path", "h:0", ""])
def test_login_takes_the_url_of_a_node(home: Path, url: str) -> None:
    assert cli("login", url).returncode == 2


def test_what_does_not_speak_tls_is_said(home: Path) -> None:
    import http.server
    import threading

    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        done = cli("login", f"https://127.0.0.1:{server.server_port}")
        assert done.returncode == 3, done.stderr
        assert "does not speak TLS" in done.stderr
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
