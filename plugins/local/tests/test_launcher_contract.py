"""The contract of launchers bites: each launcher here is broken in one way, and fails the case about that."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollhook.launcher import Handle, Job, JobStatus, Launcher, Plan
from rollhook.testing.contract import failing_cases
from rollhook.testing.environment import build_context
from rollhook.testing.launcher import SENTINEL, LauncherContract, LauncherPlanContract, LauncherSite
from rollhook_local import LocalLauncherConfig
from rollhook_local.launcher import LocalLauncher

ALL = "test_a_job_is_given_all_that_it_asked_for_and_its_log_is_whole"
TWO = "test_two_jobs_at_once_keep_their_logs_and_exit_codes_apart"
DRAIN = "test_a_stopped_job_may_drain_and_is_no_success"
FORCE = "test_a_job_that_ignores_its_stop_can_be_forced"
PROBE = "test_a_probe_that_fails_fails_the_job"


class WritesValues(LocalLauncher):
    """Hands secrets on by value, in a file that is removed only when somebody thinks of it."""

    async def submit(self, plan: Plan) -> Handle:
        path = Path(plan.job.directory) / "secrets.env"
        path.write_text(f"KEY={os.environ['BROKEN_LAUNCHER_SECRET']}\n")
        return await super().submit(plan)


class LosesFiles(LocalLauncher):
    """Delivers the script and nothing else."""

    def plan(self, job: Job) -> Plan:
        return super().plan(replace(job, files={}))


class LosesTheBeginning(LocalLauncher):
    """Begins a log where it happens to be."""

    async def logs(self, handle: Handle, *, follow: bool = False) -> AsyncIterator[bytes]:
        async for data in super().logs(handle, follow=follow):
            yield data[200:]


class RemembersInMemory(LocalLauncher):
    """Knows only the jobs that it has submitted itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known: set[str] = set()

    async def submit(self, plan: Plan) -> Handle:
        self.known.add(plan.job.id)
        return await super().submit(plan)

    async def status(self, handle: Handle) -> JobStatus:
        return await super().status(handle) if handle.job_id in self.known else JobStatus("lost")


class Optimist(LocalLauncher):
    """Takes every end for a good one."""

    async def status(self, handle: Handle) -> JobStatus:
        found = await super().status(handle)
        return found if found.state in ("pending", "running", "lost") else JobStatus("succeeded", "", 0)


class StopsAtOnce(LocalLauncher):
    """Gives no grace."""

    async def stop(self, handle: Handle, *, force: bool = False) -> str:
        return await super().stop(handle, force=True)


class NeverForces(LocalLauncher):
    """Asks, and asks again."""

    async def stop(self, handle: Handle, *, force: bool = False) -> str:
        return await super().stop(handle)


class NeverLoses(LocalLauncher):
    """Takes a job that it does not know for one that waits."""

    async def status(self, handle: Handle) -> JobStatus:
        found = await super().status(handle)
        return JobStatus("pending") if found.state == "lost" else found


class SkipsProbes(LocalLauncher):
    """Does not look whether the node will do."""

    def plan(self, job: Job) -> Plan:
        return super().plan(replace(job, probes=()))


@pytest.mark.parametrize(
    ("broken", "case"),
    [
        (WritesValues, ALL), (LosesFiles, ALL), (LosesTheBeginning, ALL), (RemembersInMemory, ALL),
        (Optimist, TWO), (StopsAtOnce, DRAIN), (Optimist, DRAIN), (NeverForces, FORCE), (NeverLoses, PROBE),
        (SkipsProbes, PROBE),
    ],
)  # fmt: skip
async def test_a_broken_launcher_fails_its_case(
    broken: type[LocalLauncher], case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN_LAUNCHER_SECRET", SENTINEL)
    submitted: list[Handle] = []

    class Kept(broken):  # type: ignore[misc, valid-type]
        async def submit(self, plan: Plan) -> Handle:
            submitted.append(await super().submit(plan))
            return submitted[-1]

    def make() -> Launcher:
        made: Launcher = Kept(LocalLauncherConfig(), build_context(tmp_path))
        return made

    async def view() -> str:
        return ""

    def unknown(handle: Handle) -> Handle:
        return replace(handle, data={**handle.data, "boot": "another"})

    secrets = {"env": "env:BROKEN_LAUNCHER_SECRET"}
    site = LauncherSite(make(), tmp_path / "root", secrets, unknown, view, seconds=8, gives_ray=False)
    arguments: Mapping[str, Any] = {"site": site} | ({"make_launcher": make} if case == ALL else {})
    try:
        with pytest.raises((AssertionError, TimeoutError)):
            await getattr(LauncherContract(), case)(**arguments)
    finally:
        for handle in submitted:
            await LocalLauncher.stop(
                LocalLauncher(LocalLauncherConfig(), build_context()), handle, force=True
            )


class ResolvesSecrets(LocalLauncher):
    def plan(self, job: Job) -> Plan:
        value = os.environ.get("LAUNCHER_CONTRACT_KEY", "")
        return super().plan(replace(job, env={**job.env, "LAUNCHER_CONTRACT_KEY": value}))


class Counts(LocalLauncher):
    count = 0

    def plan(self, job: Job) -> Plan:
        Counts.count += 1
        return super().plan(replace(job, env={**job.env, "COUNT": str(Counts.count)}))


class BadBash(LocalLauncher):
    def plan(self, job: Job) -> Plan:
        plan = super().plan(job)
        return replace(plan, files={**plan.files, "job/more.sh": "if true; then\n"})


class LosesVariables(LocalLauncher):
    def plan(self, job: Job) -> Plan:
        return super().plan(replace(job, env={}))


@pytest.mark.parametrize(
    ("broken", "cases"),
    [
        (LocalLauncher, set()),
        (ResolvesSecrets, {"test_a_plan_names_secrets_and_never_holds_one"}),
        (Counts, {"test_the_same_job_gives_the_same_plan"}),
        (BadBash, {"test_every_script_of_a_plan_is_bash"}),
        (LosesVariables, {"test_a_plan_holds_every_file_and_every_variable"}),
        (LosesFiles, {"test_a_plan_holds_every_file_and_every_variable"}),
    ],
)
def test_a_plan_that_is_broken_fails_its_case(
    broken: type[LocalLauncher], cases: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixtures = {
        "make_launcher": lambda: lambda: broken(LocalLauncherConfig(), build_context()),
        "monkeypatch": lambda: monkeypatch,
    }
    assert failing_cases(LauncherPlanContract, fixtures) == cases
