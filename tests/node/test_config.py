"""What `gpulayer up` is told: file, environment, flags; and what is refused, with words."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer.model.errors import InvalidRequest
from gpulayer.node.config import Seed, UpOptions, load_config
from gpulayer.runtime.routes import default_source
from gpulayer.wire.join_token import JoinTokenText


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "gpulayer.toml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'name = "from-file"\napi_port = 1000\nadvertise = "127.0.0.9"\n')
    environ = {"GPULAYER_NAME": "from-env", "GPULAYER_API_PORT": "2000"}
    config = load_config(UpOptions(config=path, name="from-flag"), environ, uid=0)
    assert (config.name, config.api_port, config.advertise) == ("from-flag", 2000, "127.0.0.9")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("api_prot = 1", "api_port"),
        ("[logs]\nmax_byte = 1", "logs.max_bytes"),
        ("api_port = 'x'", "not a whole number"),
        ("api_port = 70000", "65535"),
        ("logs = 3", "not a table"),
        ("bind = '10.0.0.1'\nadvertise = '127.0.0.1'", "no other host can reach"),
        ("bind = 'fe80::1'", "link-local"),
        ("bind = '224.0.0.1'", "multicast"),
        ("peer_port = 70000", "65535"),
        ("join = 'n1'", "a list"),
        ("join = [1]", "HOST:PORT"),
        ("join = ['http://n1']", "HOST:PORT"),
        ("join = ['n1:0']", "65535"),
        ("join = ['10.0.1']", "no address and no name"),
        ("join = ['0.0.0.0']", "not the address of a node"),
        ("join_token_file = '/'", "--token-file"),
        ("bind = 'example'", "IP address"),
        ("[supervision]\ncgroups = 'on'", "auto or off"),
        ("[supervision]\nservice_ports = '9-2'", "range of ports"),
        (f"[supervision]\nservice_ports = '1024-{'9' * 5000}'", "range of ports"),
        ('labels = {zone = "a\\u0007"}', "zone"),
        ("[resources]\nmemory = '12'", "not a size"),
        ("[resources]\ncpus = -1", "cpus"),
        ("accelerators = 3", "[[accelerators]]"),
        ("name = 'UPPER'", "not a name"),
        ("x = ", "not TOML"),
        ("log_format = 'xml'", "log_format"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_config(UpOptions(config=write(tmp_path, text)), {}, uid=0)
    assert words in str(caught.value)
    assert caught.value.hint


def test_a_missing_file_is_an_error_only_when_it_was_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_config(UpOptions(config=str(tmp_path / "none.toml")), {}, uid=0)


def test_a_misspelt_variable_is_told(tmp_path: Path) -> None:
    config = load_config(
        UpOptions(config=write(tmp_path, "")), {"GPULAYER_API_PROT": "1", "GPULAYER_JOB_ID": "j"}, uid=0
    )
    assert len(config.warnings) == 1
    assert "GPULAYER_API_PORT" in config.warnings[0]


def test_the_data_directory_of_a_user_is_theirs(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    environ = {"HOME": "/home/ada"}
    assert load_config(UpOptions(config=path), environ, uid=1000).data_dir == Path("/home/ada/.local/state/gpulayer")
    assert load_config(UpOptions(config=path), {}, uid=0).data_dir == Path("/var/lib/gpulayer")
    assert load_config(UpOptions(config=path), {"GPULAYER_DATA_DIR": "/d"}, uid=0).data_dir == Path("/d")


def test_what_is_not_text_is_refused_before_it_can_reach_the_log() -> None:
    """Bytes of the command line that are no UTF-8: the log's entries are text, and the daemon ended at the first."""
    with pytest.raises(InvalidRequest, match="label zone"):
        load_config(UpOptions(labels=(("zone", "\udcff"),)), {}, uid=0)
    with pytest.raises(InvalidRequest, match="data_dir"):
        load_config(UpOptions(data_dir="/tmp/\udcff"), {}, uid=0)


# --- other nodes ------------------------------------------------------------------------------------------------------

TOKEN = JoinTokenText(secret=b"s" * 32, pin="sha256:" + "0f" * 32)


def test_loopback_is_the_default_and_advertised_as_it_is(tmp_path: Path) -> None:
    config = load_config(UpOptions(config=write(tmp_path, "")), {}, uid=0)
    assert (config.bind, config.advertise, config.peer_port, config.seeds) == ("127.0.0.1", "127.0.0.1", 7451, ())
    assert config.name_is_derived


def test_one_address_that_is_bound_is_the_one_advertised(tmp_path: Path) -> None:
    config = load_config(UpOptions(config=write(tmp_path, ""), bind="10.0.0.5", name="n1"), {}, uid=0)
    assert (config.bind, config.advertise) == ("10.0.0.5", "10.0.0.5")
    assert not config.name_is_derived


def test_all_addresses_with_a_seed_leave_it_to_the_way_there(tmp_path: Path) -> None:
    config = load_config(
        UpOptions(config=write(tmp_path, ""), bind="0.0.0.0", join=("n1",), join_token=TOKEN.text), {}, uid=0
    )
    assert config.advertise == ""
    assert config.seeds == (Seed("n1", 7451),)


def test_all_addresses_without_a_seed_are_advertised_as_the_default_route_shows(tmp_path: Path) -> None:
    options = UpOptions(config=write(tmp_path, ""), bind="0.0.0.0")
    found = default_source()
    if found is None:
        with pytest.raises(InvalidRequest, match="--advertise"):
            load_config(options, {}, uid=0)
    else:
        assert load_config(options, {}, uid=0).advertise == found


@pytest.mark.parametrize("advertise", ["127.0.0.1", "::1", "fe80::7", "0.0.0.0", "169.254.3.4"])
def test_what_no_other_host_can_reach_is_not_advertised_beyond_loopback(tmp_path: Path, advertise: str) -> None:
    with pytest.raises(InvalidRequest, match=r"no other host can reach"):
        load_config(UpOptions(config=write(tmp_path, ""), bind="::", advertise=advertise), {}, uid=0)


def test_seeds_are_taken_from_flags_else_the_environment_else_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, 'join = ["file"]')
    environ = {"GPULAYER_JOIN": "env-1:1000, [fd00::5]:1001"}
    assert load_config(UpOptions(config=path), {}, uid=0).seeds == (Seed("file", 7451),)
    assert load_config(UpOptions(config=path), environ, uid=0).seeds == (Seed("env-1", 1000), Seed("fd00::5", 1001))
    assert load_config(UpOptions(config=path, join=("flag", "flag")), environ, uid=0).seeds == (Seed("flag", 7451),)


def test_a_token_comes_from_a_flag_a_variable_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN.text + "\n")
    path = write(tmp_path, "")
    for options, environ in (
        (UpOptions(config=path, join_token=TOKEN.text), {}),
        (UpOptions(config=path), {"GPULAYER_JOIN_TOKEN": TOKEN.text}),
        (UpOptions(config=path, join_token_file=str(file)), {"GPULAYER_JOIN_TOKEN": "another"}),
        (UpOptions(config=path), {"GPULAYER_JOIN_TOKEN_FILE": str(file)}),
    ):
        config = load_config(options, environ, uid=0)
        assert config.join_token == TOKEN
        assert not config.warnings
        assert TOKEN.text not in repr(config) + repr(options)
    with pytest.raises(InvalidRequest, match="both given"):
        load_config(UpOptions(config=path, join_token="x", join_token_file="y"), {}, uid=0)


def test_a_token_file_that_was_taken_away_is_missed_only_by_who_is_told_of_it_now(tmp_path: Path) -> None:
    path = write(tmp_path, "join_token_file = '/nonexistent/token'")
    config = load_config(UpOptions(config=path), {}, uid=0)
    assert (config.join_token, config.join_token_file) == (None, "/nonexistent/token")
    with pytest.raises(InvalidRequest, match="/nonexistent/token"):
        load_config(UpOptions(config=path, join_token_file="/nonexistent/token"), {}, uid=0)


def test_a_wrong_token_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_config(UpOptions(config=write(tmp_path, ""), join_token="gpj_" + "s" * 40), {}, uid=0)
    assert "ssss" not in str(caught.value)
