"""The launcher: plans are manifests, and what is submitted is what they say."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from rollhook.component import BuildContext
from rollhook.errors import LauncherError, Unsupported
from rollhook.job_script import script_files
from rollhook.launcher import (
    ClusterInfo,
    ClusterOptions,
    ClusterPlan,
    Clusters,
    Handle,
    Job,
    JobStatus,
    Launcher,
    Plan,
)
from rollhook.ray_jobs import without_values
from rollhook_kuberay import bringup, daemons, preflight, rayjob, standing
from rollhook_kuberay.config import ROLES, KubeRayLauncherConfig, Role
from rollhook_kuberay.heads import DASHBOARD, ray_jobs, reach
from rollhook_kuberay.marks import ROLE, owned, with_hash
from rollhook_kuberay.port import Object, Port
from rollhook_kuberay.render import Renderer, files_name
from rollhook_kuberay.rules import check_files, raise_problems
from rollhook_kuberay.site import Site


class KubeRayLauncher(Launcher, Clusters):
    """Runs a job as a RayJob of its own, or on a RayCluster that stays."""

    secret_schemes: ClassVar[frozenset[str]] = frozenset({"env", "file", "k8s"})

    def __init__(self, config: KubeRayLauncherConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        self.keys = config
        self._site = Site(config, context.secret)

    @property
    def shares_files(self) -> bool:
        """Whether this machine sees the run's directory as the pods do."""
        return self.keys.shares_files

    def plan(self, job: Job) -> Plan:
        """Return the manifests, and what goes with them to the nodes."""
        raise_problems(self.keys)
        plan = self._ephemeral(job) if self.keys.mode == "rayjob" else self._standing(job)
        if self.keys.mode == "rayjob":
            check_files(plan)
        return plan

    def _ephemeral(self, job: Job) -> Plan:
        files = script_files(job)
        renderer = Renderer(
            self.keys, self._site.user, secrets=job.secrets, references=job.references, files=files,
            config_map=files_name(job),
        )  # fmt: skip
        made = with_hash(renderer.ray_job(job))
        others = [renderer.files_map(job, files), *renderer.claims("training", job.id)]
        requests = {_title(each): each for each in (made, *(owned(with_hash(each), made) for each in others))}
        notes = [
            "the RayJob is created first; the rest belongs to it, and goes with it",
            "the job's files are in the ConfigMap; logs, exit code and checkpoints are below "
            f"{job.directory} on the pods' volume",
        ]
        return Plan("kuberay", job, files=files, requests=requests, notes=notes)

    def _standing(self, job: Job) -> Plan:
        files = script_files(job)
        self._carried(job)
        renderer = Renderer(self.keys, self._site.user)
        requests: dict[str, Any] = {}
        for target in bringup.targets(self.keys):
            requests |= {_title(each): each for each in bringup.manifests(self.keys, renderer, target)}
        for role, cluster in self._daemons():
            body = daemons.request(cluster.daemon, cluster.daemon.id)
            requests[f"Ray job {cluster.daemon.id} on {cluster.name} ({role})"] = body
        name = self._training()
        spec = renderer.cluster_spec("training", name)
        if self.keys.submit == "port_forward":
            requests[f"Ray job {job.id} on {name}"] = standing.request(self.keys, job, files, spec)
        else:
            command = standing.exec_command(self.keys, job, files, spec)
            requests[f"exec on the head of {name}"] = {"command": command, "stdin": "a tar of the files"}
        notes = [
            "clusters and deployments that are there and unchanged are used; one that has changed "
            + ("is replaced" if self.keys.recreate else "is said, and used as it is")
        ]
        if self.keys.replace:
            notes.append("what runs on the clusters is stopped first")
        return Plan("kuberay", job, files=files, requests=requests, notes=notes)

    async def preflight(self, plan: Plan) -> Sequence[str]:
        """Look at rights, at what pods refer to, and at names that are in use."""
        async with self._site.port() as port:
            return await preflight.check(self.keys, port, plan.requests, self._site.user)

    async def submit(self, plan: Plan) -> Handle:
        """Create the RayJob and what it owns; or bring clusters up, wait for them, and submit to Ray."""
        job = plan.job
        async with self._site.port() as port:
            data: dict[str, Any] = {"mode": self.keys.mode, "namespace": port.namespace}
            if self.keys.mode == "rayjob":
                await rayjob.submit(self._site, port, plan.requests)
                return Handle("kuberay", job.id, job.directory, data | {"name": job.id})
            options = ClusterOptions(timeout=self.keys.ready_seconds, recreate=self.keys.recreate)
            wanted = bringup.targets(self.keys)
            await self._up(port, wanted, options, self.context.logger.info)
            name = self._training()
            if self.keys.replace:
                await standing.replace(self._site, port, name, self.context.logger.info)
            body = list(plan.requests.values())[-1]
            data |= await standing.submit(self._site, port, name, body, plan.files, job)
            return Handle("kuberay", job.id, job.directory, data | {"cluster": name})

    async def status(self, handle: Handle) -> JobStatus:
        """Ask KubeRay, or Ray on the cluster that stays."""
        async with self._port_of(handle) as port:
            if handle.data["mode"] == "rayjob":
                return await rayjob.status(self._site, handle, port)
            return await standing.status(self._site, handle, port)

    async def logs(self, handle: Handle, *, follow: bool = False) -> AsyncIterator[bytes]:
        """Give the job's output from its beginning; with `follow` until it has ended."""
        async with self._port_of(handle) as port:
            kept = rayjob.logs if handle.data["mode"] == "rayjob" else standing.logs
            async for chunk in kept(self._site, handle, port, follow=follow):
                yield chunk

    async def stop(self, handle: Handle, *, force: bool = False) -> str:
        """Ask the job to stop; `force` ends it at once."""
        async with self._port_of(handle) as port:
            kept = rayjob.stop if handle.data["mode"] == "rayjob" else standing.stop
            return await kept(self._site, handle, port, force=force)

    async def cleanup(self, handle: Handle) -> Sequence[str]:
        """Delete the RayJob of an ended job, or what it left on a cluster that stays."""
        async with self._port_of(handle) as port:
            if handle.data["mode"] == "rayjob":
                return await rayjob.cleanup(handle, port)
            return await standing.cleanup(handle, port)

    async def debug(self, handle: Handle) -> Mapping[str, str]:
        """Return the objects, pods and events of a job, and what Ray says of its cluster."""
        try:
            async with self._port_of(handle) as port:
                return await self._debug(handle, port)
        except LauncherError as error:
            return {"kubernetes.txt": f"{error}\n"}

    async def _debug(self, handle: Handle, port: Port) -> dict[str, str]:
        job = None
        texts: dict[str, str] = {}
        if handle.data["mode"] == "rayjob":
            job = await port.get("RayJob", str(handle.data["name"]))
            texts["rayjob.json"] = _json(job)
        cluster = str(
            handle.data.get("cluster") or ((job or {}).get("status") or {}).get("rayClusterName") or ""
        )
        pods = await port.list("Pod", {"ray.io/cluster": cluster}) if cluster else []
        names = {cluster, handle.job_id, *(pod["metadata"]["name"] for pod in pods)}

        async def events() -> str:
            found = await port.list("Event")
            return _json([each for each in found if (each.get("involvedObject") or {}).get("name") in names])

        wanted: dict[str, Callable[[], Awaitable[str]]] = {
            "pods.json": _given(_json(pods)),
            "events.json": events,
        }
        if cluster:
            wanted["raycluster.json"] = lambda: _dumped(port.get("RayCluster", cluster))
            wanted |= _ray(self._site, port, cluster)
        results = await asyncio.gather(*(_or_error(ask) for ask in wanted.values()))
        return texts | dict(zip(wanted, results, strict=True))

    def cluster_targets(self) -> Sequence[str]:
        """Return deployments and clusters, in the order of bringing up."""
        self._long_lived()
        return bringup.targets(self.keys)

    def cluster_plan(self, targets: Sequence[str] = ()) -> ClusterPlan:
        """Return the manifests of the targets."""
        self._long_lived()
        raise_problems(self.keys)
        renderer, wanted = Renderer(self.keys, self._site.user), bringup.chosen(self.keys, targets)
        requests: dict[str, Any] = {}
        for target in wanted:
            requests |= {_title(each): each for each in bringup.manifests(self.keys, renderer, target)}
        for role, cluster in self._daemons():
            if f"clusters.{role}" in wanted:
                body = daemons.request(cluster.daemon, cluster.daemon.id)
                requests[f"Ray job {cluster.daemon.id} on {cluster.name}"] = body
        return ClusterPlan("kuberay", wanted, requests=requests)

    async def cluster_up(
        self, targets: Sequence[str], options: ClusterOptions, say: Callable[[str], None]
    ) -> Sequence[ClusterInfo]:
        """Make them, or find them up; with `wait` until they are ready, and start their daemons."""
        self._long_lived()
        raise_problems(self.keys)
        _refuse(options)
        wanted = bringup.chosen(self.keys, targets)
        async with self._site.port() as port:
            await self._up(port, wanted, options, say)
            return await self._infos(port, wanted)

    async def cluster_down(
        self, targets: Sequence[str], options: ClusterOptions, say: Callable[[str], None]
    ) -> Sequence[str]:
        """Delete them; what belongs to them goes with them."""
        self._long_lived()
        _refuse(options)
        wanted = bringup.chosen(self.keys, targets)
        async with self._site.port() as port:
            return await bringup.down(
                self._site, port, wanted, wait=options.wait, seconds=options.timeout, say=say
            )

    async def cluster_status(self, targets: Sequence[str] = ()) -> Sequence[ClusterInfo]:
        """Return how they stand: head, workers and daemon of clusters, pods of deployments."""
        self._long_lived()
        async with self._site.port() as port:
            return await self._infos(port, bringup.chosen(self.keys, targets))

    async def clusters(self) -> Sequence[ClusterInfo]:
        """Return all RayClusters of the namespace."""
        async with self._site.port() as port:
            found = await port.list("RayCluster")
            return await asyncio.gather(
                *(bringup.info(port, each, _name(each), _target(each)) for each in found)
            )

    @contextlib.asynccontextmanager
    async def dashboard(self, target: str | None, port: int) -> AsyncIterator[str]:
        """Give the address of a cluster's dashboard: of a target, or of any RayCluster by its name."""
        there = {each: keys.name for each, keys in self.keys.clusters.items()}
        role = (target or "training").removeprefix("clusters.")
        name = there.get(cast("Role", role)) or target
        if name is None:
            raise LauncherError("say which cluster: `rollhook cluster list` has their names", kind="user")
        async with self._site.port() as kube, reach(kube, name, DASHBOARD, port) as address:
            yield f"http://{address}"

    async def _up(
        self, port: Port, wanted: Sequence[str], options: ClusterOptions, say: Callable[[str], None]
    ) -> None:
        renderer = Renderer(self.keys, self._site.user)
        await bringup.up(self._site, port, renderer, wanted, recreate=options.recreate, say=say)
        if not options.wait:
            return
        await bringup.ready(self._site, port, wanted, seconds=options.timeout, say=say)
        if self.keys.skip_daemons:
            return
        for role, cluster in self._daemons():
            if f"clusters.{role}" in wanted:
                await daemons.ensure(
                    self._site, port, cluster.name, cluster.daemon, replace=self.keys.replace, say=say
                )

    async def _infos(self, port: Port, wanted: Sequence[str]) -> list[ClusterInfo]:
        found = []
        for target in wanted:
            kind, _, key = target.partition(".")
            deployment = kind == "deployments"
            name = (
                self.keys.deployments[key].name if deployment else self.keys.clusters[cast("Role", key)].name
            )
            live = await port.get("Deployment" if deployment else "RayCluster", str(name))
            info = await bringup.info(port, live, str(name), target)
            daemon = None if deployment else self.keys.clusters[cast("Role", key)].daemon
            if daemon is not None and info.state in ("ready", "degraded"):
                said = await self._daemon_status(port, str(name), daemon.id)
                info = _with_message(info, f"{info.message}; daemon {daemon.id}: {said}")
            found.append(info)
        return found

    async def _daemon_status(self, port: Port, cluster: str, base: str) -> str:
        try:
            async with ray_jobs(port, cluster, self._site.token(), seconds=10.0) as jobs:
                job = daemons.newest(await jobs.jobs(), base)
        except LauncherError:
            return "unknown"
        return "not started" if job is None else f"{job.status} as {job.id}"

    def _daemons(self) -> list[tuple[Role, Any]]:
        roles = [role for role in ROLES if role in self.keys.clusters]
        return [
            (role, self.keys.clusters[role]) for role in roles if self.keys.clusters[role].daemon is not None
        ]

    def _training(self) -> str:
        return str(self.keys.clusters["training"].name)

    def _long_lived(self) -> None:
        if self.keys.mode == "rayjob":
            raise Unsupported(
                "mode rayjob brings its cluster up with the job and ends it after; "
                "set launcher.mode=raycluster for one that stays"
            )

    def _carried(self, job: Job) -> None:
        """Refuse references that a cluster which is there already cannot mount any more."""
        own = {str(each) for each in self.keys.secrets.values()}
        wanted = {
            each.removeprefix("k8s:").rpartition("/")[0] for each in job.references if each.startswith("k8s:")
        }
        missing = sorted(wanted - set(self.keys.mount_secrets))
        if missing:
            names = ", ".join(missing)
            raise LauncherError(
                f"the recipe refers to the Secrets {names}, which pods of a cluster that stays do not see; "
                "add them to launcher.mount_secrets",
                kind="user",
            )
        foreign = [name for name, each in job.secrets.items() if each.startswith("k8s:") and each not in own]
        if foreign:
            raise LauncherError(
                f"the secrets {', '.join(foreign)} of the job are not among launcher.secrets, "
                "so the cluster's pods do not have them",
                kind="user",
            )

    @contextlib.asynccontextmanager
    async def _port_of(self, handle: Handle) -> AsyncIterator[Port]:
        async with self._site.port(str(handle.data["namespace"])) as port:
            yield port


def _ray(site: Site, port: Port, cluster: str) -> dict[str, Callable[[], Awaitable[str]]]:
    async def ask(what: str) -> str:
        async with ray_jobs(port, cluster, site.token(), seconds=10.0) as jobs:
            if what == "status":
                return await jobs.cluster_status()
            if what == "nodes":
                return _json([vars(each) for each in await jobs.nodes()])
            if what == "jobs":
                return _json([each.raw for each in await jobs.jobs()])
            return _json([without_values(each) for each in await jobs.actors()])

    return {
        "ray-status.txt": lambda: ask("status"),
        "ray-nodes.json": lambda: ask("nodes"),
        "ray-jobs.json": lambda: ask("jobs"),
        "ray-actors.json": lambda: ask("actors"),
    }


async def _or_error(ask: Callable[[], Awaitable[str]]) -> str:
    try:
        return await ask()
    except Exception as error:  # noqa: BLE001 - what helps to find a fault must not be one
        return f"{type(error).__name__}: {error}\n"


def _given(text: str) -> Callable[[], Awaitable[str]]:
    async def give() -> str:
        return text

    return give


async def _dumped(found: Awaitable[Any]) -> str:
    return _json(await found)


def _json(value: Any) -> str:
    return json.dumps(_bare(value), indent=1, sort_keys=True, default=str) + "\n"


def _bare(value: Any) -> Any:
    """Leave out what nobody reads, and values of pods' environment variables, which may be secrets."""
    if isinstance(value, dict):
        bare = {key: _bare(each) for key, each in value.items() if key != "managedFields"}
        if isinstance(value.get("env"), list):
            bare["env"] = [
                {**each, "value": "(hidden)"} if isinstance(each, dict) and "value" in each else each
                for each in value["env"]
            ]
        return bare
    return [_bare(each) for each in value] if isinstance(value, list) else value


def _refuse(options: ClusterOptions) -> None:
    for name in ("install", "old"):
        if getattr(options, name):
            raise Unsupported(f"launcher kuberay has no use for --{name}: images hold what pods need")


def _with_message(info: ClusterInfo, message: str) -> ClusterInfo:
    from dataclasses import replace

    return replace(info, message=message)


def _title(manifest: Object) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _name(live: Object) -> str:
    return str(live["metadata"]["name"])


def _target(live: Object) -> str:
    role = (live["metadata"].get("labels") or {}).get(ROLE)
    return f"clusters.{role}" if role else ""
