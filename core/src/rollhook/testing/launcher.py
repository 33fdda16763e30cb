"""The contract of launchers: what a plan says and never says, and a job from its submission to its end.

A suite inherits `LauncherContract` with a launcher against a real scheduler. Where there is none,
`LauncherPlanContract` has the cases about plans alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rollhook.errors import LauncherError
from rollhook.job_script import FILES, LOG
from rollhook.launcher import Handle, Job, JobStatus, Launcher, Probe, Resources
from rollhook.rundir import RunDir
from rollhook.runtime.jobs import collect, submit_job, watch
from rollhook.testing.contract import Contract

MakeLauncher = Callable[[], Launcher]

#: the value that every secret of a site has, and that is in no file
SENTINEL = "sentinel-7d1f0c-do-not-print"
JOB = Job(
    run_id="demo-0a1b2c",
    attempt=1,
    directory="/shared/a b/demo-0a1b2c/attempts/1",
    script='exec rollhook drive "$ROLLHOOK_JOB_FILES/recipe.lock.yaml"',
    env={"RUN": "demo-0a1b2c", "GREETING": 'it\'s "here"'},
    secrets={"KEY": "env:LAUNCHER_CONTRACT_KEY"},
    files={"recipe.lock.yaml": "lock: 1\n"},
    resources=Resources(nodes=1, gpus_per_node=0),
    probes=[Probe("disk", "test -w /shared")],
    setup="source /opt/venv/bin/activate",
)


class LauncherPlanContract(Contract):
    """What every launcher's plans must be. A suite gives the fixture `make_launcher`."""

    @pytest.fixture
    def make_launcher(self) -> MakeLauncher:
        """Build the launcher under test, each time anew."""
        raise NotImplementedError("give the contract a fixture make_launcher that returns a builder")

    def test_a_plan_is_data(self, make_launcher: MakeLauncher) -> None:
        assert json.loads(json.dumps(make_launcher().plan(JOB).to_data()))

    def test_the_same_job_gives_the_same_plan(self, make_launcher: MakeLauncher) -> None:
        assert make_launcher().plan(JOB).to_data() == make_launcher().plan(JOB).to_data()

    def test_a_plan_holds_every_file_and_every_variable(self, make_launcher: MakeLauncher) -> None:
        plan = make_launcher().plan(JOB)
        text = json.dumps(plan.to_data())
        for word in (JOB.id, "rollhook drive", "lock: 1", "test -w /shared", "/opt/venv", *JOB.env):
            assert word in text, f"the plan lacks {word!r}"
        assert plan.files[f"{FILES}/recipe.lock.yaml"] == "lock: 1\n"

    def test_every_script_of_a_plan_is_bash(self, make_launcher: MakeLauncher) -> None:
        for name, text in make_launcher().plan(JOB).files.items():
            if name.endswith((".sh", ".sbatch")):
                checked = subprocess.run(
                    ["bash", "-n"], input=text, text=True, capture_output=True, check=False
                )
                assert checked.returncode == 0, f"{name}: {checked.stderr}"

    def test_a_plan_names_secrets_and_never_holds_one(
        self, make_launcher: MakeLauncher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LAUNCHER_CONTRACT_KEY", SENTINEL)
        text = json.dumps(make_launcher().plan(JOB).to_data())
        assert "LAUNCHER_CONTRACT_KEY" in text
        assert SENTINEL not in text

    def test_planning_changes_nothing_here(self, make_launcher: MakeLauncher) -> None:
        before = dict(os.environ), os.getcwd(), sorted(os.listdir())
        make_launcher().plan(JOB)
        assert (dict(os.environ), os.getcwd(), sorted(os.listdir())) == before


#: a second signal would mean: at once
_DRAINING = """
import asyncio, signal, sys
told = []
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, told.append, 1)
    print("ready", flush=True)
    while not told:
        await asyncio.sleep(0.1)
    await asyncio.sleep(4)  # longer than the patience of some schedulers
asyncio.run(main())
print("drained, told", len(told), "times", flush=True)
sys.exit(3)
"""


@dataclass
class LauncherSite:
    """A launcher against a real scheduler, and what a suite knows of it.

    `root` is a directory that the nodes see under the same path; `secrets` has, for each scheme that can be
    tried, a reference whose value is SENTINEL on every node; `unknown` turns a handle into that of a job that
    the scheduler never had; `view` returns all that the scheduler shows of its jobs. `seconds` is what a
    short job may take from its submission to its end.
    """

    launcher: Launcher
    root: Path
    secrets: Mapping[str, str]
    unknown: Callable[[Handle], Handle]
    view: Callable[[], Awaitable[str]]
    seconds: float = 90.0
    #: whether the script is given a RAY_ADDRESS
    gives_ray: bool = True

    def job(self, script: str, **options: Any) -> Job:
        """Return a job with an id of its own, and its directory below `root`."""
        run_id = f"contract-{secrets.token_hex(4)}"
        return Job(run_id, 1, str(self.root / run_id / "attempts" / "1"), script, **options)

    async def submit(self, job: Job) -> Handle:
        """Submit it as the core does; its record is in the run's directory."""
        run = await asyncio.to_thread(RunDir.create, self.root, "contract", run_id=job.run_id)
        return await submit_job(self.launcher, job, run=run)

    async def watch(self, handle: Handle, log: list[bytes] | None = None) -> JobStatus:
        """Return how it ended."""
        follow = None if log is None else log.append
        return await watch(self.launcher, handle, follow=follow, timeout=self.seconds, lost_seconds=10)

    async def until_said(self, job: Job, word: str) -> None:
        """Wait until the job's log has a word."""
        path, end = Path(job.directory) / LOG, time.monotonic() + self.seconds
        while word not in (await asyncio.to_thread(_text, path)):
            assert time.monotonic() < end, f"the log of {job.id} never said {word!r}"
            await asyncio.sleep(0.1)


class LauncherContract(LauncherPlanContract):
    """What every launcher must do. A suite gives the fixtures `make_launcher` and `site`."""

    @pytest.fixture
    def site(self) -> LauncherSite:
        """Return a launcher against a real scheduler."""
        raise NotImplementedError("give the contract a fixture site that returns a LauncherSite")

    async def test_a_job_is_given_all_that_it_asked_for_and_its_log_is_whole(
        self, site: LauncherSite, make_launcher: MakeLauncher
    ) -> None:
        names = {f"SECRET_{scheme.upper()}": reference for scheme, reference in site.secrets.items()}
        sums = "".join(f"printf %s \"${name}\" | sha256sum | sed 's/^/{name} /'\n" for name in names)
        script = (
            'cat "$ROLLHOOK_JOB_FILES/note.txt"\n'
            'echo "greeting $GREETING setup $PREPARED"\n'
            'echo "ids $ROLLHOOK_RUN_ID $ROLLHOOK_ATTEMPT $ROLLHOOK_JOB_DIR"\n'
            'echo "ray ${RAY_ADDRESS:-none}"\n'
            f"{sums}for i in $(seq 500); do echo line $i; done\n"
        )
        job = site.job(
            script,
            env={"GREETING": 'it\'s "$HOME"'},
            secrets=names,
            files={"note.txt": "delivered\n"},
            probes=[Probe("first", "echo probed $PREPARED")],
            setup="export PREPARED=yes",
        )
        handle = await site.submit(job)
        log: list[bytes] = []
        status = await site.watch(handle, log)
        text = _text(Path(job.directory) / LOG)
        assert (status.state, status.exit_code) == ("succeeded", 0), (status, text)
        lines = text.splitlines()
        digest = hashlib.sha256(SENTINEL.encode()).hexdigest()
        followed = b"".join(log).decode().splitlines()
        for line in (
            "delivered",
            'greeting it\'s "$HOME" setup yes',
            f"ids {job.run_id} 1 {job.directory}",
            "probed yes",
            *(f"{name} {digest}  -" for name in names),
        ):
            assert line in lines, (line, text)
            assert line in followed, (line, followed)
        assert [line for line in lines if line.startswith("line ")] == [f"line {i}" for i in range(1, 501)]
        assert [line for line in followed if line.startswith("line ")] == [f"line {i}" for i in range(1, 501)]
        if site.gives_ray:
            address = next(line for line in lines if line.startswith("ray ")).split()[1]
            assert address.rpartition(":")[2].isdecimal(), f"RAY_ADDRESS is {address}, not host:port"
        await self._another_process_can_ask(make_launcher(), handle)
        await collect(site.launcher, handle, Path(job.directory), "test")
        await self._the_sentinel_is_nowhere(site, job, handle)
        assert all(isinstance(line, str) for line in await site.launcher.cleanup(handle))

    async def _another_process_can_ask(self, launcher: Launcher, handle: Handle) -> None:
        again = Handle(**json.loads(json.dumps(asdict(handle))))
        assert again == handle
        assert (await launcher.status(again)).state == "succeeded"
        said = await launcher.stop(again)
        assert said, "stopping a job that has ended says so"
        assert (await launcher.status(again)).state == "succeeded"
        files = await launcher.debug(again)
        assert files
        assert all(isinstance(text, str) for text in files.values())

    async def _the_sentinel_is_nowhere(self, site: LauncherSite, job: Job, handle: Handle) -> None:
        shown = {
            "the plan": json.dumps(site.launcher.plan(job).to_data()),
            "the handle": json.dumps(asdict(handle)),
            "the scheduler's view": await site.view(),
            "the status": repr(await site.launcher.status(handle)),
        }
        for path in (site.root / job.run_id).rglob("*"):
            if path.is_file():
                shown[str(path)] = path.read_bytes().decode("utf-8", errors="replace")
        held = [where for where, text in shown.items() if SENTINEL in text]
        assert not held, f"the secret's value is in {', '.join(held)}"

    async def test_two_jobs_at_once_keep_their_logs_and_exit_codes_apart(self, site: LauncherSite) -> None:
        good = site.job("for i in 1 2 3; do echo from good $i; sleep 0.2; done")
        bad = site.job("set -e\necho from bad\n(exit 7)\necho never")
        handles = await asyncio.gather(site.submit(good), site.submit(bad))
        logs: list[list[bytes]] = [[], []]
        ends = await asyncio.gather(*(site.watch(*each) for each in zip(handles, logs, strict=True)))
        assert [(end.state, end.exit_code) for end in ends] == [("succeeded", 0), ("failed", 7)], ends
        texts = [b"".join(log).decode() for log in logs]
        assert texts[0].count("from good") == 3
        assert "from bad" in texts[1]
        assert "bad" not in texts[0]
        assert "good" not in texts[1]
        assert "never" not in texts[1]

    async def test_a_stopped_job_may_drain_and_is_no_success(self, site: LauncherSite) -> None:
        script = f"exec python3 -c '{_DRAINING}'"
        job = site.job(script, stopped_code=3, stop_grace_seconds=site.seconds)
        handle = await site.submit(job)
        await site.until_said(job, "ready")
        assert (await site.launcher.status(handle)).state == "running"
        assert await site.launcher.stop(handle)
        status = await site.watch(handle)
        assert status.state == "stopped", (status, _text(Path(job.directory) / LOG))
        said = _text(Path(job.directory) / LOG)
        assert "drained, told 1 times" in said, said

    async def test_a_job_that_ignores_its_stop_can_be_forced(self, site: LauncherSite) -> None:
        script = "trap '' INT TERM\necho ready\nwhile :; do sleep 0.1; done\n"
        job = site.job(script, stop_grace_seconds=600)
        handle = await site.submit(job)
        await site.until_said(job, "ready")
        assert await site.launcher.stop(handle, force=True)
        assert (await site.watch(handle)).state == "stopped"

    async def test_a_probe_that_fails_fails_the_job(self, site: LauncherSite) -> None:
        job = site.job("echo never", probes=[Probe("disk", "echo 'no disk here'; exit 4")])
        handle = await site.submit(job)
        status = await site.watch(handle)
        text = _text(Path(job.directory) / LOG)
        assert status.state == "failed", status
        assert "no disk here" in text
        assert "never" not in text
        await self._an_unknown_job_is_lost(site, handle)

    async def _an_unknown_job_is_lost(self, site: LauncherSite, handle: Handle) -> None:
        unknown = site.unknown(
            replace(handle, job_id="contract-nobody-a1", directory=str(site.root / "nobody"))
        )
        assert (await site.launcher.status(unknown)).state == "lost"
        try:
            async with asyncio.timeout(site.seconds):
                async for _ in site.launcher.logs(unknown, follow=True):
                    pass
        except LauncherError:
            pass  # that there is no such job may be said
        await site.launcher.debug(unknown)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
