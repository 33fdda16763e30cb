"""The job of a recipe: `rollhook drive` beside its lock, on a node, or what a hosted trainer renders."""

from __future__ import annotations

import asyncio
import logging
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from rollhook.component import BuildContext
from rollhook.durable import write_atomic
from rollhook.errors import RunError
from rollhook.launcher import ENDED, Code, Handle, Job, JobKeys, Launcher, Plan, Probe, Resources
from rollhook.packs import cache_directory, resolve_all
from rollhook.plugins import Plugins
from rollhook.recipe.check import compose, secret_fields
from rollhook.recipe.load import Loaded
from rollhook.recipe.lock import lock_text
from rollhook.recipe.match import ALL
from rollhook.recipe.parts import find_parts
from rollhook.rundir import RunDir, check_free, index_directory, new_run_id
from rollhook.runtime.job_records import Record, next_attempt, records
from rollhook.runtime.jobs import build_launcher, job_status, prepare, submit_plan
from rollhook.secrets import resolve_secret
from rollhook.trainer import Place, Rendered

LOCK, RECIPE = "recipe.lock.yaml", "recipe.yaml"
#: with which `rollhook drive` says that it was stopped
STOPPED_CODE = 3
#: below which a frozen plan puts what depends on the machine
FROZEN = PurePosixPath("/rollhook")


@dataclass
class Native:
    """A recipe that can run, and the launcher that it names."""

    loaded: Loaded
    plugins: Plugins
    launcher: Launcher
    #: the launcher's own keys, as a record keeps them
    keys: Mapping[str, Any]

    @classmethod
    def of(cls, loaded: Loaded, plugins: Plugins) -> Native:
        """Build the launcher of a composed recipe; nothing is contacted."""
        use = loaded.recipe.launcher
        keys = resolve_all(use.keys, plugins)
        context = BuildContext(
            logger=logging.getLogger("rollhook.launcher"),
            scratch=Path(tempfile.gettempdir()),
            cache=cache_directory(),
            secret=resolve_secret,
        )
        launcher = plugins.build("launcher", use.use, keys, context, "launcher")
        return cls(loaded, plugins, launcher, keys)

    @property
    def name(self) -> str:
        """The launcher's name."""
        return self.loaded.recipe.launcher.use

    def root(self) -> Path:
        """Return the directory of the recipe's runs as the nodes see it."""
        root = Path(self.loaded.recipe.storage.root)
        return root.expanduser().resolve() if self.launcher.shares_files else root

    def kept_in(self) -> Path:
        """Return the directory in which the submitter's half of the run is."""
        return self.root() if self.launcher.shares_files else index_directory()

    def job(self, run_id: str, attempt: int, *, frozen: bool = False) -> Job:
        """Return the job; `frozen` leaves out what depends on this machine, for comparisons."""
        keys = self.launcher.config if isinstance(self.launcher.config, JobKeys) else None
        where = Path.cwd()
        if frozen:
            root = FROZEN / self.loaded.recipe.storage.root
            cwd, text = FROZEN, lock_text(self.loaded, self.plugins, frozen=True)
        else:
            root, cwd, text = (
                PurePosixPath(self.root()),
                PurePosixPath(where),
                lock_text(self.loaded, self.plugins),
            )
        run = root / run_id
        parts = find_parts(self.loaded, whole=False, entries=self.plugins.entries).parts
        references = {str(secret) for _, secret in secret_fields(parts)}
        token = self.loaded.recipe.gateway.token
        references |= {str(token)} if token is not None else set()
        common = keys or JobKeys()
        grace = getattr(self.launcher.config, "stop_grace_seconds", common.stop_grace_seconds)
        job = Job(
            run_id=run_id,
            attempt=attempt,
            directory=str(run / "attempts" / str(attempt)),
            script=_script(run, cwd if self.launcher.shares_files else None),
            env=dict(common.env),
            secrets={name: str(secret) for name, secret in common.secrets.items()},
            references=sorted(references),
            files={LOCK: text, RECIPE: self.loaded.text or text},
            code=Code(common.code, common.code_path or ""),
            resources=Resources(common.nodes, common.gpus_per_node),
            probes=[Probe("check", f'rollhook check "$ROLLHOOK_JOB_FILES/{LOCK}" --site here --strict')],
            setup=common.setup,
            stop_signal="INT",
            stop_grace_seconds=grace,
            stopped_code=STOPPED_CODE,
        )
        return self._hosted(job, Place(common.nodes, common.gpus_per_node, str(run)))

    def _hosted(self, job: Job, place: Place) -> Job:
        """Return the job as a hosted trainer renders it; a native one's is as it was."""
        recipe = self.loaded.recipe
        use, engine = recipe.trainer, recipe.engine
        if use is None or not self.plugins.load_class("trainer", use.use).hosted:
            return job
        context = BuildContext(logging.getLogger("rollhook.trainer"), Path("/"), Path("/"))
        trainer = self.plugins.build(
            "trainer", use.use, resolve_all(use.keys, self.plugins), context, "trainer"
        )
        options: Sequence[str] = ()
        if engine is not None:
            cls = self.plugins.load_class("engine", engine.use)
            options = cls.options(self.plugins.config("engine", engine.use, engine.keys, "engine"))
        rendered: Rendered = trainer.render(recipe, options, place)
        return replace(
            job,
            script=rendered.script,
            env={**rendered.env, **job.env},
            files={**job.files, **rendered.files},
            probes=[*rendered.probes, *job.probes],
            stopped_code=None,
        )


def _script(run: PurePosixPath, cwd: PurePosixPath | None) -> str:
    """Return the job's script; relative paths of the recipe are meant from where it was submitted."""
    drive = f'exec rollhook drive "$ROLLHOOK_JOB_FILES/{LOCK}" --into {shlex.quote(str(run))}\n'
    if cwd is None:
        return drive
    there = shlex.quote(str(cwd))
    return f'cd -- {there} 2>/dev/null || echo "rollhook: "{there}" is not here; working in $PWD"\n{drive}'


def plan_of(native: Native, *, frozen: bool = False) -> Plan:
    """Return what running the recipe would submit; nothing is contacted, and no run begun."""
    name = native.loaded.recipe.name
    run_id = new_run_id(name)
    if frozen:
        run_id = run_id.rpartition("-")[0] + "-000000"
    return native.launcher.plan(native.job(run_id, 1, frozen=frozen))


@dataclass(frozen=True)
class Submitted:
    """A run's job, as whoever submitted it knows it."""

    run: RunDir
    launcher: Launcher
    handle: Handle
    attempt: int


async def submit_new(native: Native, run_id: str | None = None) -> Submitted:
    """Begin a run as a job. Raises LauncherError with all that the site lacks, before anything is written."""
    root, kept = native.root(), native.kept_in()
    run_id = run_id or new_run_id(native.loaded.recipe.name)
    check_free(kept, run_id)
    if native.launcher.shares_files:
        check_free(root, run_id)
    plan = await prepare(native.launcher, await asyncio.to_thread(native.job, run_id, 1))
    run = await asyncio.to_thread(RunDir.create, kept, native.loaded.recipe.name, run_id=run_id)
    await asyncio.to_thread(_keep, run, plan.job.files)
    handle = await submit_plan(native.launcher, plan, run=run, keys=native.keys, name=native.name)
    return Submitted(run, native.launcher, handle, 1)


async def submit_resumed(run: RunDir) -> Submitted:
    """Go on with a run as a job: the next attempt, from its newest committed step.

    Raises RunError when its newest job has not ended, or the run was not begun by `rollhook run`.
    """
    run.check_verb("run")
    if not run.lock_path.is_file():
        raise RunError(f"{run.path} has no {run.lock_path.name}, so nothing says what the run is to do")
    if found := await asyncio.to_thread(records, run):
        await _check_ended(run, found[-1])
    loaded, plugins = await asyncio.to_thread(compose, run.lock_path, allow_changed=[ALL], site=None)
    native = await asyncio.to_thread(Native.of, loaded, plugins)
    attempt = await asyncio.to_thread(next_attempt, run)
    job = await asyncio.to_thread(native.job, run.run_id, attempt)
    if native.launcher.shares_files:  # wherever its root was said to be, the run is here
        job = _moved(job, native.root() / run.run_id, run.path)
    job = replace(job, files={LOCK: run.lock_path.read_text(), RECIPE: run.recipe_path.read_text()})
    plan = await prepare(native.launcher, job)
    handle = await submit_plan(native.launcher, plan, run=run, keys=native.keys, name=native.name)
    return Submitted(run, native.launcher, handle, attempt)


async def _check_ended(run: RunDir, record: Record) -> None:
    launcher = await asyncio.to_thread(build_launcher, record, Path(tempfile.gettempdir()))
    status = await job_status(launcher, record)
    if status.state not in {*ENDED, "lost"}:
        raise RunError(
            f"run {run.run_id} has job {record.job_id}, which is {status.state}; "
            f"`rollhook jobs stop {run.run_id}` stops it"
        )


def _moved(job: Job, old: Path, new: Path) -> Job:
    directory = str(new / "attempts" / str(job.attempt))
    script = job.script.replace(shlex.quote(str(old)), shlex.quote(str(new)))
    return replace(job, directory=directory, script=script)


def _keep(run: RunDir, files: Mapping[str, str]) -> None:
    write_atomic(run.recipe_path, files[RECIPE].encode())
    write_atomic(run.lock_path, files[LOCK].encode())
