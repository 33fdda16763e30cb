"""Ray, and nothing of it outside this module: our own or a cluster that is there, actors, processes.

Actors are plain classes that tests run without Ray. Ray's own files live under a short temporary
directory (its sockets have a path limit of 107 bytes) and its logs move to the run's directory on stop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rollhook.errors import RollhookError
from rollhook.failures import Failure, one_line
from rollhook.processes import LOOPBACK, NODE, STOP_GRACE_SECONDS, ClusterPlacement, ProcessDiedError
from rollhook.resident import Resident

T = TypeVar("T")
logger = logging.getLogger(__name__)

#: Ray's settings by environment: no telemetry, no metrics agent, no chatter on the terminal
RAY_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_SCHEDULER_EVENTS": "0",
}
OBJECT_STORE_BYTES = 80 * 1024 * 1024
PREFIX = "rh-ray-"
#: of a node's resource or CPUs, what an actor takes on a cluster that others use too
SHARE = 0.001
#: seconds between two looks whether what waits for room on a cluster can still get any
ROOM_INTERVAL = 15.0
#: seconds for which a cluster may not answer before it counts as gone; Ray itself would try for many minutes
JOIN_SECONDS = 10.0


@dataclass(frozen=True)
class Attached:
    """A Ray cluster that others started, and how actors are placed there.

    They go to nodes that have `resource`, else to nodes that have CPUs. `env` is set before their Python
    starts, in clear; `secrets` (name -> reference) are resolved on each node, where it has them.
    """

    address: str
    resource: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)


class Cluster:
    """A Ray of our own on this machine (`start`) or one that is there (`attach`), and what is placed on it.

    One per process at a time. Everything it starts dies with this process, also by kill -9: the daemons of
    our own Ray are tied to the thread that started them (kept for the cluster's life), actors to the daemons
    or, on a cluster that stays, to the job that this process is for Ray, child processes to actors. Two of
    Ray's agents notice last, and give up after about a minute.
    """

    def __init__(
        self,
        scratch: Path,
        temp: Path | None,
        thread: ThreadPoolExecutor,
        environ: dict[str, str | None],
        attached: Attached | None = None,
    ):
        self._scratch = scratch
        self._temp = temp
        self._thread = thread
        self._environ = environ
        self._attached = attached
        self._remotes: list[Remote] = []
        self._stopped = False
        self.placement = ClusterPlacement(self, NODE if attached is not None else LOOPBACK)

    @classmethod
    async def start(cls, scratch: Path, *, cpus: float | None = None) -> Cluster:
        """Start Ray; `scratch` takes its logs, `cpus` is what it may schedule (None: all of the machine).

        Raises RollhookError when Ray is absent or does not come up. Takes about four seconds on two cores.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        try:
            return await _await_thread(thread, lambda: cls._start(scratch, cpus, thread))
        except BaseException:
            thread.shutdown(wait=False)
            raise

    @classmethod
    def _start(cls, scratch: Path, cpus: float | None, thread: ThreadPoolExecutor) -> Cluster:
        scratch.mkdir(parents=True, exist_ok=True)
        _sweep_temporary()
        temp = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=_short_tmp()))
        cluster = cls(scratch, temp, thread, _set_environment(temp))
        try:
            ray = _ray()
            logging.getLogger("ray").setLevel(logging.ERROR)
            _log_instead_of_printing()
            _refresh_settings()
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(temp),
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        except RollhookError:
            cluster._clean()
            raise
        except Exception as error:
            cluster._stop()
            raise RollhookError(
                f"Ray did not start: {one_line(error)}; its logs are in {scratch / 'ray'}"
            ) from error
        return cluster

    @classmethod
    async def attach(
        cls,
        address: str,
        scratch: Path,
        resource: str | None = None,
        *,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> Cluster:
        """Join the Ray cluster at `address` (GCS `host:port`), on one of whose nodes this process runs.

        Whether a token is needed is the cluster's affair: Ray takes it from the environment. `scratch` takes
        the logs of what is placed, on storage that all nodes see. `stop` ends what was placed and nothing
        else. For `resource`, `env` and `secrets` see `Attached`. Raises RollhookError when the cluster cannot
        be joined or has no such resource.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        attached = Attached(address, resource, dict(env or {}), dict(secrets or {}))
        try:
            return await _await_thread(thread, lambda: cls._attach(scratch, attached, thread))
        except BaseException:
            thread.shutdown(wait=False)
            raise

    @classmethod
    def _attach(cls, scratch: Path, attached: Attached, thread: ThreadPoolExecutor) -> Cluster:
        scratch.mkdir(parents=True, exist_ok=True)
        ray = _ray()
        logging.getLogger("ray").setLevel(logging.ERROR)
        _log_instead_of_printing()
        _refresh_settings()
        try:
            _until_answered(attached.address)
            ray.init(
                address=attached.address,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:
            raise RollhookError(
                f"the Ray cluster at {attached.address} cannot be joined from {socket.gethostname()}: "
                f"{one_line(error)}; the driver must run on one of its nodes, with its Ray and its token"
            ) from error
        cluster = cls(scratch, None, thread, {}, attached)
        try:
            cluster._assert_room("the run")
        except RollhookError:
            ray.shutdown()
            raise
        return cluster

    async def place(
        self,
        target: str,
        *args: Any,
        name: str,
        gpus: float = 0,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        calls: int = 1,
        node: str | None = None,
    ) -> Remote:
        """Construct `module:Class` with `args` in a process of its own and return a handle to it.

        `env` is set before the module is imported; output is appended to `log`, by default
        `<scratch>/<name>.log`. Raises what the constructor raised, as `Remote.call` does. GPUs are whole or
        fractions, as Ray counts them; RollhookError for more than the cluster has. At most `calls` calls run
        at once, each on a thread of its own. What takes no GPU is spread over the nodes, unless `node` is
        the address of the one to use.
        """
        log = log or self._scratch / f"{name}.log"

        def create() -> Any:
            self._assert_room(name, gpus, node)
            options = self._options(gpus, node) | {"max_restarts": 0, "max_concurrency": calls}
            return _ray().remote(**options)(Resident).remote(name, str(log))

        remote = Remote(self, name, log, await self._run(create))
        self._remotes.append(remote)
        secrets = self._attached.secrets if self._attached is not None else {}
        constructing = asyncio.ensure_future(
            remote._ask("construct", target, args, dict(env or {}), dict(secrets))
        )
        try:
            while not (await asyncio.wait({constructing}, timeout=ROOM_INTERVAL))[0]:
                await self._run(lambda: self._assert_room(name, gpus, node))
            remote.host = constructing.result()
        except BaseException:
            constructing.cancel()
            await asyncio.shield(remote.stop())
            raise
        return remote

    @property
    def attached(self) -> bool:
        """Whether it is a cluster of somebody else's, with nodes that are other machines."""
        return self._attached is not None

    def _options(self, gpus: float, node: str | None) -> dict[str, Any]:
        """Return what Ray is asked for an actor."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus}
        there = self._attached
        if there is None:
            return options
        if there.resource is not None:
            options["resources"] = {there.resource: SHARE}
        else:  # none on a node without CPUs, such as a head that only keeps the books
            options["num_cpus"] = SHARE
        if node is not None:
            options.setdefault("resources", {})[_of_node(node)] = SHARE
        elif not gpus:
            options["scheduling_strategy"] = "SPREAD"
        env = dict(there.env)
        if _ray().cluster_resources().get("GPU"):  # what takes no GPU may still use one, as on one machine
            env["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        return options | ({"runtime_env": {"env_vars": env}} if env else {})

    def _assert_room(self, name: str, gpus: float = 0, node: str | None = None) -> None:
        """Raise RollhookError where Ray would wait for a machine that nobody adds."""
        there = _ray().cluster_resources()
        if gpus > there.get("GPU", 0):
            raise RollhookError(
                f"{name} needs {gpus:g} GPUs, and the cluster has {there.get('GPU', 0):g}", kind="user"
            )
        if self._attached is None:
            return
        wanted = self._attached.resource
        if wanted is not None and there.get(wanted, 0) < SHARE:
            raise RollhookError(
                f"{name} needs a node with the resource {wanted} (ROLLHOOK_WORKER_RESOURCE), and none of the "
                f"Ray cluster at {self._attached.address} has it"
            )
        if node is not None and not there.get(_of_node(node)):
            raise RollhookError(f"{name} needs node {node}, which has left the Ray cluster")

    async def stop(self) -> None:
        """Stop what was placed, then our own Ray, whose logs go to `scratch/ray`; safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        await asyncio.gather(*(r.release() for r in list(self._remotes)))
        if self._attached is not None:
            await asyncio.gather(*(r.stop() for r in list(self._remotes)))
        await self._run(self._stop)
        self._thread.shutdown(wait=False)

    def _stop(self) -> None:
        _ray().shutdown()
        self._clean()

    def _clean(self) -> None:
        if self._temp is None:
            return
        logs, kept = self._temp / "session_latest" / "logs", self._scratch / "ray"
        try:
            if logs.is_dir():
                shutil.copytree(logs.resolve(), kept, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        except OSError as error:  # a full disk, mostly; what ended the run matters more
            logger.warning("Ray's logs could not be kept in %s (%s)", kept, _one_reason(error))
        shutil.rmtree(self._temp, ignore_errors=True)
        for key, value in self._environ.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value

    async def _run(self, function: Callable[[], T]) -> T:
        return await _await_thread(self._thread, function)


class Remote:
    """A handle to an object that lives in a process of its own."""

    def __init__(self, cluster: Cluster, name: str, log: Path, actor: Any) -> None:
        self._cluster = cluster
        self.name = name
        self.log = log
        #: address of its node, once it is constructed
        self.host = ""
        self._actor = actor

    async def call(self, method: str, *args: Any, **keys: Any) -> Any:
        """Call a method and return its result.

        A RollhookError raised there is raised here with its class and text; anything else becomes one
        sentence that names the object, the method and the log. So does the death of the process.
        """
        return await self._ask("call", method, args, keys)

    async def stop(self) -> None:
        """End the process at once; safe to call twice."""
        actor, self._actor = self._actor, None
        if self in self._cluster._remotes:
            self._cluster._remotes.remove(self)
        if actor is not None:
            await self._cluster._run(lambda: _ray().kill(actor, no_restart=True))

    async def _ask(self, what: str, *args: Any) -> Any:
        if self._actor is None:
            raise RollhookError(f"{self.name} was stopped")
        ray = _ray()
        reference = getattr(self._actor, what).remote(*args)
        try:
            reply = await asyncio.wrap_future(reference.future())
        except ray.exceptions.RayActorError as error:
            where = f" on node {self.host}" if self.host and self._cluster.attached else ""
            last = tail(self.log) or "nothing"
            raise ProcessDiedError(
                f"the process of {self.name}{where} died; its log {self.log} ends: {last}"
            ) from error
        if isinstance(reply, Failure):
            raise reply.to_error(self.log)
        return reply

    async def release(self) -> None:
        """Let a resident child process end in good order before Ray goes."""
        try:
            await asyncio.wait_for(self._ask("release"), STOP_GRACE_SECONDS + 2)
        except (RollhookError, TimeoutError) as error:
            logger.debug("%s did not end in good order: %s", self.name, error)


def _until_answered(address: str) -> None:
    """Raise OSError when nobody listens at a cluster's address."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + JOIN_SECONDS
    while host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), 5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def node_address() -> str:
    """Return where other nodes of the cluster reach this one; the host's name where no Ray runs."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return socket.gethostname()
    return str(ray.util.get_node_ip_address())


def _of_node(address: str) -> str:
    """Return the resource that Ray gives to the node with this address, and to no other."""
    return f"node:{address}"


def tail(log: Path, size: int = 2000) -> str:
    """Return the last `size` bytes of a log as text, empty where there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - size))
            return stream.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise RollhookError(
            f"native training runs on Ray, which cannot be imported ({error}): pip install 'rollhook[ray]'",
            kind="user",
        ) from error
    return ray


async def _await_thread(thread: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, function)


def _set_environment(temp: Path) -> dict[str, str | None]:
    """Set Ray's environment and return what it was; the token lets only this user's processes connect."""
    token = temp / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    wanted = RAY_ENV | {"RAY_AUTH_TOKEN_PATH": str(token)}
    before = {key: os.environ.get(key) for key in [*wanted, "PYTHONBREAKPOINT"]}
    os.environ.update(wanted)
    return before


def _log_instead_of_printing() -> None:
    """Ray prints the cluster's errors on the driver's stdout whatever `log_to_driver` says; log them."""
    from ray._private import worker

    def log(data: Mapping[str, Any], *_: object, **__: object) -> None:
        logger.info("ray: %s", " ".join(map(str, data.get("lines", ()))))

    worker.print_worker_logs = log


def _refresh_settings() -> None:
    """Let a Ray that was imported earlier see the environment and the token of this start."""
    try:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
    except ImportError:  # a Ray without authentication
        return
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _short_tmp() -> str:
    directory = tempfile.gettempdir()
    return directory if len(directory) <= 20 else "/tmp"  # noqa: S108 - mkdtemp makes it private


def _sweep_temporary() -> None:
    """Remove what drivers of this user that were killed have left behind."""
    for path in Path(_short_tmp()).glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        try:
            if path.stat().st_uid == os.getuid() and pid.isdigit() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:
            logger.debug("left %s: %s", path, error)


def _one_reason(error: OSError) -> str:
    """Return why files could not be copied; shutil gathers (from, to, reason) of each."""
    files = error.args[0] if error.args and isinstance(error.args[0], list) else []
    return str(files[0][2]) if files else str(error)
