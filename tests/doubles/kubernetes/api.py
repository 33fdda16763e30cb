"""The API server: discovery, objects, watches, and who may ask (kubernetes.io/docs/reference/using-api)."""

from __future__ import annotations

import base64
import json
import time
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import yaml
from aiohttp import web

from doubles import faults
from doubles.kubernetes import admission, discovery, errors, patch, protobuf, resources, selectors, streams
from doubles.kubernetes.errors import ApiError
from doubles.kubernetes.kubelet import Kubelet
from doubles.kubernetes.resources import Resource
from doubles.kubernetes.store import Key, Object, Store
from doubles.kubernetes.world import USER, World

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


@dataclass(frozen=True)
class Target:
    """What a path names."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> Key:
        """The key in the store."""
        return self.resource, self.namespace, self.name


def parse(path: str) -> Target | None:
    """Return what a path names; None for one that is no resource's."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and resources.find(group, version, rest[2]):
        namespace, rest = rest[1], rest[2:]
    resource = resources.find(group, version, rest[0])
    if resource is None or len(rest) > 3:
        return None
    return Target(resource, namespace, *rest[1:])


class Api:
    """The surface of the API server."""

    def __init__(self, world: World, kubelet: Kubelet) -> None:
        self.world, self.kubelet = world, kubelet

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer any request."""
        try:
            self._authenticate(request)
            target = parse(request.path)
            if target is None:
                found = discovery.answer(request.path)
                if found is None:
                    request["entry"]["miss"] = True
                    raise ApiError(404, "the server could not find the requested resource")
                return found if isinstance(found, web.Response) else _reply(found)
            return await self._resource(request, target)
        except ApiError as error:
            return _reply(error.body, status=error.code)

    def _authenticate(self, request: web.Request) -> None:
        said = request.headers.get("Authorization", "")
        if said != f"Bearer {self.world.key}" or not self.world.options.accept_key:
            raise ApiError(401, "Unauthorized")
        request["user"] = USER
        if other := request.headers.get("Impersonate-User"):
            kind, name = ("serviceaccounts", other.rpartition(":")[2]) if ":" in other else ("users", other)
            if not self.world.allowed(USER, "impersonate", "", kind, ""):
                raise errors.forbidden(USER, "impersonate", "", kind, "", name)
            request["user"] = other

    async def _resource(self, request: web.Request, target: Target) -> web.StreamResponse:
        resource, query = target.resource, request.query
        watching = query.get("watch", "") in ("true", "1")
        verb = _VERBS.get(request.method, "get" if target.name else "list")
        if request.method == "GET" and watching:
            verb = "watch"
        if verb == "delete" and not target.name:
            verb = "deletecollection"
        if target.subresource in ("exec", "portforward"):
            verb = "create"
        plural = f"{resource.plural}/{target.subresource}".rstrip("/")
        if not resource.plural.startswith("self"):
            space = target.namespace or (target.name if resource.kind == "Namespace" else "")
            if not self.world.allowed(request["user"], verb, resource.group, plural, space):
                raise errors.forbidden(request["user"], verb, resource.group, plural, space, target.name)
        if target.subresource in resource.subresources:
            pod = self.world.store.get(*target.key)
            return await streams.answer(self.kubelet, request, target.subresource, pod)
        if target.subresource not in ("", "status") or verb not in (
            "get",
            "update",
            "patch",
            *resource.verbs,
        ):
            request["entry"]["miss"] = True
            raise ApiError(404, "the server could not find the requested resource")
        if verb == "watch":
            return await self._watch(request, target)
        if verb == "list":
            return _reply(self._list(request, target))
        if verb == "get":
            return _reply(self.world.store.get(*target.key))
        if resource.namespaced and not target.namespace:
            raise ApiError(405, "the server does not allow this method on the requested resource")
        return await self._write(request, target, verb)

    # Reading.

    def _wanted(self, request: web.Request, target: Target) -> Any:
        by_label = selectors.labels(request.query.get("labelSelector", ""))
        by_field = selectors.fields(request.query.get("fieldSelector", ""))
        return lambda each: (
            by_label(each) and by_field(each) and target.name in ("", each["metadata"]["name"])
        )

    def _list(self, request: web.Request, target: Target) -> Object:
        store, resource = self.world.store, target.resource
        wanted = self._wanted(request, target)
        found = [each for each in store.list(resource, target.namespace) if wanted(each)]
        start, version = 0, store.version
        if token := request.query.get("continue"):
            version, start = json.loads(base64.urlsafe_b64decode(token))
            if version <= store.floor:
                raise ApiError(
                    410, "The provided continue parameter is too old to display a consistent list result."
                )
        limit = int(request.query.get("limit", 0)) or len(found)
        if self.world.options.page is not None:
            limit = min(limit, self.world.options.page)
        meta: Object = {"resourceVersion": str(version)}
        if start + limit < len(found):
            meta["continue"] = base64.urlsafe_b64encode(
                json.dumps([version, start + limit]).encode()
            ).decode()
            meta["remainingItemCount"] = len(found) - start - limit
        page = found[start : start + limit]
        if resource.group not in ("ray.io", "resource.nvidia.com"):  # as it is for kinds that are built in
            page = [{k: v for k, v in each.items() if k not in ("apiVersion", "kind")} for each in page]
        return {
            "apiVersion": resource.api_version,
            "kind": f"{resource.kind}List",
            "metadata": meta,
            "items": page,
        }

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
        store, query = self.world.store, request.query
        hint = request["hint"] or {}
        wanted = self._wanted(request, target)
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        sent = 0

        async def send(kind: str, each: Object) -> None:
            nonlocal sent
            if sent == hint.get("cut", -1) and request.transport is not None:
                request.transport.abort()
            sent += 1
            await response.write(json.dumps({"type": kind, "object": each}).encode() + b"\n")

        async def gone(version: int) -> web.StreamResponse:
            told = f"too old resource version: {version} ({store.floor or store.version})"
            await send("ERROR", ApiError(410, told).body)
            return response

        asked = query.get("resourceVersion", "")
        version = store.version
        if asked in ("", "0"):
            for each in store.list(target.resource, target.namespace):
                if wanted(each):
                    await send("ADDED", each)
        else:
            version = int(asked)
            if version < store.floor:
                return await gone(version)
        end = time.monotonic() + float(query.get("timeoutSeconds", 3600))
        marked = time.monotonic()
        while (now := time.monotonic()) < end:
            if sent >= hint.get("gone", 1 << 30):
                return await gone(version)
            if version < store.floor and not store.history:
                version = store.floor
            for change in list(store.since(version)):
                version = change.version
                if change.key[0] is not target.resource or target.namespace not in ("", change.key[1]):
                    continue
                before = change.before is not None and wanted(change.before)
                after = change.type != "DELETED" and wanted(change.object)
                if before and not after:
                    await send("DELETED", change.object)
                elif after:
                    await send("MODIFIED" if before else "ADDED", change.object)
            if query.get("allowWatchBookmarks") == "true" and now - marked > self.world.options.bookmark:
                marked, meta = now, {"resourceVersion": str(version), "creationTimestamp": None}
                body = {
                    "kind": target.resource.kind,
                    "apiVersion": target.resource.api_version,
                    "metadata": meta,
                }
                await send("BOOKMARK", body)
            await store.wait(min(end - now, self.world.options.bookmark))
            if request.transport is None or request.transport.is_closing():
                break
        return response

    # Writing.

    async def _write(self, request: web.Request, target: Target, verb: str) -> web.StreamResponse:
        raw, query = await request.read(), request.query
        store = self.world.store
        if query.get("dryRun") == "All":
            store = Store(dict(store.objects), version=store.version)
        if verb in ("delete", "deletecollection"):
            return _reply(self._delete(request, target, _body(request, raw or b"{}") or {}, store))
        media, body = request.content_type, _body(request, raw)
        manager = query.get("fieldManager") or request.headers.get("User-Agent", "unknown").partition("/")[0]
        if verb == "create":
            return self._create(request, target, body, store, manager)
        old = store.find(*target.key)
        if verb == "patch":
            if media == "application/apply-patch+yaml":
                return self._apply(request, target, body, store)
            old = store.get(*target.key)
            new = self._patched(target.resource, old, body, media)
        else:
            old, new = store.get(*target.key), body
            self._same(target, body)
        managed = new["metadata"].get("managedFields")
        if managed == old["metadata"].get("managedFields"):
            new["metadata"].pop("managedFields", None)
        warnings = self._admit(request, target, new, old)
        kept = store.replace(target.key, new, manager=manager, subresource=target.subresource)
        return _reply(kept, headers=warnings)

    def _create(
        self, request: web.Request, target: Target, body: Object, store: Store, manager: str
    ) -> web.Response:
        resource = target.resource
        body.setdefault("metadata", {})
        if resource.plural.startswith("self"):
            return _reply(self._review(request, body), status=201)
        self._same(target, body)
        if body["metadata"].get("resourceVersion"):
            raise ApiError(500, "resourceVersion should not be set on objects to be created")
        if resource.status and resource.kind != "Namespace":
            body.pop("status", None)
        warnings = self._admit(request, target, body, None)
        made = store.create(resource, target.namespace, body, manager)
        if resource.kind == "Namespace" and store is self.world.store:
            self.world.complete_namespace(made["metadata"]["name"])
        return _reply(made, status=201, headers=warnings)

    def _apply(self, request: web.Request, target: Target, body: Object, store: Store) -> web.Response:
        manager = request.query.get("fieldManager")
        if not manager:
            raise ApiError(
                422, 'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value: is required'
            )
        self._same(target, body)
        body.setdefault("metadata", {})["name"] = target.name
        live = store.find(*target.key)
        force = request.query.get("force", "") in ("true", "1")
        new = patch.apply(target.resource, live, body, manager, force)
        warnings = self._admit(request, target, new, live)
        if live is None:
            return _reply(
                store.create(target.resource, target.namespace, new, manager), status=201, headers=warnings
            )
        kept = store.replace(target.key, new, manager=manager, subresource=target.subresource)
        return _reply(kept, headers=warnings)

    def _patched(self, resource: Resource, old: Object, body: Any, media: str) -> Object:
        if media == "application/merge-patch+json":
            new = patch.merge(old, body)
        elif media == "application/json-patch+json":
            new = patch.json_patch(old, body)
        elif media == "application/strategic-merge-patch+json" and "." not in resource.group:
            new = patch.strategic(deepcopy(old), body, patch.shape(resource))
        else:
            told = "the body of the request was in an unknown format - accepted media types include: "
            known = [
                "application/json-patch+json",
                "application/merge-patch+json",
                "application/apply-patch+yaml",
            ]
            raise ApiError(415, told + ", ".join(known))
        return deepcopy(new)  # type: ignore[no-any-return]

    def _same(self, target: Target, body: Object) -> None:
        have = (body.get("apiVersion"), body.get("kind"))
        want = (target.resource.api_version, target.resource.kind)
        if have != want:
            told = f"the API version and kind in the data {have} do not match those of the request {want}"
            raise ApiError(400, told)
        meta = body.get("metadata") or {}
        if meta.get("namespace") and meta["namespace"] != target.namespace:
            told = "the namespace of the provided object does not match the namespace sent on the request"
            raise ApiError(400, told)
        if target.name and meta.get("name") not in (None, target.name):
            raise ApiError(
                400,
                f"the name of the object ({meta['name']}) does not match the name on the URL ({target.name})",
            )

    def _admit(self, request: web.Request, target: Target, new: Object, old: Object | None) -> dict[str, str]:
        pruned = admission.admit(target.resource, new, old, target.subresource)
        mode = request.query.get("fieldValidation") or "Warn"
        told = [f'unknown field "{each}"' for each in pruned]
        if told and mode == "Strict":
            text = f'{target.resource.kind} in version "{target.resource.version}" cannot be handled as a '
            text += f"{target.resource.kind}: strict decoding error: {', '.join(told)}"
            raise ApiError(400, text)
        quoted = ["299 - " + json.dumps(each) for each in told]
        return {"Warning": ", ".join(quoted)} if told and mode == "Warn" else {}

    def _delete(self, request: web.Request, target: Target, options: Object, store: Store) -> Object:
        query = request.query
        policy = options.get("propagationPolicy") or query.get("propagationPolicy") or "Background"
        if options.get("orphanDependents"):
            policy = "Orphan"
        grace = options.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
        seconds = None if grace is None else float(grace)
        if not target.name:
            wanted = self._wanted(request, target)
            found = [each for each in store.list(target.resource, target.namespace) if wanted(each)]
            for each in found:
                store.delete(replace(target, name=each["metadata"]["name"]).key, policy=policy, grace=seconds)
            return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        old = store.get(*target.key)
        for field, have in (options.get("preconditions") or {}).items():
            if have is not None and old["metadata"].get(field) != have:
                is_ = old["metadata"].get(field)
                told = f"Precondition failed: {field} in precondition: {have}, in object meta: {is_}"
                raise errors.conflict(target.resource, target.name, told)
        left = store.delete(target.key, policy=policy, grace=seconds)
        if target.key in store.objects:
            return left
        details = {"name": target.name, "kind": target.resource.plural, "uid": old["metadata"]["uid"]}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _review(self, request: web.Request, body: Object) -> Object:
        if body["kind"] == "SelfSubjectReview":
            user = {"username": request["user"], "groups": ["system:authenticated"]}
            return {**body, "status": {"userInfo": user}}
        asked = body.get("spec", {}).get("resourceAttributes") or {}
        plural = f"{asked.get('resource', '')}/{asked.get('subresource', '')}".rstrip("/")
        may = self.world.allowed(
            request["user"], asked.get("verb", ""), asked.get("group", ""), plural, asked.get("namespace", "")
        )
        return {**body, "status": {"allowed": may, **({} if may else {"reason": "no RBAC policy matched"})}}


def _reply(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return JSON without a charset, which some clients look for."""
    body = json.dumps(data).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _body(request: web.Request, raw: bytes) -> Any:
    if "protobuf" in request.content_type:
        return protobuf.decode(raw)
    try:
        return yaml.safe_load(raw) if "yaml" in request.content_type else json.loads(raw)
    except (ValueError, yaml.YAMLError) as error:
        raise ApiError(400, f"couldn't get version/kind; json parse error: {error}") from None


def make_app(world: World, kubelet: Kubelet) -> web.Application:
    """Return the API server's surface."""
    app = web.Application(middlewares=[faults.watch(world, "api")], client_max_size=16 << 20)
    app.router.add_route("*", "/{path:.*}", Api(world, kubelet).handle)
    return app
