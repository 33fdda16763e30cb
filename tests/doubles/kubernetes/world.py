"""What the parts of the double share: objects, options, who may do what, faults and the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from doubles.faults import Faults
from doubles.kubernetes import admission, resources
from doubles.kubernetes.resources import Resource
from doubles.kubernetes.store import Object, Store

USER = "rollhook-tester"


@dataclass
class Options:
    """What a test may set through the control port; times in seconds."""

    #: how long a second of the cluster's own timers lasts (ttl, deadlines, polls, grace)
    second: float = 0.01
    #: a key other than the run's is refused; False refuses every key
    accept_key: bool = True
    #: what the user may not do: {verb, resource, group, namespace}, an absent one matches all
    deny: list[dict[str, str]] = field(default_factory=list)
    #: items on a page of a list, at most, whatever `limit` says; None for as many as asked
    page: int | None = None
    #: seconds between bookmarks of a watch
    bookmark: float = 0.5
    #: commands of pods run for real, but where a script says otherwise (see `kubelet`)
    run: bool = False
    #: clusters are real Ray clusters: pods that run `ray start` (see `ray_pods`)
    ray: bool = False
    #: KubeRay's operator is there
    operator: bool = True


@dataclass
class World:
    """One run of the double."""

    directory: Path
    key: str
    options: Options = field(default_factory=Options)
    faults: Faults = field(default_factory=Faults)
    store: Store = field(default_factory=Store)
    #: what was asked: see `doubles.faults.watch`
    journal: list[dict[str, Any]] = field(default_factory=list)
    #: base URL of each surface
    urls: dict[str, str] = field(default_factory=dict)
    #: what wants to be ended with the double
    closing: list[Any] = field(default_factory=list)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name in ("default", "kube-system"):
            self.add_namespace(name)

    def add_namespace(self, name: str) -> None:
        """Make a namespace with its service account, where it is not there."""
        spaces = resources.named("namespaces")
        if self.store.find(spaces, "", name) is None:
            body = {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}},
                "spec": {"finalizers": ["kubernetes"]},
                "status": {"phase": "Active"},
            }
            self.store.create(spaces, "", body)
        self.complete_namespace(name)

    def complete_namespace(self, name: str) -> None:
        """Make what every namespace has."""
        accounts = resources.named("serviceaccounts")
        if self.store.find(accounts, name, "default") is None:
            body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
            self.store.create(accounts, name, body)

    def admit(self, resource: Resource, body: Object) -> Object:
        """Return an object of a controller's as it would be stored."""
        made = deepcopy(body)
        admission.admit(resource, made, None)
        return made

    def set_options(self, values: dict[str, Any]) -> None:
        """Set options by name; KeyError for one that is not there."""
        known = {each.name for each in fields(Options)}
        if unknown := set(values) - known:
            raise KeyError(", ".join(sorted(unknown)))
        for name, value in values.items():
            setattr(self.options, name, value)

    def allowed(self, user: str, verb: str, group: str, resource: str, namespace: str) -> bool:
        """Whether a user may do something: the tester all but what is denied, an account if it is bound."""
        asked = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        if user == USER:
            return not any(
                all(asked[k] == v or v == "*" for k, v in rule.items()) for rule in self.options.deny
            )
        _, _, account = user.partition("system:serviceaccount:")
        home, _, name = account.partition(":")
        for each in self.store.list(resources.named("rolebindings"), namespace or home):
            subjects = [
                (s.get("kind"), s.get("namespace"), s.get("name")) for s in each.get("subjects") or []
            ]
            role = each.get("roleRef", {}).get("name")
            if ("ServiceAccount", home, name) in subjects and role in ("edit", "admin", "cluster-admin"):
                return True
        return False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside the requests; its failure is a line of the journal."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.journal.append({"surface": "double", "failed": repr(error), "at": time.time()})

    async def collect(self) -> None:
        """Collect garbage for ever: what has lost its owners, and what was in a namespace that is gone."""
        spaces = resources.named("namespaces")
        while True:
            await self.store.wait(1.0)
            self.store.collect()
            for key in list(self.store.objects):
                gone = key[1] and self.store.find(spaces, "", key[1]) is None
                if gone and "deletionTimestamp" not in self.store.objects[key]["metadata"]:
                    self.store.delete(key, grace=0)

    async def sleep(self, seconds: float) -> None:
        """Wait for so many of the cluster's seconds."""
        await asyncio.sleep(seconds * self.options.second)

    async def aclose(self) -> None:
        """End everything."""
        for close in reversed(self.closing):
            await close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
