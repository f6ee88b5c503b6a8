"""The async client against a real daemon, on trio and on asyncio."""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import pytest

import gpulayer as gl
from gpulayer.client import aio_transport
from gpulayer.client.stream import Absence
from tests.client.peers import answering, answers_lost, open_sockets, port_of
from tests.client.test_broken_answers import ACCEPTED, HEADER, as_json
from tests.integration.daemon import Daemon, get, wait_for

SERVE = ["sh", "-c", "exec python3 -u -m http.server --bind $HOST $PORT"]
SLEEP = ["sleep", "300"]

Run = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture(params=["trio", "asyncio"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs an async function to its end; nothing that it opened is open then."""

    def run(check: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            with anyio.fail_after(90):
                await check()

        before = open_sockets()
        anyio.run(bounded, backend=request.param)
        # The other end of a connection may be in this process, and closes it a moment later.
        wait_for(lambda: open_sockets() <= before, 5, open_sockets)

    return run


def client_of(daemon: Daemon) -> gl.aio.Client:
    return gl.aio.connect(data_dir=daemon.data_dir)


# --- the same as the synchronous one ----------------------------------------------------------------------------------


def members(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize(("plain", "awaited"), [(gl.Client, gl.aio.Client), (gl.Job, gl.aio.Job)])
def test_both_clients_have_the_same_calls_with_the_same_words(plain: type, awaited: type) -> None:
    expected = members(plain)
    found = members(awaited)
    assert set(found) - set(expected) == ({"aclose"} if plain is gl.Client else set())
    assert list(expected) == [name for name in found if name != "aclose"]
    for name, value in expected.items():
        assert value.__doc__, name
        assert inspect.getdoc(found[name]) == inspect.getdoc(value), name
        if isinstance(value, property):
            continue
        signature = inspect.signature(value)
        assert inspect.signature(found[name]).parameters == signature.parameters, name
        answered = str(signature.return_annotation)
        if answered.startswith("Generator["):
            item = answered.removeprefix("Generator[").removesuffix(", None, None]")
            assert inspect.signature(found[name]).return_annotation == f"AsyncGenerator[{item}, None]", name
        else:
            assert inspect.iscoroutinefunction(found[name]), name
            assert inspect.signature(found[name]).return_annotation == answered, name


def test_both_connect_in_the_same_way() -> None:
    assert inspect.signature(gl.aio.connect) == inspect.signature(gl.connect)
    assert inspect.getdoc(gl.aio.connect) == inspect.getdoc(gl.connect)


def test_both_say_the_same_when_something_is_wrong(daemon: Daemon, tmp_path: Path, run: Run) -> None:
    far = tmp_path / ("far-" + "x" * 120)
    port = port_of(daemon)
    places: list[dict[str, Any]] = [
        {"data_dir": daemon.data_dir},
        {"data_dir": tmp_path},
        {"data_dir": far},
        {"url": "http://127.0.0.1:1"},
        {"url": "http://[::1]:1"},
        {"url": f"http://127.0.0.1:{port}"},
        {"url": f"http://127.0.0.1:{port}", "token": "gpl_unknown"},
    ]
    for place in places:
        plain, awaited = gl.connect(**place), gl.aio.connect(**place)
        for wrong in ("nobody", "..", "a/b", "a b?x=1", "\udcff", ""):
            with pytest.raises(gl.GpulayerError) as expected:
                plain.job(wrong)

            async def ask(wrong: str = wrong, awaited: gl.aio.Client = awaited) -> None:
                await awaited.job(wrong)

            with pytest.raises(gl.GpulayerError) as found:
                run(ask)
            assert type(found.value) is type(expected.value)
            assert str(found.value) == str(expected.value)


# --- what it does -----------------------------------------------------------------------------------------------------


def test_a_service_is_submitted_found_and_cancelled(daemon: Daemon, run: Run) -> None:
    async def check() -> None:
        async with client_of(daemon) as client:
            assert await client.ready()
            assert await client.daemon_pid() == daemon.pid
            job = await client.submit(gl.service(SERVE, name="web", replicas=2, spread="any"))
            endpoints = await job.endpoints(wait=30)
            assert len(endpoints) == 2
            assert all("Directory listing" in get(endpoint) for endpoint in endpoints)
            assert await job.endpoints() == endpoints
            assert [each["endpoint"] for each in await job.endpoint_documents()] == endpoints
            assert (await client.job("web")).id == job.id
            assert (await job.status())["state"] == "running"
            assert (await job.spec())["command"] == SERVE
            assert (await job.restart([0]))["replicas"] == [0]
            assert (await job.cancel(wait=20))["state"] == "cancelled"
            with pytest.raises(gl.Refused):
                await job.cancel()
            with pytest.raises(gl.JobEnded, match="cancelled") as ended:
                await job.endpoints(wait=5)
            assert ended.value.state == "cancelled"

    run(check)


def test_waiting_is_over_when_it_was_to_be(daemon: Daemon, run: Run) -> None:
    async def check() -> None:
        job = await client_of(daemon).submit(gl.service(SLEEP))
        begun = anyio.current_time()
        with pytest.raises(gl.WaitTimeout, match="nothing listens") as waited:
            await job.endpoints(wait=1.5)
        assert isinstance(waited.value, TimeoutError)
        assert 1.4 < anyio.current_time() - begun < 6
        with pytest.raises(gl.WaitTimeout, match="still"):
            await job.wait(timeout=0)
        assert (await job.cancel(wait=True))["state"] == "cancelled"
        assert (await job.wait(timeout=0))["state"] == "cancelled"

    run(check)


def test_logs_and_events_are_followed_to_their_end(daemon: Daemon, run: Run) -> None:
    async def check() -> None:
        client = client_of(daemon)
        job = await client.submit(gl.batch(["sh", "-c", "for i in 1 2 3; do echo line $i; sleep 0.2; done"]))
        followed = [line async for line in job.logs(follow=True) if line.kind == "output"]
        assert [str(line) for line in followed] == ["line 1", "line 2", "line 3"]
        assert (await job.wait(timeout=10))["state"] == "succeeded"
        assert [line async for line in job.logs() if line.kind == "output"] == followed
        behind = [line.text async for line in job.logs(after=followed[1].offset)]
        assert behind[0] == "line 3"
        events = [event async for event in job.events()]
        assert events[0]["kind"] == "job.submitted"
        assert [event async for event in job.events(after=events[0]["offset"])] == events[1:]
        assert [status["state"] async for status in job.watch()] == ["succeeded"]
        assert [each async for each in job.watch_endpoints()] == [[]]

    run(check)


def test_the_cluster_is_looked_at(daemon: Daemon, run: Run) -> None:
    async def check() -> None:
        client = client_of(daemon)
        assert (await client.status())["node"] == "n1"
        assert [node["name"] for node in await client.nodes()] == ["n1"]
        assert "differences" in await client.audit()
        made = {(await client.submit(gl.batch(["true"]))).id for _ in range(3)}
        assert made <= {job["id"] for job in await client.jobs("all")}
        assert (await client.dry_run(gl.batch(["true"], gpus=64)))["fits"] is False
        token = await client.create_token("read", label="reader")
        assert token["id"] in [each["id"] for each in await client.tokens()]
        over_http = gl.aio.connect(f"http://127.0.0.1:{port_of(daemon)}", token=token["token"])
        assert (await over_http.status())["node"] == "n1"
        assert await over_http.daemon_pid() is None
        with pytest.raises(gl.PermissionDenied):
            await over_http.submit(gl.batch(["true"]))
        await client.revoke_token(token["id"])
        with pytest.raises(gl.PermissionDenied):
            await over_http.status()

    run(check)


def test_one_key_is_one_job(daemon: Daemon, run: Run, request: pytest.FixtureRequest) -> None:
    key = f"aio-{request.node.name}".replace("[", "-").replace("]", "")

    async def check() -> None:
        client = client_of(daemon)
        first = await client.submit(gl.batch(["true"]), idempotency_key=key)
        assert (await client.submit(gl.batch(["true"]), idempotency_key=key)).id == first.id
        with pytest.raises(gl.Refused) as refused:
            await client.submit(gl.batch(["false"]), idempotency_key=key)
        assert refused.value.code == "idempotency_conflict"

    run(check)


# --- what gets in its way ---------------------------------------------------------------------------------------------


def test_a_submit_without_an_answer_is_repeated_and_happens_once(daemon: Daemon, tmp_path: Path, run: Run) -> None:
    async def check() -> None:
        before = {job["id"] for job in await client_of(daemon).jobs("all")}
        job = await gl.aio.connect(f"unix://{tmp_path}/s").submit(gl.batch(["true"]))
        after = {job["id"] for job in await client_of(daemon).jobs("all")}
        assert after - before == {job.id}

    with answers_lost(daemon, tmp_path / "s", count=2) as requests:
        run(check)
    assert len(requests) == 3


@pytest.mark.parametrize("kept", [0, 1, len(ACCEPTED) - 1])
def test_a_submit_whose_answer_breaks_off_is_repeated_with_its_key(tmp_path: Path, kept: int, run: Run) -> None:
    async def check() -> None:
        job = await gl.aio.connect(f"unix://{tmp_path}/s").submit(gl.batch(["true"], name="once"))
        assert job.id == "j-abcdefghij"

    with answering(tmp_path / "s", [HEADER + ACCEPTED[:kept], HEADER + ACCEPTED]) as asked:
        run(check)
    assert asked[0] == asked[1]
    assert b"Idempotency-Key" in asked[0]


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found"])
def test_any_other_answer_that_breaks_off_is_none(tmp_path: Path, status: bytes, run: Run) -> None:
    async def check() -> None:
        with pytest.raises(gl.Unreachable, match="went away"):
            await gl.aio.connect(f"unix://{tmp_path}/s").status()

    answer = b"HTTP/1.1 " + status + b'\r\ncontent-length: 1000\r\n\r\n{"code": "not_'
    with answering(tmp_path / "s", [answer]):
        run(check)


def test_an_answer_that_comes_slowly_is_waited_for_and_one_that_stops_is_not(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the other client: it is each piece that must come in time. All of it had to, here."""
    monkeypatch.setattr(aio_transport, "ANSWER_SECONDS_MAX", 0.5)

    async def slowly() -> None:
        assert await gl.aio.connect(f"unix://{tmp_path}/slow").status() == {"node": "n" * 60}

    async def halting() -> None:
        with pytest.raises(gl.Unreachable, match="did not answer in time"):
            await gl.aio.connect(f"unix://{tmp_path}/halting").status()
        await anyio.sleep(1)  # the peer, which is of this process, notices

    answer = as_json({"node": "n" * 60})
    with answering(tmp_path / "slow", [answer], pause_seconds=0.06):
        run(slowly)
    with answering(tmp_path / "halting", [answer], pause_seconds=1):
        run(halting)


@pytest.mark.parametrize(("answer", "call"), [(None, "nodes"), ({}, "jobs"), ([], "status")])
def test_what_answers_in_json_all_the_same_is_said_to_be_no_daemon(
    tmp_path: Path, run: Run, answer: object, call: str
) -> None:
    async def check() -> None:
        with pytest.raises(gl.GpulayerError, match="is not a gpulayer daemon"):
            await getattr(gl.aio.connect(f"unix://{tmp_path}/s"), call)()

    with answering(tmp_path / "s", [as_json(answer)]):
        run(check)


def test_what_is_followed_goes_on_through_a_kill_of_the_daemon(tmp_path: Path, run: Run) -> None:
    daemon = Daemon(tmp_path).start()

    async def check() -> None:
        client, told = client_of(daemon), []
        client.absence = Absence(told.append)
        job = await client.submit(gl.batch(["sh", "-c", "for i in $(seq 1 30); do echo line $i; sleep 0.2; done"]))
        lines: list[str] = []
        async for line in job.logs(follow=True):
            if line.kind == "output":
                lines.append(line.text)
            if lines == ["line 1", "line 2", "line 3"]:
                await anyio.to_thread.run_sync(daemon.restart9)
        assert lines == [f"line {number}" for number in range(1, 31)]
        assert (await job.wait(timeout=10))["state"] == "succeeded"
        assert told in ([], [True, False])

    try:
        run(check)
    finally:
        daemon.end()


def test_a_path_too_long_for_a_socket_is_no_obstacle(tmp_path: Path, run: Run) -> None:
    daemon = Daemon(tmp_path / ("long-" + "x" * 120))
    daemon.spawn()

    async def check() -> None:
        client = client_of(daemon)
        with anyio.fail_after(30):
            while not await client.ready():
                assert daemon.is_running, daemon.log_tail()
                await anyio.sleep(0.05)
        assert (await client.status())["node"] == "n1"
        assert await client.daemon_pid() == daemon.pid
        assert [step async for step in client.leave(stop_all=True)][-1] == {"state": "left"}

    try:
        run(check)
        assert daemon.process is not None
        assert daemon.process.wait(10) == 0
    finally:
        if daemon.is_running:
            daemon.kill9()


# --- what is left open ------------------------------------------------------------------------------------------------


def test_a_stream_that_is_left_early_is_closed_with_its_client(daemon: Daemon, run: Run) -> None:
    async def check() -> None:
        client = client_of(daemon)
        job = await client.submit(gl.service(SLEEP, port=False))
        await job.endpoints(wait=True)
        before = open_sockets()
        async with client:
            left = job.logs(follow=True)
            assert (await anext(left)).kind == "run_started"
            never_begun = job.watch()
            assert len(open_sockets() - before) == 1
        assert open_sockets() <= before
        with pytest.raises(StopAsyncIteration):
            await anext(never_begun)
        async with aclosing(job.watch()) as statuses:
            async for _ in statuses:
                break
        assert open_sockets() <= before
        assert (await job.status())["state"] == "running", "the client can be used on"
        await job.cancel()

    run(check)


def test_cancellation_at_any_moment_leaves_nothing_open(daemon: Daemon, run: Run) -> None:
    rng = random.Random(7)

    async def check() -> None:
        client = client_of(daemon)
        job = await client.submit(gl.service(SLEEP, port=False))
        await job.endpoints(wait=True)
        before = open_sockets()

        async def follow() -> None:
            async for _ in job.logs(follow=True):
                pass

        async def watch() -> None:
            async for _ in job.watch():
                await anyio.sleep_forever()

        for ask in (client.status, client.nodes, client.ready, job.status, job.wait, follow, watch):
            for _ in range(15):
                with anyio.move_on_after(rng.random() * 0.006):
                    await ask()
        # What was cancelled while nobody read it is closed once it is collected.
        await anyio.wait_all_tasks_blocked()
        assert open_sockets() <= before
        await job.cancel()

    run(check)


def test_tasks_share_a_client(daemon: Daemon, run: Run) -> None:
    async def check() -> None:
        client = client_of(daemon)
        ended: list[str] = []

        async def one(number: int) -> None:
            job = await client.submit(gl.batch(["sh", "-c", f"echo {number}"]))
            said = [line.text async for line in job.logs(follow=True) if line.kind == "output"]
            assert said == [str(number)]
            ended.append((await job.wait(timeout=30))["state"])

        async with anyio.create_task_group() as group:
            for number in range(10):
                group.start_soon(one, number)
        assert ended == ["succeeded"] * 10

    run(check)


def test_what_is_printed_says_what_it_is_and_no_secret() -> None:
    assert repr(gl.aio.connect("http://127.0.0.1:7450", token="gpl_secret")) == "<aio.Client http://127.0.0.1:7450>"
