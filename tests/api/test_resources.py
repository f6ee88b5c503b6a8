"""GET /v1/resources: the stock of the cluster; and what /v1/nodes tells of each device."""

from __future__ import annotations

from tests.api.conftest import Daemon


def test_whole_devices_are_idle_and_what_is_left_of_others_is_open(daemon: Daemon) -> None:
    job = daemon.submit("sleep", "60", gpus=0.25, name="part")
    daemon.wait_for(job, lambda status: status["state"] == "running")
    try:
        answer = daemon.ask("GET", "/v1/resources", role="read")
        assert answer.status == 200
        (model,) = answer.json["models"]
        assert model == {
            "model": "Test A100",
            "kind": "cuda",
            "vendor": "nvidia",
            "memory_mib": 40 * 1024,
            "idle": 1,
            "all": 2,
            "held": 1,
            "foreign": 0,
            "unhealthy": 0,
            "away": 0,
            "share_open": 0.75,
            "largest_idle_on_one_node": 1,
            "node": answer.json["nodes"][0]["name"],
        }
    finally:
        daemon.ask("POST", f"/v1/jobs/{job}/cancel")
        daemon.wait_for_end(job)
    (model,) = daemon.ask("GET", "/v1/resources").json["models"]
    assert (model["idle"], model["share_open"], model["held"]) == (2, 0, 0)


def test_nothing_idle_is_on_no_node(daemon: Daemon) -> None:
    job = daemon.submit("sleep", "60", gpus=2, name="both")
    daemon.wait_for(job, lambda status: status["state"] == "running")
    (model,) = daemon.ask("GET", "/v1/resources").json["models"]
    assert (model["idle"], model["largest_idle_on_one_node"], model["node"]) == (0, 0, None)
    (node,) = daemon.ask("GET", "/v1/resources").json["nodes"]
    assert (node["gpus"], node["gpus_idle"]) == (2, 0)
    daemon.ask("POST", f"/v1/jobs/{job}/cancel")
    daemon.wait_for_end(job)


def test_cpus_and_memory_of_each_node_are_idle_unless_held(daemon: Daemon) -> None:
    job = daemon.submit("sleep", "60", cpus=0.5, memory_mib=64, name="host")
    daemon.wait_for(job, lambda status: status["state"] == "running")
    (node,) = daemon.ask("GET", "/v1/resources").json["nodes"]
    assert node["cpus"] - node["cpus_idle"] == 0.5
    assert node["memory_mib"] - node["memory_idle_mib"] == 64
    assert node["disk_mib"] > 0
    daemon.ask("POST", f"/v1/jobs/{job}/cancel")
    daemon.wait_for_end(job)


def test_a_node_tells_all_of_its_devices_and_of_itself(daemon: Daemon) -> None:
    (node,) = daemon.ask("GET", "/v1/nodes").json
    assert node["disk_mib"] > 0
    assert node["gpu_detect"] in ("ok", "none", "error")
    assert isinstance(node["drivers"], dict)
    assert all(near.keys() == {"id", "cpus", "memory_mib"} for near in node["numa"])
    device = node["devices"][0]
    assert device.keys() == {
        *("uuid", "index", "kind", "vendor", "model", "memory_mib", "compute_capability", "pci_bus_id", "numa_node"),
        *("nvlink_peers", "parent", "source", "unhealthy", "foreign", "foreign_share", "share_free", "held_by"),
    }
    assert (device["source"], device["index"], device["foreign"], device["foreign_share"]) == (
        "declared",
        None,
        None,
        0,
    )


def test_what_is_no_question_is_refused(daemon: Daemon) -> None:
    assert daemon.ask("GET", "/v1/resources?model=x").status == 400
    assert daemon.ask("POST", "/v1/resources", {}).status == 405
    assert daemon.ask("GET", "/v1/resources", role="").status == 401
