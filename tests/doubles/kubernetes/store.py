"""The objects, their versions and their history; deletion with finalizers, owners and grace."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from doubles.kubernetes import errors, patch, resources
from doubles.kubernetes.errors import ApiError
from doubles.kubernetes.resources import Resource

Object = dict[str, Any]
Key = tuple[Resource, str, str]
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


def now() -> str:
    """The time as metadata has it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def suffix(length: int = 5) -> str:
    """Return a random ending of a generated name."""
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


@dataclass(frozen=True)
class Change:
    """One line of the history."""

    version: int
    type: str
    key: Key
    object: Object
    before: Object | None = None


@dataclass
class Store:
    """Everything that is there. All methods are synchronous; `wait` is how changes are followed."""

    objects: dict[Key, Object] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    version: int = 1000
    #: versions up to this one are forgotten: a watch from there is 410
    floor: int = 0
    #: called after each change
    listeners: list[Callable[[Change], None]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return an object, which is not to be changed; ApiError 404."""
        try:
            return self.objects[resource, namespace, name]
        except KeyError:
            raise errors.not_found(resource, name) from None

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return an object or None."""
        return self.objects.get((resource, namespace, name))

    def list(self, resource: Resource, namespace: str = "") -> list[Object]:
        """Return the objects of a kind, of a namespace or of all, in order of their names."""
        keys = [key for key in self.objects if key[0] is resource and namespace in ("", key[1])]
        return [self.objects[key] for key in sorted(keys, key=lambda key: key[1:])]

    def create(self, resource: Resource, namespace: str, body: Object, manager: str = "double") -> Object:
        """Add an object; ApiError 409 when its name is taken, 404 for an unknown namespace."""
        made = deepcopy(body)
        meta = made["metadata"] = {k: v for k, v in (made.get("metadata") or {}).items() if v is not None}
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"][:58] + suffix()
        if resource.namespaced:
            spaces = resources.named("namespaces")
            space = self.find(spaces, "", namespace)
            if space is None:
                raise errors.not_found(spaces, namespace)
            if "deletionTimestamp" in space["metadata"]:
                text = f"{resource.qualified} is forbidden: namespace {namespace} is being terminated"
                raise ApiError(403, text)
            meta["namespace"] = namespace
        key = (resource, namespace, meta["name"])
        if key in self.objects:
            raise errors.exists(resource, meta["name"])
        meta["uid"], meta["creationTimestamp"] = str(uuid.uuid4()), now()
        for name in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "resourceVersion"):
            meta.pop(name, None)
        if resource.generated:
            meta["generation"] = 1
        if "managedFields" not in meta:
            patch.note_update(resource, None, made, manager)
        return self._put("ADDED", key, made)

    def replace(self, key: Key, body: Object, *, manager: str = "double", subresource: str = "") -> Object:
        """Change an object: its status for subresource "status", else all but its status.

        ApiError 409 when the body's resourceVersion or uid is not the object's.
        """
        resource, _, name = key
        old = self.get(*key)
        new = deepcopy(body)
        meta = new.setdefault("metadata", {})
        was = old["metadata"]
        if meta.get("resourceVersion") not in (None, "", was["resourceVersion"]):
            raise errors.conflict(resource, name, errors.CHANGED)
        if meta.get("uid") not in (None, was["uid"]):
            told = (
                f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: {was['uid']}"
            )
            raise errors.conflict(resource, name, told)
        if subresource == "status":
            new = {**old, "status": new.get("status", {}), "metadata": {**was}}
        else:
            if resource.status:
                new.pop("status", None)
                if "status" in old:
                    new["status"] = old["status"]
            fixed = (
                "uid",
                "creationTimestamp",
                "generation",
                "deletionTimestamp",
                "deletionGracePeriodSeconds",
            )
            for each in (*fixed, "name", "namespace", "resourceVersion", "generateName"):
                meta.pop(each, None)
                if each in was:
                    meta[each] = was[each]
            if resource.generated and _without_status(new) != _without_status(old):
                meta["generation"] = was.get("generation", 1) + 1
        untold = meta.get("managedFields") in (None, was.get("managedFields"))
        if _bare(new) == _bare(old) and untold:
            return old
        if untold:
            patch.note_update(resource, old, new, manager, subresource)
        if "deletionTimestamp" in was and not new["metadata"].get("finalizers") and not _graceful(new):
            return self._take(key, new)
        return self._put("MODIFIED", key, new, old)

    def set_status(self, key: Key, status: Object) -> Object:
        """Set fields of an object's status; None removes one. Without effect on an object that is gone."""
        old = self.objects.get(key)
        if old is None:
            return {}
        return self.replace(key, {"status": patch.merge(old.get("status", {}), status)}, subresource="status")

    def edit(self, key: Key, change: Callable[[Object], None]) -> Object:
        """Change a copy of an object in place and store it."""
        new = deepcopy(self.get(*key))
        change(new)
        return self.replace(key, new)

    def delete(self, key: Key, *, policy: str = "Background", grace: float | None = None) -> Object:
        """Delete an object, or mark it while finalizers or a pod's grace hold it; ApiError 404."""
        old = self.get(*key)
        new = deepcopy(old)
        meta = new["metadata"]
        if policy == "Orphan":
            self._orphan(meta["uid"])
        if policy == "Foreground" and any(True for _ in self.dependents(meta["uid"])):
            meta["finalizers"] = list(dict.fromkeys([*meta.get("finalizers", []), "foregroundDeletion"]))
        if key[0].kind == "Pod":
            default = new.get("spec", {}).get("terminationGracePeriodSeconds", 30)
            grace = default if grace is None else grace
            if new.get("status", {}).get("phase") in ("Succeeded", "Failed") or "podIP" not in new.get(
                "status", {}
            ):
                grace = 0
            meta["deletionGracePeriodSeconds"] = min(grace, meta.get("deletionGracePeriodSeconds", grace))
        if not meta.get("finalizers") and not _graceful(new):
            return self._take(key, new)
        meta.setdefault("deletionTimestamp", now())
        if new == old:
            return old
        return self._put("MODIFIED", key, new, old)

    def dependents(self, uid: str) -> Iterator[Key]:
        """Yield the keys of objects that an owner owns."""
        for key, each in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in each["metadata"].get("ownerReferences") or []):
                yield key

    def collect(self) -> None:
        """Delete what has owners none of which is there; finish foreground deletions."""
        there = {each["metadata"]["uid"] for each in self.objects.values()}
        for key, each in list(self.objects.items()):
            meta = each["metadata"]
            owners = meta.get("ownerReferences") or []
            if key not in self.objects or "deletionTimestamp" in meta:
                if "foregroundDeletion" in (meta.get("finalizers") or []):
                    children = list(self.dependents(meta["uid"]))
                    for child in children:
                        if "deletionTimestamp" not in self.objects[child]["metadata"]:
                            self.delete(child)
                    if not any(child in self.objects for child in children):
                        kept = [name for name in meta["finalizers"] if name != "foregroundDeletion"]
                        self.edit(key, lambda new, kept=kept: new["metadata"].update(finalizers=kept))  # type: ignore[misc]
                continue
            if owners and not any(owner["uid"] in there for owner in owners):
                self.delete(key)

    def _orphan(self, uid: str) -> None:
        for key in self.dependents(uid):

            def drop(new: Object) -> None:
                owners = [each for each in new["metadata"]["ownerReferences"] if each["uid"] != uid]
                new["metadata"]["ownerReferences"] = owners

            self.edit(key, drop)

    def compact(self) -> None:
        """Forget the history: every watch and list page from before is 410."""
        self.floor = self.version
        self.history.clear()

    def since(self, version: int) -> Iterator[Change]:
        """Yield the changes after a version."""
        low, high = 0, len(self.history)
        while low < high:
            middle = (low + high) // 2
            if self.history[middle].version <= version:
                low = middle + 1
            else:
                high = middle
        yield from self.history[low:]

    async def wait(self, seconds: float) -> None:
        """Return at the next change or after so long."""
        with contextlib.suppress(TimeoutError):  # wait_for loses a cancellation before Python 3.12
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _take(self, key: Key, last: Object) -> Object:
        before = self.objects.pop(key)
        last["metadata"].setdefault("deletionTimestamp", now())
        return self._log("DELETED", key, last, before)

    def _put(self, kind: str, key: Key, new: Object, before: Object | None = None) -> Object:
        self.objects[key] = new
        return self._log(kind, key, new, before)

    def _log(self, kind: str, key: Key, new: Object, before: Object | None) -> Object:
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        change = Change(self.version, kind, key, new, before)
        self.history.append(change)
        news, self._news = self._news, asyncio.Event()
        news.set()
        for listener in self.listeners:
            listener(change)
        return new


def _bare(each: Object) -> Object:
    meta = {k: v for k, v in each["metadata"].items() if k not in ("managedFields", "resourceVersion")}
    return {**each, "metadata": meta}


def _without_status(each: Object) -> Object:
    return {name: value for name, value in each.items() if name not in ("status", "metadata")}


def _graceful(each: Object) -> bool:
    return each.get("kind") == "Pod" and bool(each["metadata"].get("deletionGracePeriodSeconds"))


def event(store: Store, about: Object, kind: str, reason: str, message: str, source: str) -> None:
    """Record an Event about an object."""
    meta = about["metadata"]
    place = meta.get("namespace", "default")
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{meta['name']}.{time.time_ns():x}"},
        "involvedObject": {
            "apiVersion": about["apiVersion"], "kind": about["kind"], "name": meta["name"],
            "namespace": place, "uid": meta["uid"],
        },
        "type": kind, "reason": reason, "message": message, "count": 1,
        "source": {"component": source}, "reportingComponent": source, "reportingInstance": "",
        "firstTimestamp": now(), "lastTimestamp": now(),
    }  # fmt: skip
    resource = resources.named("events")
    try:
        store.create(resource, place, body)
    except ApiError:  # the namespace is on its way out
        return
