"""Where the daemon listens: a port in use is an error before anything starts, a stale or long socket path is none."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpulayer.api.server import bind_sockets
from gpulayer.model.errors import GpulayerError, StorageFailed


def test_a_port_in_use_is_refused_naming_the_port_and_who_has_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with (
            pytest.raises(GpulayerError) as caught,
            bind_sockets(unix_path=tmp_path / "s", host="127.0.0.1", port=port),
        ):
            pass
        assert caught.value.code == "port_taken"
        assert str(port) in caught.value.message
        assert f"pid {os.getpid()}" in caught.value.message
        assert "--api-port" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_this_host_does_not_have_is_refused_with_the_option_for_it(tmp_path: Path) -> None:
    with (
        pytest.raises(GpulayerError, match=r"192\.0\.2\.7") as caught,
        bind_sockets(unix_path=tmp_path / "s", host="192.0.2.7", port=0),
    ):
        pass
    assert "--bind" in caught.value.hint


def test_a_daemon_whose_port_is_taken_says_so_and_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        command = [sys.executable, "-m", "gpulayer", "up", "--data-dir", str(tmp_path / "d"), "--api-port", str(port)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert ended.returncode != 0
    assert str(port) in ended.stderr
    assert not (tmp_path / "d" / "api.json").exists()


def test_the_socket_file_is_made_for_its_owner_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        with bind_sockets(unix_path=path, host="127.0.0.1", port=0) as sockets:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert sockets.port
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert not path.exists()


def test_without_a_port_there_is_only_the_socket_file(tmp_path: Path) -> None:
    with bind_sockets(unix_path=tmp_path / "s", host="127.0.0.1", port=None) as sockets:
        assert (sockets.tcp, sockets.port) == (None, None)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))


def test_a_stale_socket_file_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with bind_sockets(unix_path=path, host="127.0.0.1", port=0), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    path.write_text("precious")
    with pytest.raises(StorageFailed), bind_sockets(unix_path=path, host="127.0.0.1", port=0):
        pass
    assert path.read_text() == "precious"


def test_a_path_longer_than_a_socket_address_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with bind_sockets(unix_path=deep / "gpulayer.sock", host="127.0.0.1", port=0):
        directory = os.open(deep, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"/proc/self/fd/{directory}/gpulayer.sock")
        os.close(directory)
    assert list(deep.iterdir()) == []
