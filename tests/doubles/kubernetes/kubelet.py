"""Pods: what the scheduler and the kubelet do, as a script says, or with real processes.

A script is a JSON object; the first that matches a pod is for it:
    match      a part of "namespace/name" (absent: any)
    times      how many pods it is for (absent: all)
    run        whether the first container's command runs for real (absent: as the option `run`)
    pending    seconds before it starts; null: never (0)
    reason     why it waits meanwhile: Unschedulable, ImagePullBackOff, ... (ContainerCreating)
    unready    seconds that it runs before it is ready; null: never (0)
    dies       seconds after ready until its container ends by itself (absent: never)
    exit_code  with which it does (1)
    logs       lines of its log (none)
Seconds are the cluster's (see `Options.second`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from doubles.kubernetes import containers, resources
from doubles.kubernetes.containers import Container, NotYet
from doubles.kubernetes.store import Change, Key, Object, event, now
from doubles.kubernetes.world import World

_PODS = resources.named("pods")
_SCRIPT = {"match", "times", "run", "pending", "reason", "unready", "dies", "exit_code", "logs"}


@dataclass
class Log:
    """What a container has printed."""

    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, data: bytes) -> None:
        """Add to it."""
        self.data += data
        self._tell()

    def end(self) -> None:
        """Nothing follows."""
        self.ended = True
        self._tell()

    def _tell(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()


@dataclass(eq=False)
class Run:
    """A pod that is there."""

    key: Key
    uid: str
    task: asyncio.Task[Any] | None = None
    log: Log = field(default_factory=Log)
    machine: Container | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: asyncio.subprocess.Process | None = None
    #: where a port of the pod really is
    ports: dict[int, int] = field(default_factory=dict)
    #: URLs that answer once it is ready
    probes: list[str] = field(default_factory=list)
    restarts: int = 0
    #: it was made to end, and is not started again
    crashed: bool = False


class Kubelet:
    """All pods."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.volumes = containers.Volumes(world.store, world.directory)
        self.runs: dict[str, Run] = {}
        self.scripts: list[dict[str, Any]] = []
        #: ports for pods to come, by (namespace, name): set by who makes them
        self.ports: dict[tuple[str, str], dict[int, int]] = {}
        #: URLs that must answer before a pod is ready, likewise
        self.probes: dict[tuple[str, str], list[str]] = {}
        #: pods to come whose command runs for real, likewise
        self.real: set[tuple[str, str]] = set()
        self._addresses = itertools.count(2)
        world.store.listeners.append(self._changed)
        world.closing.append(self.aclose)

    def add_script(self, script: dict[str, Any]) -> None:
        """Add a script; KeyError for a word that is not known."""
        if unknown := set(script) - _SCRIPT:
            raise KeyError(", ".join(sorted(unknown)))
        self.scripts.append(dict(script))

    def run_of(self, pod: Object) -> Run | None:
        """Return what runs for a pod."""
        return self.runs.get(pod["metadata"]["uid"])

    async def kill(self, namespace: str, name: str, code: int = 137) -> None:
        """End a pod's processes as a crash of its container would."""
        await self._crash(self.find(namespace, name), code)

    def find(self, namespace: str, name: str) -> Run:
        """Return what runs for a pod, by name; ApiError 404."""
        return self.runs[self.world.store.get(_PODS, namespace, name)["metadata"]["uid"]]

    async def _crash(self, run: Run, code: int) -> None:
        run.crashed = True
        if run.machine is not None:
            await run.machine.stop()
        if run.process is None:
            self._end(run, code)

    def _changed(self, change: Change) -> None:
        resource, _, _ = change.key
        if resource is not _PODS:
            return
        uid = change.object["metadata"]["uid"]
        if change.type == "ADDED":
            run = self.runs[uid] = Run(change.key, uid)
            run.task = self.world.spawn(self._live(run))
        elif change.type == "DELETED" and (gone := self.runs.pop(uid, None)) is not None:
            self.world.spawn(self._clear(gone, change.object))
        elif "deletionTimestamp" in change.object["metadata"] and (run := self.runs.get(uid)) is not None:
            self.world.spawn(self._terminate(run))

    def _script(self, namespace: str, name: str) -> dict[str, Any]:
        for script in self.scripts:
            if script.get("match", "") in f"{namespace}/{name}" and script.get("times", 1) > 0:
                if "times" in script:
                    script["times"] -= 1
                return script
        return {}

    # One life.

    async def _live(self, run: Run) -> None:
        _, namespace, name = run.key
        script = self._script(namespace, name)
        run.ports = self.ports.pop((namespace, name), {})
        run.probes = self.probes.pop((namespace, name), [])
        pod = self.world.store.get(*run.key)
        container = containers.container_of(pod)
        pending = script.get("pending", 0)
        if pending != 0:
            self._wait_for(run, script.get("reason", "ContainerCreating"), "as the script says")
            await (asyncio.Event().wait() if pending is None else self.world.sleep(pending))
        while True:
            try:
                env = containers.environment(self.world.store, pod, container)
                list(self.volumes.mounts(pod, container))
                break
            except NotYet as missing:
                self._wait_for(run, *missing.args)
                await self.world.store.wait(1.0)
        for line in script.get("logs", []):
            run.log.write(line.encode() + b"\n")
        real = script.get("run", self.world.options.run or (namespace, name) in self.real)
        self._status(run, "Running", ready=False)
        if real:
            await self._start(run, pod, container, env)
        unready = script.get("unready", 0)
        await (asyncio.Event().wait() if unready is None else self.world.sleep(unready))
        if real:
            await self._probed(run)
        self._status(run, "Running", ready=True)
        if "dies" in script:
            await self.world.sleep(script["dies"])
            await self._crash(run, script.get("exit_code", 1))

    async def _start(self, run: Run, pod: Object, container: Object, env: dict[str, str]) -> None:
        machine = await self.machine(run, pod, container, env)
        argv = [
            *(container.get("command") or ["/bin/sh", "-c", "exec sleep infinity"]),
            *(container.get("args") or []),
        ]
        run.process = await machine.spawn(argv, merged=True)
        self.world.spawn(self._pump(run))

    async def machine(self, run: Run, pod: Object, container: Object, env: dict[str, str]) -> Container:
        """Return the machine of a pod, started when it is first asked for."""
        async with run.starting:
            if run.machine is None:
                run.machine = await containers.start(self.volumes, pod, container, env)
        return run.machine

    async def _pump(self, run: Run) -> None:
        assert run.process is not None
        assert run.process.stdout is not None
        while data := await run.process.stdout.read(65536):
            run.log.write(data)
        code = await run.process.wait()
        if run.task is not None:
            run.task.cancel()
        pod = self.world.store.find(*run.key)
        again = pod is not None and pod["spec"].get("restartPolicy") == "Always" and run.uid in self.runs
        if run.crashed or not again or pod is None or "deletionTimestamp" in pod["metadata"]:
            self._end(run, code if code >= 0 else 128 - code)
        else:
            run.task = self.world.spawn(self._again(run, pod, code))

    async def _again(self, run: Run, pod: Object, code: int) -> None:
        run.restarts += 1
        self._end(run, code, last=False)
        async with run.starting:
            if run.machine is not None:
                await run.machine.stop()
                run.machine = None
        await self.world.sleep(10)
        container = containers.container_of(pod)
        await self._start(run, pod, container, containers.environment(self.world.store, pod, container))
        self._status(run, "Running", ready=False)
        await self._probed(run)
        self._status(run, "Running", ready=True)

    async def _probed(self, run: Run) -> None:
        urls = list(run.probes)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5)) as client:
            while urls:
                try:
                    async with client.get(urls[0]) as answer:
                        if answer.status == 200:
                            urls = urls[1:]
                            continue
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(0.1)

    # Its status.

    def _conditions(self, pod: Object, **values: bool) -> list[Object]:
        had = {each["type"]: each for each in pod.get("status", {}).get("conditions") or []}
        for kind, value in values.items():
            text = "True" if value else "False"
            if had.get(kind, {}).get("status") != text:
                unready = not value and kind in ("Ready", "ContainersReady")
                why = {"reason": "ContainersNotReady"} if unready else {}
                had[kind] = {"type": kind, "status": text, "lastTransitionTime": now(), **why}
        return list(had.values())

    def _wait_for(self, run: Run, reason: str, message: str) -> None:
        pod = self.world.store.find(*run.key)
        if pod is None:
            return
        if reason == "Unschedulable":
            conditions = self._conditions(pod, PodScheduled=False)
            conditions[0] |= {"reason": reason, "message": message}
            self.world.store.set_status(run.key, {"phase": "Pending", "conditions": conditions})
            event(self.world.store, pod, "Warning", "FailedScheduling", message, "default-scheduler")
            return
        state = {"waiting": {"reason": reason, "message": message}}
        statuses = [self._container(each, state, False) for each in pod["spec"]["containers"]]
        status = {
            "phase": "Pending",
            "conditions": self._conditions(
                pod, PodScheduled=True, Initialized=True, ContainersReady=False, Ready=False
            ),
            "containerStatuses": statuses,
        }
        if reason != "ContainerCreating" and status != {k: pod.get("status", {}).get(k) for k in status}:
            event(self.world.store, pod, "Warning", "Failed", f"{reason}: {message}", "kubelet")
        self.world.store.set_status(run.key, status)

    def _container(self, each: Object, state: Object, ready: bool) -> Object:
        image = {"image": each["image"], "imageID": ""}
        started = "running" in state
        return {
            "name": each["name"],
            "ready": ready,
            "started": started,
            "restartCount": 0,
            "state": state,
            **image,
        }

    def _status(self, run: Run, phase: str, ready: bool) -> None:
        pod = self.world.store.find(*run.key)
        if pod is None:
            return
        statuses = [
            self._container(each, {"running": {"startedAt": now()}}, ready)
            for each in pod["spec"]["containers"]
        ]
        for each in statuses:
            each["restartCount"] = run.restarts
        had = pod.get("status", {})
        number = next(self._addresses)
        address = had.get("podIP") or f"10.244.{number >> 8}.{number & 255}"
        status = {
            "phase": phase,
            "conditions": self._conditions(
                pod, PodScheduled=True, Initialized=True, ContainersReady=ready, Ready=ready
            ),
            "containerStatuses": statuses,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "hostIP": "127.0.0.1",
            "startTime": had.get("startTime") or now(),
            "qosClass": "BestEffort",
        }
        self.world.store.set_status(run.key, status)
        if ready:
            event(self.world.store, pod, "Normal", "Started", "Started container", "kubelet")

    def _end(self, run: Run, code: int, *, last: bool = True) -> None:
        if last:
            run.log.end()
        pod = self.world.store.find(*run.key)
        if pod is None or run.uid not in self.runs:
            return
        reason = "Completed" if code == 0 else "Error"
        again = pod["spec"].get("restartPolicy") == "Always"
        state: Object = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now()}}
        if again:
            state = {
                "waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting failed container"}
            }
        phase = "Running" if again else ("Succeeded" if code == 0 else "Failed")
        statuses = [self._container(each, state, False) for each in pod["spec"]["containers"]]
        if again:
            for each in statuses:
                each["lastState"] = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now()}}
                each["restartCount"] = max(1, run.restarts)
        conditions = self._conditions(pod, ContainersReady=False, Ready=False)
        status = {"phase": phase, "containerStatuses": statuses, "conditions": conditions}
        self.world.store.set_status(run.key, status)

    # Its end.

    async def _terminate(self, run: Run) -> None:
        pod = self.world.store.find(*run.key)
        if pod is None:
            return
        grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
        if run.process is not None and run.process.returncode is None and run.machine is not None:
            run.machine.kill(run.process, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.2, grace * self.world.options.second)):
                    await run.process.wait()
        if self.world.store.find(*run.key) is not None:
            self.world.store.delete(run.key, grace=0)

    async def _clear(self, run: Run, pod: Object) -> None:
        if run.task is not None:
            run.task.cancel()
        async with run.starting:
            if run.machine is not None:
                await run.machine.stop()
        run.log.end()
        await containers.remove(self.volumes, pod)

    async def aclose(self) -> None:
        """End every process."""
        runs = list(self.runs.values())
        self.runs.clear()
        for run in runs:
            if run.task is not None:
                run.task.cancel()
            if run.machine is not None:
                await run.machine.stop()
