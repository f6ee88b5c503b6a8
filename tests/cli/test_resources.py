"""`resources detect` on machines of every kind, by a fake driver; `resources list` and `status` of a daemon there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer.cli.render import Row, fitted_table, short_names, shortened
from gpulayer.runtime.accelerators.device_locks import DeviceLocks, Hold, shared_directory
from tests.fakes.nvml import FakeNvml
from tests.integration.daemon import Daemon, wait_for

GPULAYER = (sys.executable, "-m", "gpulayer")
COLUMNS = 80
LONG_MODEL = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"
LONG_NAME = "gpu-cluster-datacenter-frankfurt-rack-0012-position-03-node-007"


class Machine:
    """Where `resources detect` is run: a driver, a configuration, a data directory that nobody has made yet."""

    def __init__(self, home: Path, fake: FakeNvml | None) -> None:
        self.home, self.fake = home, fake
        self.data_dir = home / "data"
        self.config_path = home / "gpulayer.toml"
        self.config_path.write_text("")

    def configure(self, text: str) -> None:
        self.config_path.write_text(text)

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("GPULAYER_")}
        environment |= self.fake.env() if self.fake is not None else {}
        words = ("resources", "detect", "--config", str(self.config_path), "--data-dir", str(self.data_dir))
        return subprocess.run(
            [*GPULAYER, *words, *more], env=environment, capture_output=True, text=True, timeout=30, check=False
        )

    def detect(self, code: int = 0) -> str:
        """What people see. No line is wider than a terminal."""
        done = self.run()
        assert done.returncode == code, done.stdout + done.stderr
        assert done.stderr == ""
        assert max(map(len, done.stdout.splitlines())) <= COLUMNS, done.stdout
        return done.stdout

    def document(self, code: int = 0) -> Any:
        done = self.run("--json")
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    def devices(self) -> list[Any]:
        return list(self.document()["devices"])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, FakeNvml(tmp_path, gpus=2))


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    return Machine(tmp_path, None)


def fake_of(machine: Machine) -> FakeNvml:
    assert machine.fake is not None
    return machine.fake


def joined(text: str) -> str:
    """Sentences that were broken at the end of a line are whole again."""
    return " ".join(text.split())


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody's program."""
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "--batch", "64"])
    try:
        yield running
    finally:
        running.kill()
        running.wait(5)


# --- what is there ----------------------------------------------------------------------------------------------------


def test_eight_gpus_fit_a_terminal_and_each_can_be_found_by_its_uuid(machine: Machine) -> None:
    fake = fake_of(machine)
    fake.add(6)
    fake.link_to_switch(*range(8))
    shown = machine.detect()
    rows = re.findall(r"^(\d) +NVIDIA H100 80GB HBM3 +79.6GiB +9.0 +\S+ +yes$", shown, re.MULTILINE)
    assert rows == [str(index) for index in range(8)]
    for index, uuid in enumerate(fake.uuids):
        assert re.search(rf"^{index} +{uuid} +0000:0{index + 1}:00.0$", shown, re.MULTILINE)
    assert re.search(r"^drivers +cuda 12.4, nvidia 550.54.15$", shown, re.MULTILINE)
    assert re.search(r"^nvlink +0-7, each to each$", shown, re.MULTILINE)


def test_the_host_is_shown_with_what_jobs_may_have_of_it(machine: Machine) -> None:
    machine.configure('[resources]\ncpus = 0.5\nmemory = "1GiB"\n')
    shown = machine.detect()
    for label in ("host", "cpu", "memory", "disk"):
        assert re.search(rf"^{label} ", shown, re.MULTILINE), shown
    assert "0.5 of them for jobs" in joined(shown)
    assert "1GiB of it for jobs" in joined(shown)
    found = machine.document()
    assert (found["cpus"], found["memory_mib"]) == (0.5, 1024)
    assert found["cpus_all"] == os.cpu_count()
    assert found["memory_all_mib"] > 1024
    assert found["disk_mib"] >= found["disk_free_mib"] > 0
    assert found["kernel"] == f"Linux {os.uname().release}"


def test_no_daemon_is_asked_and_nothing_is_made(machine: Machine) -> None:
    machine.detect()
    assert not machine.data_dir.exists()


def test_the_document_has_every_key(machine: Machine) -> None:
    found = machine.document()
    assert found["gpu_detect"] == "ok"
    assert found["drivers"] == {"cuda": "12.4", "nvidia": "550.54.15"}
    assert {"hostname", "cpu_model", "memory_available_mib", "disk_path", "numa", "undetected"} <= set(found)
    device = found["devices"][0]
    assert device | {"uuid": "", "processes": [], "numa_node": None} == {
        "uuid": "",
        "index": 0,
        "kind": "cuda",
        "vendor": "nvidia",
        "model": "NVIDIA H100 80GB HBM3",
        "memory_mib": 81559,
        "compute_capability": "9.0",
        "pci_bus_id": "0000:01:00.0",
        "numa_node": None,
        "nvlink_peers": [],
        "parent": None,
        "source": "nvml",
        "unhealthy": None,
        "foreign": None,
        "foreign_share": 0,
        "state": "usable",
        "share_free": 1,
        "why_not": None,
        "processes": [],
        "process_count": 0,
    }


def test_long_names_are_shortened_in_the_table_and_whole_in_the_document(machine: Machine) -> None:
    fake = fake_of(machine)
    fake.gpus[0].model = LONG_MODEL
    fake.write()
    shown = machine.detect()
    assert re.search(r"^0 +NVIDIA RTX PRO \S?.*….*Edition ", shown, re.MULTILINE)
    assert machine.devices()[0]["model"] == LONG_MODEL


def test_links_are_listed_one_by_one_where_not_all_have_one(machine: Machine) -> None:
    fake = fake_of(machine)
    fake.add(2)
    fake.link(0, 1)
    fake.link(1, 2)
    shown = machine.detect()
    assert re.findall(r"^nvlink +(.*)$", shown, re.MULTILINE) == ["0 to 1", "1 to 0,2", "2 to 1"]


def test_instances_stand_under_their_gpu_which_is_not_handed_out(machine: Machine) -> None:
    fake = fake_of(machine)
    instances = fake.split(0, 2)
    shown = machine.detect()
    first = re.escape(instances[0].uuid[:12])
    assert re.search(
        rf"^0 .* no, MIG mode\n +its instances .*\n {first} .* MIG 1g.10gb .* yes$", shown, re.MULTILINE
    ), shown
    assert [each["share_free"] for each in machine.devices()] == [0, 1, 1, 1]
    assert {each["parent"] for each in machine.devices()[1:3]} == {fake.uuids[0]}


def test_declared_devices_are_listed_behind_the_others(machine: Machine) -> None:
    machine.configure('[[accelerators]]\nkind = "rocm"\nmodel = "MI300X"\nmemory = "192GiB"\ncount = 2\n')
    shown = machine.detect()
    assert len(re.findall(r"^rocm-mi300x-1-[01] +MI300X +192GiB +- +- +yes, declared$", shown, re.MULTILINE)) == 2
    assert [each["source"] for each in machine.devices()] == ["nvml", "nvml", "declared", "declared"]


def test_the_names_of_declared_devices_are_short_also_where_a_daemon_has_run(bare: Machine) -> None:
    """They are made up for the node, whose id is known then."""
    bare.configure('[[accelerators]]\nkind = "cuda"\nmodel = "H100"\nmemory = "80GiB"\n')
    bare.data_dir.mkdir()
    (bare.data_dir / "node.json").write_text('{"node_id": "n-0123456789abcdef"}')
    shown = bare.detect()
    assert re.search(r"^cuda-h100-1 +H100 +80GiB", shown, re.MULTILINE), shown
    assert "n-0123456789abcdef-cuda-h100-1" in shown


# --- who is on it, and what is left out -------------------------------------------------------------------------------


def test_a_process_on_a_gpu_is_named_with_user_command_and_memory(
    machine: Machine, process: subprocess.Popen[bytes]
) -> None:
    fake_of(machine).processes(1, {process.pid: 20480})
    shown = machine.detect()
    assert re.search(r"^1 .* no, in use$", shown, re.MULTILINE)
    assert re.search(r"^0 .* yes$", shown, re.MULTILINE)
    user = machine.devices()[1]["processes"][0]
    assert f"pid {process.pid} of {user['user']}, 20GiB: {sys.executable} -c import" in joined(shown)
    assert user["kind"] == "foreign"
    assert user["memory_mib"] == 20480
    assert user["command"].endswith("--batch 64")


def test_foreign_processes_that_are_allowed_are_listed_and_in_nobodys_way(
    machine: Machine, process: subprocess.Popen[bytes]
) -> None:
    machine.configure('[devices]\nforeign_processes = "allow"\n')
    fake_of(machine).processes(0, {process.pid: 512})
    shown = machine.detect()
    assert re.search(r"^0 .* yes$", shown, re.MULTILINE)
    assert f"pid {process.pid} " in shown


def test_of_very_many_processes_some_are_named_and_the_others_counted(machine: Machine) -> None:
    fake_of(machine).flood(0, 1_000_000)
    shown = machine.detect()
    assert re.search(r"and \d+ more processes", shown)
    assert machine.devices()[0]["process_count"] == 1_000_000


def test_what_another_gpulayer_holds_is_not_offered(machine: Machine) -> None:
    uuid = fake_of(machine).uuids[0]
    hold = DeviceLocks(shared_directory(), machine.home).acquire(uuid, 500)
    assert isinstance(hold, Hold)
    try:
        shown = machine.detect()
        assert re.search(r"^0 .* 0.5 of it, in use$", shown, re.MULTILINE)
        assert f"held by pid {os.getpid()}" in joined(shown)
        assert [each["share_free"] for each in machine.devices()] == [0.5, 1]
    finally:
        hold.close()


def test_excluded_devices_are_shown_with_the_entry_that_excludes_them(machine: Machine) -> None:
    machine.configure('[devices]\nexclude = ["01:00.0", "*A100*"]\n')
    done = machine.run()
    assert "no, excluded by '01:00.0' in [devices] exclude" in joined(done.stdout)
    assert "warning: devices.exclude: '*A100*' is about no device of this machine" in done.stderr
    first, second = machine.devices()
    assert (first["share_free"], second["share_free"]) == (0, 1)
    assert "01:00.0" in first["why_not"]


def test_an_index_as_exclusion_is_refused(machine: Machine) -> None:
    machine.configure("[devices]\nexclude = [0]\n")
    done = machine.run()
    assert done.returncode == 2
    assert "is an index, which may be another device's after a reboot" in done.stderr
    assert "hint: name its UUID" in done.stderr


# --- what is not well, and what could not be detected -----------------------------------------------------------------


def test_a_device_that_is_lost_is_told_and_the_others_are_as_before(machine: Machine) -> None:
    fake_of(machine).ecc_errors(1, 7)
    shown = machine.detect()
    assert re.search(r"^1 .* no, unhealthy\n +7 uncorrected ECC errors", shown, re.MULTILINE)
    assert re.search(r"^0 .* yes$", shown, re.MULTILINE)


def test_a_machine_without_a_driver_has_no_gpus_and_no_fault(bare: Machine) -> None:
    shown = bare.detect()
    assert "\nno GPUs\n" in shown
    found = bare.document()
    assert (found["gpu_detect"], found["devices"], found["drivers"]) == ("none", [], {})


def test_declared_devices_need_no_driver(bare: Machine) -> None:
    bare.configure('[[accelerators]]\nkind = "cuda"\nmodel = "H100"\nmemory = "80GiB"\n')
    assert re.search(r"^cuda-h100-1 +H100 +80GiB +- +- +yes, declared$", bare.detect(), re.MULTILINE)


def test_a_driver_and_no_gpu_is_a_good_answer(machine: Machine) -> None:
    fake = fake_of(machine)
    fake.gpus = []
    fake.write()
    assert "no GPUs" in machine.detect()
    assert machine.document()["gpu_detect"] == "ok"


def test_a_driver_that_hangs_costs_seconds_and_not_the_answer(machine: Machine) -> None:
    fake_of(machine).hang("nvmlDeviceGetCount_v2")
    begun = time.monotonic()
    shown = machine.detect(code=1)
    assert time.monotonic() - begun < 10
    assert re.search(r"^memory ", shown, re.MULTILINE)
    assert "NVIDIA GPUs: " in shown
    assert machine.document(code=1)["gpu_detect"] == "error"


@pytest.mark.parametrize("fault", ["crash", "garbage", "mismatch"])
def test_a_driver_that_fails_is_told_with_what_to_do(machine: Machine, fault: str) -> None:
    fake = fake_of(machine)
    if fault == "crash":
        fake.crash("nvmlDeviceGetMemoryInfo")
    elif fault == "garbage":
        fake.answered = "]]] 12"
        fake.write()
    else:
        fake.init_fails("version_mismatch")
    shown = joined(machine.detect(code=1))
    assert "not detected: - NVIDIA GPUs: " in shown
    if fault == "mismatch":
        assert "reboot" in shown


def test_a_broken_configuration_is_told_as_everywhere(machine: Machine) -> None:
    machine.configure("[devices]\nexclud = []\n")
    done = machine.run()
    assert done.returncode == 2
    assert "exclude" in done.stderr


def test_detection_imports_neither_rich_nor_the_daemon(machine: Machine) -> None:
    code = (
        "import sys; from gpulayer.cli.app import main; main(['resources', 'detect', '--data-dir', '/nonexistent']);"
        "print({'rich', 'trio', 'starlette', 'hypercorn', 'asyncio', 'http.client'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | fake_of(machine).env(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "set()"


# --- the stock and the status of a daemon -----------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Three H100, one of them with an instance; two with long names; a name as long as one may be."""
    fake = FakeNvml(tmp_path, gpus=3)
    fake.add(2, model=LONG_MODEL, memory_mib=97887)
    running = Daemon(tmp_path / "home", env=fake.env(), name=LONG_NAME).start()
    running.fake = fake  # type: ignore[attr-defined]
    try:
        yield running
    finally:
        running.end()


def fitting(text: str) -> str:
    assert max(map(len, text.splitlines())) <= COLUMNS, text
    return text


def test_the_stock_counts_each_device_once(daemon: Daemon, process: subprocess.Popen[bytes]) -> None:
    fake: FakeNvml = daemon.fake  # type: ignore[attr-defined]
    daemon.batch(["sleep", "60"], name="half", gpus=0.5, gpu_model="*H100*")
    daemon.wait_job("half", lambda job: job["state"] == "running")
    free = next(uuid for uuid in fake.uuids[:3] if uuid not in daemon.replica("half")["devices"][0]["uuid"])
    fake.processes(fake.uuids.index(free), {process.pid: 1000})
    fake.ecc_errors(4, 1)

    def stock() -> Any:
        return daemon.cli_json("resources", "list")

    wait_for(lambda: [each["foreign"] + each["unhealthy"] for each in stock()["models"]] == [1, 1], 10)
    found = stock()
    h100, pro = found["models"]
    assert (h100["model"], h100["memory_mib"], h100["kind"]) == ("NVIDIA H100 80GB HBM3", 81559, "cuda")
    counted = {key: h100[key] for key in ("idle", "all", "held", "foreign", "unhealthy", "share_open")}
    assert counted == {"idle": 1, "all": 3, "held": 1, "foreign": 1, "unhealthy": 0, "share_open": 0.5}
    assert (h100["largest_idle_on_one_node"], h100["node"]) == (1, LONG_NAME)
    assert (pro["model"], pro["idle"], pro["all"], pro["unhealthy"]) == (LONG_MODEL, 1, 2, 1)
    (node,) = found["nodes"]
    assert (node["gpus"], node["gpus_idle"], node["gpu_detect"]) == (5, 2, "ok")
    assert node["drivers"] == {"cuda": "12.4", "nvidia": "550.54.15"}

    shown = fitting(daemon.cli("resources", "list").stdout)
    most = r"1 +gpu-cluster\S*…\S*node-007"
    assert re.search(
        rf"^NVIDIA H100 80GB HBM3 +79.6GiB +1 +3 +{most}\n +1 held, 1 used by others, 0.5 open for shares$",
        shown,
        re.MULTILINE,
    ), shown
    assert re.search(r"^gpu-\S+…\S+ +\S+/\S+ +\S+/\S+ +2/5 +\S+GiB +550.54.15 +12.4$", shown, re.MULTILINE), shown


def test_status_tells_devices_apart_and_says_what_is_wrong_with_them(
    daemon: Daemon, process: subprocess.Popen[bytes]
) -> None:
    fake: FakeNvml = daemon.fake  # type: ignore[attr-defined]
    fake.processes(1, {process.pid: 20480})
    fake.ecc_errors(2, 3)

    def devices() -> list[Any]:
        return list(daemon.cli_json("status")["nodes"][0]["devices"])

    wait_for(lambda: bool(devices()[1]["foreign"] and devices()[2]["unhealthy"]), 10)
    first, used, broken = devices()[:3]
    assert (first["index"], first["share_free"], first["foreign"], first["source"]) == (0, 1, None, "nvml")
    assert (used["share_free"], used["foreign_share"], used["unhealthy"]) == (0, 1, None)
    assert (broken["share_free"], broken["foreign_share"]) == (0, 0)
    shown = fitting(daemon.cli("status").stdout)
    assert re.search(r"^gpu-\S+ +0 .* 1 +-$", shown, re.MULTILINE)
    assert re.search(rf"^gpu-\S+ +1 .* 0 +others\n +used by others: pid {process.pid} ", shown, re.MULTILINE), shown
    assert re.search(r"^gpu-\S+ +2 .* 0 +unhealthy\n +unhealthy: 3 uncorrected ECC", shown, re.MULTILINE), shown


def test_a_failed_detection_is_a_warning_with_its_reason(daemon: Daemon) -> None:
    fake: FakeNvml = daemon.fake  # type: ignore[attr-defined]
    fake.crash("nvmlDeviceGetCount_v2")
    wait_for(lambda: daemon.cli_json("status")["nodes"][0]["gpu_detect"] == "error", 15)
    shown = daemon.cli("status").stdout
    warnings = [line for line in shown.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(set(warnings)) == 1
    assert "NVIDIA GPUs: " in warnings[0]
    assert re.search(r"^gpu-\S+ +0 .* 0 +unhealthy$", shown, re.MULTILINE)
    assert "not detected: NVIDIA GPUs: " in joined(daemon.cli("resources", "list").stdout)


# --- tables that fit --------------------------------------------------------------------------------------------------


def test_a_table_fits_whatever_the_names_are(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row((LONG_NAME, "0", LONG_MODEL, "79.6GiB", "web-" + "x" * 90 + ".0, train.11 0.5"), ["because " * 40]),
        Row(("n1", "MIG-8f2a6c1e", "H100", "1GiB", "-"), ["u" * 200]),
        Row(("n2", "", "", "", "   ")),
    ]
    fitted_table(("NODE", "GPU", "MODEL", "MEMORY", "HELD BY"), rows, names=("NODE", "MODEL"))
    lines = fitting(capsys.readouterr().out).splitlines()
    assert lines[1].startswith(LONG_NAME[:5])
    assert f"{LONG_NAME[-5:]}  0 " in lines[1]
    assert "train.11 0.5" in "\n".join(lines)
    assert "".join(line.strip() for line in lines if set(line.strip()) == {"u"}) == "u" * 200


def test_a_table_that_fits_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    fitted_table(("NODE", "HELD BY"), [Row(("n1", "web.0, web.1"))], names=("NODE",))
    assert capsys.readouterr().out == "NODE  HELD BY\nn1    web.0, web.1\n"


@pytest.mark.parametrize(("width", "short"), [(9, "gpu-…e-01"), (15, "gpu-clu…node-01"), (40, "")])
def test_both_ends_of_a_name_are_kept(width: int, short: str) -> None:
    assert shortened("gpu-cluster-rack-12-node-01", width) == (short or "gpu-cluster-rack-12-node-01")


def test_devices_of_one_node_have_names_that_differ() -> None:
    def names(*devices: dict[str, Any]) -> list[str]:
        whole = [{"index": None, "parent": None} | device for device in devices]
        return list(short_names(whole, "n-0123456789abcdef").values())

    assert names({"uuid": "GPU-8f2a6c1e-0b1d", "index": 3}) == ["3"]
    assert names({"uuid": "MIG-8f2a6c1e-0b1d", "index": 0, "parent": "GPU-1"}) == ["MIG-8f2a6c1e"]
    assert names({"uuid": "GPU-8f2a6c1e-0b1d"}, {"uuid": "GPU-8f2a6c1e-0b1e"}) == [
        "GPU-8f2a…1e-0b1d",
        "GPU-8f2a…1e-0b1e",
    ]
    assert names({"uuid": "n-0123456789abcdef-cuda-h100-1-0"}) == ["cuda-h100-1-0"]
