"""A cluster at its hosts: looks at what is there, starts what is missing, ends what was started."""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollhook.errors import LauncherError, UsageError
from rollhook_ray import clusters_node
from rollhook_ray.cluster_keys import ClusterKeys
from rollhook_ray.clusters_plan import HEAD, Node, dashboard_host, is_loopback, on, plan_nodes, start_request
from rollhook_ray.clusters_record import Record
from rollhook_ray.ssh import HostError, Machine, SshMachine, local_python

#: a progress line is due when something takes longer
SAY_SECONDS = 2.0
PROBE_SECONDS = 60.0
#: what Ray says when a node has not come up within its own limit, which no setting changes
_SLOW = "timed out during startup"
INSTALL_SECONDS = 1800.0
Say = Callable[[str], None]
#: what is looked for as older deployments
Wanted = dict[str, Any]


class Site:
    """The hosts of a cluster, with what each has answered. Nothing is contacted by the constructor."""

    def __init__(self, keys: ClusterKeys, record: Record, token: str | None, say: Say) -> None:
        self.keys = keys
        self.record = record
        self.say = say
        self._token = token
        self.nodes = plan_nodes(keys, nonce=record.nonce, resolve=_resolve, cpus=_cpus())
        self.machines = {node.host: _machine(keys, node) for node in self.nodes}
        old = ClusterKeys.model_validate(record.keys)
        for host in record.hosts:  # some may no longer be in the recipe
            gone = Node("", host, host, "", old.python or "python3", (), {}, {}, 0)
            self.machines.setdefault(host, _machine(old, gone))
        self.seen: dict[str, dict[str, Any]] = {}
        self.unreachable: dict[str, str] = {}

    async def look(self, old: Wanted | None = None) -> None:
        """Ask every host what is there: `seen`, or `unreachable` with the reason."""

        async def ask(host: str, machine: Machine) -> None:
            nodes = on(self.nodes, host)
            request = {
                "do": "probe",
                "cluster": self.keys.name,
                "nonce": self.record.nonce,
                "ports": sorted({port for node in nodes for port in node.ports}),
                "addresses": [node.address for node in nodes],
                "temp_root": self.keys.temp_root,
                "old": old,
            }
            try:
                self.seen[host] = await machine.call(request, seconds=PROBE_SECONDS)
                self.unreachable.pop(host, None)
            except HostError as error:
                self.unreachable[host] = str(error)

        await self._told("looking at", {called(h): ask(h, m) for h, m in self.machines.items()})

    def _runs(self, node: Node) -> bool:
        return self.pid(node) is not None

    def pid(self, node: Node) -> int | None:
        """Return the keeper of a node of this cluster that runs."""
        there = self.seen.get(node.host, {}).get("nodes", {}).get(node.name, {})
        return there.get("pid") if there.get("nonce") == self.record.nonce else None

    def old(self) -> list[tuple[str, dict[str, Any]]]:
        """Return older deployments, each with its host; every one once, also where hosts are one machine."""
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for host, seen in self.seen.items():
            for each in seen["old"] or ():
                found.setdefault(json.dumps([place(seen), each]), (host, each))
        return list(found.values())

    async def remove_old(self, old: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """Remove older deployments that were named, and nothing else."""
        removed = []
        for host in dict.fromkeys(host for host, _ in old):
            named = [each for where, each in old if where == host]
            request = {"do": "remove_old", "old": named, "stop_seconds": self.keys.stop_seconds}
            seconds = PROBE_SECONDS + len(named) * (self.keys.stop_seconds + clusters_node.KILL_SECONDS)
            for text in await self._call(host, request, seconds=seconds):
                removed.append(f"removed on {called(host)}: {text}")
        return removed

    async def install(self) -> None:
        """Put the packages on each host that a node is for."""
        keys = self.keys.install
        constraints = ""
        if keys.constraints is not None:
            try:
                constraints = await asyncio.to_thread(_read, keys.constraints)
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(
                    f"launcher.cluster.install.constraints: {keys.constraints} cannot be read ({error})"
                ) from error
        packages = [_pinned(each, constraints) for each in keys.packages]
        request = {
            "do": "install",
            "packages": packages,
            "constraints": constraints,
            "options": list(keys.options),
        }
        # one Python of one machine once, however often it is named
        once = {(*place(self.seen[n.host]), self.machines[n.host].python): n.host for n in self.nodes}
        hosts = list(once.values())
        for host in hosts:
            self.say(f"installing {', '.join(packages)} on {called(host)}")
        work = {called(h): self._call(h, request, seconds=INSTALL_SECONDS, say=self.say) for h in hosts}
        await self._told("installing on", work)

    async def up(self, *, wait: bool, timeout: float, recreate: bool) -> None:
        """Start what does not run, the head first; what runs is kept."""
        deadline = time.monotonic() + timeout
        changed = [n for n in self.nodes if self._runs(n) and self._spec(n) != n.spec(self.keys)]
        names = {node.name for node in self.nodes}
        surplus = {name for seen in self.seen.values() for name in self._ours(seen)} - names
        surplus |= self._moved()
        if (changed or surplus) and not recreate:
            other = [f"{node.name} runs with other keys than the recipe's" for node in changed]
            other += [f"{name} runs where the recipe does not have it any more" for name in sorted(surplus)]
            raise LauncherError(f"{'; '.join(other)}; --recreate replaces what differs", kind="user")
        head = self.nodes[0]
        ends = {node.name for node in changed} | surplus
        if not self._runs(head) or head.name in ends:
            ends |= {
                name for seen in self.seen.values() for name in self._ours(seen)
            }  # workers follow their head
        if ends:
            self.say(f"ending {', '.join(sorted(ends))} first")
            await self.down(ends)
            await self.look()
        await self._start(head, wait=True, deadline=deadline)
        by_place: dict[tuple[str, ...], list[Node]] = {}
        for node in self.nodes[1:]:
            by_place.setdefault(place(self.seen[node.host]), []).append(node)
        failed: dict[str, str] = {}

        async def start_in_turn(nodes: Sequence[Node]) -> None:
            for node in nodes:  # raylets that start together on one machine race for their sockets
                try:
                    await self._start(node, wait=wait, deadline=deadline)
                except LauncherError as error:
                    failed[node.name] = str(error)

        await asyncio.gather(*(start_in_turn(nodes) for nodes in by_place.values()))
        late: dict[str, str] = {}
        if wait:
            missing = await self.missing(max(1.0, deadline - time.monotonic()), without=failed)
            late = {name: await self._why_missing(name) for name in missing}
        if failed or late:
            kind = LauncherError if failed else TimeoutError
            failed |= late
            up = [node.name for node in self.nodes if node.name not in failed]
            raise kind(
                f"cluster {self.keys.name} lacks {', '.join(failed)}; {', '.join(up)} "
                f"{'is' if len(up) == 1 else 'are'} up and kept: `rollhook cluster up` again completes it, "
                "`rollhook cluster down` ends it\n" + "\n".join(failed.values())
            )

    async def _start(self, node: Node, *, wait: bool, deadline: float, again: bool = True) -> None:
        if self._runs(node):
            self.say(f"{node.name} on {called(node.host)} runs already (process {self.pid(node)})")
            return
        request = start_request(self.keys, node, self.record.nonce)
        left = max(1.0, min(self.keys.start_seconds, deadline - time.monotonic()))
        request |= {"token": self._token, "from": _me(), "wait": wait, "seconds": left}
        began = time.monotonic()
        self.say(f"{node.name}: starting on {called(node.host)} at {node.address}")
        try:
            work = self._call(node.host, request, seconds=left + PROBE_SECONDS)
            result = (await self._told("waiting for", {node.name: work}))[0]
        except HostError as error:
            if again and _SLOW in str(error) and time.monotonic() < deadline:
                self.say(f"{node.name}: Ray gave its start 30 s, which was too short; once more")
                await self._start(node, wait=wait, deadline=deadline, again=False)
                return
            raise LauncherError(f"{node.name} on {called(node.host)}: {error}") from error
        how = "up" if wait else "started"
        self.say(f"{node.name}: {how} after {time.monotonic() - began:.1f} s (process {result['pid']})")

    async def missing(self, seconds: float, *, without: Mapping[str, str] | None = None) -> list[str]:
        """Return the nodes that have not joined the head within a time."""
        head = self.nodes[0]
        names = [node.name for node in self.nodes if node.name not in (without or {})]
        request = {
            "do": "await",
            "nodes": names,
            "dashboard": [dashboard_host(self.keys), self.keys.ports.dashboard],
            "seconds": seconds,
            "token": self._token,
        }
        work = self._call(head.host, request, seconds=seconds + PROBE_SECONDS, say=self.say)
        answer = (await self._told("waiting for all to join", {"": work}))[0]
        return list(answer["missing"])

    async def _why_missing(self, name: str) -> str:
        node = next(each for each in self.nodes if each.name == name)
        request = {"do": "log", "cluster": self.keys.name, "node": name}
        try:
            text = await self._call(node.host, request, seconds=PROBE_SECONDS)
        except HostError as error:
            text = f"    its log cannot be read: {error}"
        return f"{name} on {called(node.host)} has not joined; its log ends:\n{text}"

    async def down(self, only: set[str] | None = None) -> list[str]:
        """End nodes of this cluster, workers before the head, and return what was ended, a sentence each."""

        async def end(host: str, heads: bool) -> list[str]:
            names = sorted(self._ours(self.seen[host]))
            names = [n for n in names if (n == HEAD) == heads and (only is None or n in only)]
            if not names:
                return []
            request = {"do": "stop", "cluster": self.keys.name, "nonce": self.record.nonce, "nodes": names}
            seconds = PROBE_SECONDS + len(names) * (3 * self.keys.stop_seconds + clusters_node.KILL_SECONDS)
            ended = await self._call(host, request, seconds=seconds)
            return [_ended(host, each) for each in ended]

        done: list[str] = []
        for heads in (False, True):
            places: dict[tuple[str, ...], list[str]] = {}
            for host, seen in self.seen.items():
                # hosts that are one machine see the same nodes: one of them is asked
                view = (*place(seen), *sorted(seen["nodes"]), str(seen["uid"]))
                places.setdefault(view, []).append(host)
            work = {called(hosts[0]): end(hosts[0], heads) for hosts in places.values()}
            for each in await self._told("ending nodes on", work):
                done += each
        return done

    def _moved(self) -> set[str]:
        """Return the nodes that run on another machine than the recipe has them on."""
        there = {node.name: self.seen.get(node.host) for node in self.nodes}
        found = set()
        for seen in self.seen.values():
            for name in self._ours(seen):
                wanted = there.get(name)
                if wanted is not None and place(wanted) != place(seen) and seen["nodes"][name]["pid"]:
                    found.add(name)
        return found

    def _ours(self, seen: Mapping[str, Any]) -> list[str]:
        return [name for name, node in seen["nodes"].items() if node["nonce"] == self.record.nonce]

    def _spec(self, node: Node) -> str:
        return str(self.seen[node.host]["nodes"][node.name]["spec"])

    async def _call(
        self, host: str, request: dict[str, Any], *, seconds: float, say: Say | None = None
    ) -> Any:
        return await self.machines[host].call(request, seconds=seconds, say=say)

    async def _told(self, what: str, work: Mapping[str, Awaitable[Any]]) -> list[Any]:
        """Do several things at once, and say what is not done yet. The first error ends it."""
        began = time.monotonic()
        tasks = {name: asyncio.ensure_future(each) for name, each in work.items()}
        try:
            left = set(tasks.values())
            while left:
                done, left = await asyncio.wait(
                    left, timeout=SAY_SECONDS, return_when=asyncio.FIRST_EXCEPTION
                )
                for task in done:
                    task.result()
                if left and not done:
                    names = ", ".join(name for name, task in tasks.items() if task in left and name)
                    self.say(f"{f'{what} {names}'.strip()} ({time.monotonic() - began:.0f} s)")
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return [task.result() for task in tasks.values()]


def _machine(keys: ClusterKeys, node: Node) -> Machine:
    if not node.host:
        return Machine("", local_python(keys.python))
    return SshMachine(node.host, node.python, keys.ssh)


def called(host: str) -> str:
    """Return what a host is called in messages."""
    return host or "this machine"


def place(seen: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what tells the machine of a probe from others."""
    return (seen["boot"], seen["pids"], seen["net"])


def _me() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def _cpus() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _ended(host: str, each: Mapping[str, Any]) -> str:
    killed = f", {each['killed']} of them killed" if each["killed"] else ""
    what = f"{each['processes']} processes{killed}" if each["processes"] else "nothing of it ran any more"
    return f"ended {each['node']} on {called(host)} ({what})"


def _pinned(package: str, constraints: str) -> str:
    """Return a requirement; Ray without a version is that of this machine, where it has one."""
    import importlib.metadata
    import re

    if not re.fullmatch(r"ray(\[[\w,-]+\])?", package) or re.search(
        r"(?m)^ray(\[.*\])?\s*[=<>~!@]", constraints
    ):
        return package
    try:
        return f"{package}=={importlib.metadata.version('ray')}"
    except importlib.metadata.PackageNotFoundError:
        return package


def _resolve(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"{name} of launcher.cluster.hosts cannot be resolved here ({error.strerror}); "
            "give its entry an `address`"
        ) from error
    address = str(found[0][4][0])
    if is_loopback(address) and not is_loopback(name):
        raise UsageError(
            f"{name} of launcher.cluster.hosts is {address} here, where other hosts cannot reach it; "
            "give its entry an `address`"
        )
    return address


def _read(path: str) -> str:
    return Path(path).expanduser().read_text("utf-8")
