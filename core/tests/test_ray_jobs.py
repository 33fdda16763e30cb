"""The client of Ray's job API against a double of the dashboard, and what its words mean.

What a real dashboard answers is tested in plugins/ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollhook.errors import LauncherError
from rollhook.ray_jobs import RayJob, RayJobs, RayNode, Unreachable, job_status, without_values

HEAD = RayNode("aa", "10.0.0.1", True, True)
WORKER = RayNode("bb", "10.0.0.2", False, True)
Serve = Callable[[int, str], Awaitable[RayJobs]]
ServeApp = Callable[[list[web.RouteDef]], Awaitable[RayJobs]]


@pytest.fixture
async def serve_app() -> AsyncIterator[ServeApp]:
    """Give a client of a server with some routes."""
    runners = []

    async def start(routes: list[web.RouteDef]) -> RayJobs:
        app = web.Application()
        app.add_routes(routes)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return RayJobs(f"http://127.0.0.1:{runner.addresses[0][1]}/")

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
def serve(serve_app: ServeApp) -> Serve:
    """Give a client of a server that answers everything with one status and body."""

    async def start(status: int, body: str) -> RayJobs:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=status, text=body)

        return await serve_app([web.route("*", "/{path:.*}", answer)])

    return start


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (401, "Unauthorized: Missing authentication token", LauncherError, "the launcher's key `token`"),
        (403, "Forbidden: Invalid authentication token", LauncherError, "refuses us (403"),
        (500, "No available agent to submit job, please try again", Unreachable, "dashboard_agent.log"),
        (503, "upstream is away", Unreachable, "cannot answer now (503: upstream is away)"),
        (500, "Traceback:\n  x\nValueError: Job with submission_id a already exists. ...", LauncherError,
         "has a job of this id already"),
        (413, "too large", LauncherError, "takes no upload of this size"),
        (500, "Traceback (most recent call last):\n  File x\nRuntimeError: boom\n", LauncherError,
         "answered 500 to POST /api/jobs/: RuntimeError: boom"),
        (200, "<html>a proxy's page</html>", LauncherError, "is no dashboard of Ray"),
    ],
)  # fmt: skip
async def test_what_a_dashboard_refuses_is_one_sentence_with_the_way_out(
    serve: Serve, status: int, body: str, kind: type[Exception], said: str
) -> None:
    client = await serve(status, body)
    with pytest.raises(LauncherError) as error:
        await client.submit({"entrypoint": "true"})
    assert type(error.value) is kind
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert client.address in str(error.value)


async def test_a_submission_whose_answer_is_lost_is_found_and_not_sent_again(serve_app: ServeApp) -> None:
    had: list[dict[str, Any]] = []

    async def submit(request: web.Request) -> web.Response:
        had.append(await request.json())
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def job(request: web.Request) -> web.Response:
        return web.json_response({"status": "PENDING", **had[0]})

    client = await serve_app([web.post("/api/jobs/", submit), web.get("/api/jobs/{id}", job)])
    request = {"submission_id": "demo-a1", "entrypoint": "true", "metadata": {"rollhook_run_id": "demo"}}
    assert await client.submit_once(request, seconds=5) == "demo-a1"
    assert len(had) == 1
    with pytest.raises(Unreachable):
        await asyncio.wait_for(RayJobs("http://127.0.0.1:9").submit_once(request), 5)
    with pytest.raises(Unreachable):  # somebody else's job of that id
        await client.submit_once(request | {"metadata": {"rollhook_run_id": "other"}}, seconds=0)


async def test_an_unknown_job_is_none_and_an_absent_dashboard_is_unreachable(serve: Serve) -> None:
    assert await (await serve(404, "Job x does not exist")).job("x") is None
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9 does not answer"):
        await RayJobs("http://127.0.0.1:9").job("x")
    with pytest.raises(LauncherError, match="no address"):
        await RayJobs("http://").version()


@pytest.mark.parametrize(
    ("job", "node"),
    [
        (RayJob("a", "RUNNING", node_id="bb"), WORKER),
        (RayJob("a", "RUNNING", node_id="aa", driver_ip="10.0.0.2"), HEAD),
        (RayJob("a", "RUNNING", agent_address="http://10.0.0.2:52365"), WORKER),
        (RayJob("a", "RUNNING", driver_ip="10.0.0.1"), HEAD),
        (RayJob("a", "RUNNING", node_id="cc", agent_address="http://10.0.0.9:1"), None),
        (RayJob("a", "RUNNING"), None),
    ],
)
def test_the_drivers_node_is_told_by_id_then_by_address(job: RayJob, node: RayNode | None) -> None:
    assert job.node([HEAD, WORKER]) == node


KILLED = "Job supervisor actor died: ...\nThe actor is dead because it was killed by `ray.kill`."


@pytest.mark.parametrize(
    ("job", "left", "state", "code"),
    [
        (None, {}, "lost", None),
        (None, {"recorded": 0}, "succeeded", 0),
        (None, {"recorded": 3, "stopped_code": 3}, "stopped", 3),
        (RayJob("a", "PENDING", "waiting"), {}, "pending", None),
        (RayJob("a", "RUNNING", node_id="bb"), {"recorded": 0}, "running", None),
        (RayJob("a", "SUCCEEDED", node_id="bb", exit_code=0), {}, "succeeded", 0),
        (RayJob("a", "FAILED", node_id="bb", exit_code=3), {}, "failed", 3),
        (RayJob("a", "FAILED", node_id="bb", exit_code=3), {"stopped_code": 3}, "stopped", 3),
        (RayJob("a", "FAILED", node_id="bb", exit_code=-9), {}, "failed", -9),
        (RayJob("a", "STOPPED", node_id="bb"), {}, "stopped", None),
        (RayJob("a", "STOPPED", node_id="bb"), {"recorded": 0}, "stopped", 0),
        (RayJob("a", "FAILED", KILLED, "JOB_SUPERVISOR_ACTOR_DIED"), {}, "stopped", None),
        (RayJob("a", "FAILED", KILLED, "JOB_SUPERVISOR_ACTOR_DIED", node_id="bb"), {}, "stopped", None),
        (RayJob("a", "FAILED", "x", "JOB_SUPERVISOR_ACTOR_DIED", node_id="bb"), {}, "failed", None),
        (RayJob("a", "FAILED", "x", "JOB_SUPERVISOR_ACTOR_DIED"), {"recorded": 0}, "succeeded", 0),
        (RayJob("a", "FAILED", "x", "RUNTIME_ENV_SETUP_FAILURE"), {}, "failed", None),
    ],
)  # fmt: skip
def test_what_ray_says_and_what_the_script_left_make_a_state(
    job: RayJob | None, left: dict[str, Any], state: str, code: int | None
) -> None:
    status = job_status(job, **({"recorded": None, "stopped_code": None} | left))
    assert (status.state, status.exit_code) == (state, code), status


@given(
    st.sampled_from(["STOPPED", "SUCCEEDED", "FAILED"]),
    st.none() | st.integers(-64, 255),
    st.none() | st.integers(0, 255),
    st.none() | st.integers(1, 255),
)
def test_no_end_is_ever_told_better_than_it_was(
    said: str, by_ray: int | None, recorded: int | None, stopped_code: int | None
) -> None:
    job = RayJob("a", said, "why", exit_code=by_ray, node_id="bb")
    status = job_status(job, recorded=recorded, stopped_code=stopped_code)
    code = by_ray if recorded is None else recorded
    assert status.state in {"succeeded", "failed", "stopped"}
    if status.state == "succeeded":
        assert code == 0 or (code is None and said == "SUCCEEDED")
    if code is not None and code not in (0, stopped_code) and said != "STOPPED":
        assert status.state == "failed"


def test_values_of_environment_variables_are_not_kept() -> None:
    row = {
        "runtime_env": {"env_vars": {"A": "sentinel"}, "working_dir": "gcs://x"},
        "serialized_runtime_env": '{"env_vars": {"A": "sentinel"}}',
        "status": "RUNNING",
    }
    assert without_values(row) == {
        "runtime_env": {"env_vars": {"A": "(hidden)"}, "working_dir": "gcs://x"},
        "serialized_runtime_env": "(hidden)",
        "status": "RUNNING",
    }
    assert without_values({"runtime_env": None}) == {"runtime_env": None}
