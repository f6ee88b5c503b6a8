"""What `gpulayer up` is told: file, environment, flags; and what is refused, with words."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer.model.errors import InvalidRequest
from gpulayer.node.config import UpOptions, load_config


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
        ("bind = '10.0.0.1'", "TLS"),
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
