"""Who gets which device, who waits for what, and how one is told (P3, P9)."""

from __future__ import annotations

from tests.integration.conftest import ONE_GPU, DaemonMaker
from tests.integration.daemon import Daemon, get
from tests.integration.programs import serve, sh


def hold(daemon: Daemon, **spec: object) -> str:
    return daemon.submit(sh("sleep 1000"), port=False, **spec)


def reason_of(daemon: Daemon, job: str) -> dict[str, str]:
    return daemon.wait_job(job, lambda status: status["state"] == "waiting" and status["reason"])["reason"]


def test_a_job_whose_gpu_is_taken_waits_and_no_process_of_it_starts(make_daemon: DaemonMaker) -> None:
    """It was placed anyway, without the GPU, and without a warning."""
    daemon = make_daemon(config=ONE_GPU).start()
    first = daemon.submit(serve(), gpus=1, name="first")
    (endpoint,) = daemon.wait_ready(first)
    assert get(endpoint, "/env/CUDA_VISIBLE_DEVICES") == "GPU-a"
    assert get(endpoint, "/env/CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    running = daemon.runs_on_host()

    second = daemon.submit(serve(), gpus=1, name="second")
    reason = reason_of(daemon, second)
    assert reason["code"] == "no_capacity"
    assert "0 of 1 GPU free" in reason["text"]
    assert daemon.name in reason["text"]
    assert daemon.runs_on_host() == running
    assert daemon.replica(second)["pid"] is None

    daemon.cancel(first)
    (endpoint,) = daemon.wait_ready(second)
    assert get(endpoint, "/env/CUDA_VISIBLE_DEVICES") == "GPU-a"


def test_what_does_not_fit_is_explained_for_each_node_with_its_own_reason(make_daemon: DaemonMaker) -> None:
    """It said "no devices match request", and nobody knew why."""
    daemon = make_daemon(config=ONE_GPU).start()
    hold(daemon, gpus=1, name="holder")
    asked = {
        "busy": ("no_capacity", {"gpus": 1}, "free"),
        "small": ("never_fits", {"gpus": 1, "gpu_memory_mib": 40 * 1024}, "24GiB"),
        "other": ("never_fits", {"gpus": 1, "gpu_model": ["H100*"]}, "A10"),
        "kind": ("never_fits", {"gpus": 1, "accelerator": "rocm"}, "rocm"),
        "many": ("never_fits", {"gpus": 2}, "1 such GPU on"),
        "labels": ("never_fits", {"labels": {"zone": "b"}}, "zone"),
        "cpus": ("never_fits", {"cpus": 5000}, "5000"),
    }
    texts = set()
    for name, (code, spec, word) in asked.items():
        job = hold(daemon, name=name, **spec)
        assert reason_of(daemon, job)["code"] == code
        explained = daemon.call("GET", f"/v1/jobs/{job}/explain")
        (refusal,) = explained["replicas"][0]["refusals"]
        assert refusal["node"] == daemon.name
        assert word in refusal["text"], refusal
        texts.add((refusal["code"], refusal["text"]))
        shown = daemon.cli("job", "explain", name)
        assert shown.returncode == 0
        assert word in shown.stdout
    assert len(texts) == len(asked)


def test_shares_of_one_gpu_never_add_up_to_more_than_it(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon(config=ONE_GPU).start()
    halves = [daemon.submit(serve(), gpus=0.5) for _ in range(2)]
    for job in halves:
        (endpoint,) = daemon.wait_ready(job)
        assert get(endpoint, "/env/CUDA_VISIBLE_DEVICES") == "GPU-a"
    third = hold(daemon, gpus=0.25)
    whole = hold(daemon, gpus=1)
    assert reason_of(daemon, third)["code"] == reason_of(daemon, whole)["code"] == "no_capacity"
    (node,) = daemon.call("GET", "/v1/nodes")
    assert node["devices"][0]["share_free"] == 0
    daemon.cancel(halves[0])
    daemon.wait_replica(third, lambda replica: replica["state"] == "ready")
    assert daemon.job(whole)["state"] == "waiting"


def test_a_gpu_is_free_only_when_no_process_of_its_replica_is_left(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon(config=ONE_GPU).start()
    slow = daemon.submit(sh("trap '' TERM; while :; do sleep 0.05; done"), gpus=1, port=False, stop_grace_seconds=1.5)
    daemon.wait_replica(slow, lambda replica: replica["state"] == "ready")
    pids = daemon.runs_on_host()
    following = daemon.batch(
        [*sh('for pid in "$@"; do kill -0 $pid && exit 9; done; exit 0'), "sh", *map(str, pids)], gpus=1
    )
    daemon.cancel(slow)
    assert daemon.job(following)["state"] == "waiting"
    assert daemon.wait_ended(following)["state"] == "succeeded"


def test_replicas_go_to_different_nodes_unless_told_that_any_will_do(daemon: Daemon) -> None:
    job = hold(daemon, replicas=2, name="apart")
    status = daemon.wait_job(job, lambda status: status["replicas"][0]["state"] == "ready")
    assert status["replicas"][1]["state"] == "waiting"
    assert status["replicas"][1]["reason"]["code"] == "no_capacity"
    assert "spread" in daemon.cli("job", "explain", "apart").stdout
    together = hold(daemon, replicas=2, spread="any")
    daemon.wait_ready(together)


def test_a_dry_run_says_where_it_would_go_and_changes_nothing(daemon: Daemon) -> None:
    fits = daemon.call("POST", "/v1/jobs?dry_run=1", {"command": ["true"], "gpus": 2})
    assert fits["fits"]
    assert {device["uuid"] for device in fits["replicas"][0]["devices"]} == {"GPU-a", "GPU-b"}
    refused = daemon.call("POST", "/v1/jobs?dry_run=1", {"command": ["true"], "gpus": 3})
    assert not refused["fits"]
    assert refused["replicas"][0]["refusals"][0]["node"] == daemon.name
    assert daemon.call("GET", "/v1/jobs?state=all")["jobs"] == []
    assert daemon.cli("submit", "--dry-run", "--gpus", "1", "--", "true").returncode == 0


def test_a_higher_priority_is_placed_first(make_daemon: DaemonMaker) -> None:
    daemon = make_daemon(config=ONE_GPU).start()
    holder = hold(daemon, gpus=1)
    daemon.wait_replica(holder, lambda replica: replica["state"] == "ready")
    low = hold(daemon, gpus=1, priority=10)
    high = hold(daemon, gpus=1, priority=90)
    daemon.cancel(holder)
    daemon.wait_replica(high, lambda replica: replica["state"] == "ready")
    assert daemon.job(low)["state"] == "waiting"
