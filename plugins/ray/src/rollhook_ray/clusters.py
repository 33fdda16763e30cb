"""Ray clusters that `rollhook cluster up` makes: on this machine, or on hosts that ssh reaches."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from rollhook.component import BuildContext
from rollhook.errors import LauncherError, RollhookError, Unsupported, UsageError
from rollhook.launcher import ClusterInfo, ClusterOptions, ClusterPlan, Clusters, ClusterState
from rollhook_ray import clusters_node
from rollhook_ray.cluster_keys import ClusterKeys
from rollhook_ray.clusters_plan import dashboard_host, is_loopback, plan_nodes, start_request
from rollhook_ray.clusters_problems import problems
from rollhook_ray.clusters_record import (
    Record,
    new_record,
    read_record,
    record_path,
    token_path,
    write_record,
)
from rollhook_ray.clusters_site import Say, Site, called
from rollhook_ray.compose import COMPOSE_FILE, render

_NONCE = "NONCE"


class RayClusters(Clusters):
    """The side of the launcher that keeps clusters; a recipe has one, whose target is its name."""

    config: Any
    context: BuildContext

    def own_token(self, address: str) -> str | None:
        """Return a reference to the token of the recipe's cluster, if this machine has it and it is meant.

        A dashboard on a loopback address is: there is the cluster's own, or the one that ssh forwards.
        """
        path = token_path(self._keys.name)
        meant = is_loopback(urlsplit(address).hostname or "")
        return f"file:{path}" if meant and self._keys.auth == "token" and path.exists() else None

    def cluster_targets(self) -> Sequence[str]:
        """Return the name of the cluster."""
        return [self._keys.name]

    def cluster_plan(self, targets: Sequence[str] = ()) -> ClusterPlan:
        """Return how each node is started, or the docker-compose project."""
        keys = self._check(targets)
        if keys.by == "compose":
            up = ["docker", "compose", "-f", COMPOSE_FILE, "up", "--detach", "--wait"]
            notes = [
                f"rendered only: write the file, with a token in {keys.name}.token beside it, "
                "and run the command there",
            ]
            return ClusterPlan("ray", [keys.name], files=render(keys), commands=[up], notes=notes)
        nodes = plan_nodes(keys, nonce=_NONCE)
        requests = {node.name: start_request(keys, node, _NONCE) for node in nodes}
        notes = [f"{node.name} on {called(node.host)}, address {node.address}" for node in nodes]
        if keys.by == "local" and keys.cpus_per_worker is None:
            notes.append("each worker gets its share of this machine's CPUs")
        how = "by ssh" if keys.by == "ssh" else "on this machine"
        notes.append(
            f"each request is answered {how} by a program that keeps the command in a session of its own"
        )
        if keys.auth == "token":
            notes.append("Ray's token goes along on standard input, into a file that only its user can read")
        return ClusterPlan(
            "ray", [keys.name], commands=[node.argv for node in nodes], requests=requests, notes=notes
        )

    async def cluster_up(
        self, targets: Sequence[str], options: ClusterOptions, say: Callable[[str], None]
    ) -> Sequence[ClusterInfo]:
        """Bring the cluster up, or complete it; what runs is kept."""
        keys = self._live(targets)
        async with _claimed(keys.name):
            record = read_record(keys.name) or new_record(keys)
            token = self._token(keys, make=True)
            site = await asyncio.to_thread(Site, keys, record, token, say)
            await site.look()
            if options.install and not site.unreachable:
                await site.install()
                await site.look()
            if found := problems(site):
                raise LauncherError(
                    f"cluster {keys.name} cannot be brought up, and nothing was started:\n"
                    + "\n".join(f"- {each}" for each in found),
                    kind="user",
                )
            head = site.nodes[0]
            record.hosts = list(dict.fromkeys([*record.hosts, *(node.host for node in site.nodes)]))
            record.keys = keys.model_dump(mode="json")
            record.address = f"{head.address}:{keys.ports.gcs}"
            record.dashboard = f"{dashboard_host(keys)}:{keys.ports.dashboard}"
            write_record(record)  # before anything is started: who finds it knows what to look for
            await site.up(wait=options.wait, timeout=options.timeout, recreate=options.recreate)
        info = ClusterInfo(
            keys.name, keys.name, "ready" if options.wait else "pending", record.address,
            f"http://{record.dashboard}", len(site.nodes), _how_to_use(keys),
        )  # fmt: skip
        return [info]

    async def cluster_down(
        self, targets: Sequence[str], options: ClusterOptions, say: Callable[[str], None]
    ) -> Sequence[str]:
        """End exactly what `cluster_up` started; with `old`, after confirmation, older deployments too."""
        keys = self._live(targets)
        done: list[str] = []
        async with _claimed(keys.name):
            record = read_record(keys.name)
            if record is None and not options.old:
                say(f"no cluster {keys.name} was brought up from this machine; --old finds others")
                return []
            # ended as it was brought up: the recipe may have changed
            was = ClusterKeys.model_validate(record.keys) if record else keys
            site = await asyncio.to_thread(Site, was, record or new_record(keys), None, say)
            await site.look(_wanted(keys) if options.old else None)
            if record is not None:
                done += await site.down()
                if not site.unreachable:
                    record_path(keys.name).unlink(missing_ok=True)
                    token_path(keys.name).unlink(missing_ok=True)
                    done = done or [f"nothing of cluster {keys.name} ran any more"]
            if options.old:
                done += await self._remove_old(site, options, say)
        if site.unreachable:
            reasons = "; ".join(f"host {called(host)}: {reason}" for host, reason in site.unreachable.items())
            ended = f" ({'; '.join(done)})" if done else ""
            raise LauncherError(f"not all of cluster {keys.name} was ended{ended}: {reasons}; try again")
        clusters_node.forget(keys.name)
        return done

    async def cluster_status(self, targets: Sequence[str] = ()) -> Sequence[ClusterInfo]:
        """Return how the recipe's cluster stands."""
        keys = self._check(targets)
        record = read_record(keys.name)
        if record is None:
            message = "rendered only, see rollhook cluster up --dry-run" if keys.by == "compose" else ""
            return [ClusterInfo(keys.name, keys.name, "absent", message=message)]
        return [await self._info(record)]

    async def clusters(self) -> Sequence[ClusterInfo]:
        """Return the clusters that were brought up from this machine, and those of which it has nodes."""
        found = []
        for name in clusters_node.known():
            try:
                record = read_record(name)
            except RollhookError as error:  # of one, which must not hide the others
                found.append(ClusterInfo(name, "", "unknown", message=str(error)))
                continue
            if record is not None:
                found.append(await self._info(record))
            elif states := clusters_node.read_states(name):
                first = next(iter(states.values()))
                alive = [name for name, state in states.items() if clusters_node.keeper_of(state)]
                message = f"nodes here: {', '.join(alive) or 'none that runs'}; brought up by {first['from']}"
                found.append(ClusterInfo(name, "", "unknown", nodes=len(alive), message=message))
        return found

    @contextlib.asynccontextmanager
    async def dashboard(self, target: str | None, port: int) -> AsyncIterator[str]:
        """Give the dashboard's address on this machine, forwarded by ssh where the head is elsewhere."""
        keys = self._check([target] if target else [])
        record = read_record(keys.name)
        if record is None:
            raise LauncherError(f"no cluster {keys.name} was brought up from this machine", kind="user")
        was = ClusterKeys.model_validate(record.keys)
        site = await asyncio.to_thread(Site, was, record, None, lambda line: None)
        address, _, remote = record.dashboard.rpartition(":")
        async with site.machines[site.nodes[0].host].forward(address, int(remote), port) as local:
            yield f"http://{local}"

    async def _info(self, record: Record) -> ClusterInfo:
        keys = ClusterKeys.model_validate(record.keys)
        site = await asyncio.to_thread(Site, keys, record, self._token(keys, make=False), lambda line: None)
        await site.look()
        runs = [node.name for node in site.nodes if site.pid(node) is not None]
        away = [f"host {called(host)}: {reason}" for host, reason in site.unreachable.items()]
        missing: list[str] = []
        state: ClusterState = "unknown" if away else "stopped"
        message = "; ".join(away)
        if site.nodes[0].name in runs:
            joined = set(runs) - set(await site.missing(0.0))
            missing = [n.name for n in site.nodes if n.name not in joined]
            state = "degraded" if missing else "ready"
            message = "; ".join([*(f"{name} is missing" for name in missing), *away])
        elif runs:
            state, message = "degraded", "; ".join(["the head does not run", *away])
        raw = {
            "since": record.since,
            "nodes": [
                {"name": n.name, "host": called(n.host), "address": n.address, "process": site.pid(n),
                 "joined": state in ("ready", "degraded") and n.name in runs and n.name not in missing}
                for n in site.nodes
            ],
        }  # fmt: skip
        count = len(runs) - len(set(missing) & set(runs))
        dashboard = f"http://{record.dashboard}"
        return ClusterInfo(record.name, record.name, state, record.address, dashboard, count, message, raw)

    async def _remove_old(self, site: Site, options: ClusterOptions, say: Say) -> list[str]:
        """Name older deployments, and remove them if that is confirmed."""
        old = site.old()
        if not old:
            say("no older deployment is on the hosts")
            return []
        for host, each in old:
            say(f"older deployment on {called(host)}: {each['text']}")
        what = "this older deployment" if len(old) == 1 else f"these {len(old)} older deployments"
        if not options.confirm(f"Remove {what}?"):
            return [f"{what} kept"]
        return await site.remove_old(old)

    @property
    def _keys(self) -> ClusterKeys:
        keys: ClusterKeys = self.config.cluster
        return keys

    def _check(self, targets: Sequence[str]) -> ClusterKeys:
        if unknown := [each for each in targets if each != self._keys.name]:
            raise UsageError(f"there is no target {unknown[0]}; the recipe's cluster is {self._keys.name}")
        return self._keys

    def _live(self, targets: Sequence[str]) -> ClusterKeys:
        keys = self._check(targets)
        if keys.by == "compose":
            raise Unsupported(
                "a docker-compose project is rendered and not brought up: "
                "`rollhook cluster up RECIPE --dry-run` gives its file, `docker compose up` starts it"
            )
        return keys

    def _token(self, keys: ClusterKeys, *, make: bool) -> str | None:
        """Return the token: the recipe's if it names one, else the cluster's own; `make` one if need be."""
        if keys.auth == "none":
            return None
        if self.config.token is not None:
            return self.context.secret(str(self.config.token))
        path = token_path(keys.name)
        if not path.exists():
            if not make:
                return None
            clusters_node.directory(keys.name)
            clusters_node.write(str(path), secrets.token_hex(32))
        return path.read_text("ascii").strip()


def _wanted(keys: ClusterKeys) -> dict[str, Any]:
    return {"sessions": keys.old_sessions, "containers": list(keys.old_containers)}


def _how_to_use(keys: ClusterKeys) -> str:
    if keys.auth == "none":
        return "without authentication"
    return f"its token is in {token_path(keys.name)} (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN_PATH)"


@contextlib.asynccontextmanager
async def _claimed(name: str) -> AsyncIterator[None]:
    """Let one process of this machine at a time bring a cluster up or end it; a killed one holds nothing."""
    with clusters_node.open_lock(name) as stream:
        deadline = time.monotonic() + 2
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LauncherError(
                        f"another `rollhook cluster up` or `down` of {name} is at work here; wait for it"
                    ) from None
                await asyncio.sleep(0.1)
        yield
