"""Discovery: versions, groups, resources, and as much OpenAPI as kubectl asks for."""

from __future__ import annotations

from functools import cache
from typing import Any

from aiohttp import web

from doubles.kubernetes import resources
from doubles.kubernetes.resources import RESOURCES, Resource

VERSION = "v1.32.4"


def answer(path: str) -> dict[str, Any] | web.Response | None:
    """Return the body for a path of discovery; None for any other."""
    path = path.rstrip("/")
    groups = resources.groups()
    if path in ("/healthz", "/livez", "/readyz"):
        return web.Response(text="ok")
    if path == "/version":
        major, minor, _ = VERSION[1:].split(".")
        return {"major": major, "minor": minor, "gitVersion": VERSION, "platform": "linux/amd64"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [_group(*each) for each in groups.items()],
        }
    parts = path.strip("/").split("/")
    if parts == ["api", "v1"]:
        return resources.resource_list("", "v1")
    if parts[0] == "apis" and parts[1] in groups:
        if len(parts) == 2:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(parts[1], groups[parts[1]])}
        if parts[2:] == [groups[parts[1]]]:
            return resources.resource_list(parts[1], parts[2])
    if path == "/openapi/v2":  # absent: clients turn to v3, or do without
        return web.Response(status=404, text="404 page not found")
    if path == "/openapi/v3":
        roots = ["api/v1", *(f"apis/{group}/{version}" for group, version in groups.items())]
        return {"paths": {each: {"serverRelativeURL": f"/openapi/v3/{each}"} for each in roots}}
    if path.startswith("/openapi/v3/"):
        return _openapi(path.removeprefix("/openapi/v3/"))
    return None


def _group(group: str, version: str) -> dict[str, Any]:
    row = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [row], "preferredVersion": row}


@cache
def _openapi(root: str) -> dict[str, Any]:
    """Only what tells a client that the server itself checks fields, and who is patched how."""
    paths = {}
    schemas = {}
    for each in RESOURCES:
        if each.api_version == root.partition("/")[2]:
            kind = {"group": each.group, "version": each.version, "kind": each.kind}
            paths[_path(root, each)] = {"patch": _patch(kind)}
            name = f"{each.group or 'core'}.{each.version}.{each.kind}"
            schemas[name] = {"type": "object", "x-kubernetes-group-version-kind": [kind]}
    info = {"title": "A double of Kubernetes", "version": VERSION}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _path(root: str, each: Resource) -> str:
    space = "namespaces/{namespace}/" if each.namespaced else ""
    return f"/{root}/{space}{each.plural}/{{name}}"


def _patch(kind: dict[str, str]) -> dict[str, Any]:
    names = ("dryRun", "fieldManager", "fieldValidation", "force")
    return {
        "operationId": f"patch{kind['kind']}",
        "parameters": [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names],
        "requestBody": {"content": {"application/merge-patch+json": {"schema": {"type": "object"}}}},
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": kind,
    }
