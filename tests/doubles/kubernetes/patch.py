"""Patches: JSON merge (RFC 7396), JSON patch (RFC 6902), strategic merge, and server-side apply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from datetime import UTC, datetime
from functools import cache
from typing import Any

from doubles.kubernetes import schema
from doubles.kubernetes.errors import ApiError
from doubles.kubernetes.resources import Resource

Object = dict[str, Any]
Path = tuple[str, ...]

_METADATA = {
    "type": "object",
    "properties": {
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        "finalizers": {"type": "array", "x-kubernetes-list-type": "set"},
        "ownerReferences": {
            "type": "array",
            "items": {"type": "object", "x-kubernetes-map-type": "atomic"},
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["uid"],
        },
    },
}


def _keyed(*keys: str) -> dict[str, Any]:
    items = {"type": "object", "additionalProperties": {}}
    return {"items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


@cache
def shape(resource: Resource) -> schema.Schema:
    """Return the schema by which lists of a kind are merged."""
    more: dict[str, Any] = {}
    if resource.group == "ray.io":
        root = schema.root(resource.plural)
        more = {name: schema.child(root, name) for name in ("spec", "status")}
    elif resource.kind == "Pod":
        status = {"type": "object", "properties": {"conditions": _keyed("type")}, "additionalProperties": {}}
        more = {"spec": schema.child(schema.pod_template(), "spec"), "status": status}
    elif resource.kind in ("Deployment", "Job"):
        more["spec"] = {
            "type": "object",
            "properties": {"template": schema.pod_template()},
            "additionalProperties": {},
        }
    elif resource.kind == "Service":
        more["spec"] = {
            "type": "object",
            "properties": {"ports": _keyed("port", "protocol")},
            "additionalProperties": {},
        }
    elif resource.kind == "ServiceAccount":
        more = {"secrets": _keyed("name"), "imagePullSecrets": _keyed("name")}
    return {"type": "object", "properties": {"metadata": _METADATA, **more}, "additionalProperties": {}}


def merge(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch and return the result."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge(result.get(name), value)
    return result


def json_patch(target: Any, operations: list[Object]) -> Any:
    """Apply a JSON patch; 422 for a test that fails or a path that is not there."""
    document = {"": deepcopy(target)}

    def walk(pointer: str) -> tuple[Any, str]:
        parts = ["", *(each.replace("~1", "/").replace("~0", "~") for each in pointer.split("/")[1:])]
        where: Any = document
        for part in parts[:-1]:
            where = where[int(part)] if isinstance(where, list) else where[part]
        return where, parts[-1]

    def get(pointer: str) -> Any:
        where, last = walk(pointer)
        return where[int(last)] if isinstance(where, list) else where[last]

    def add(pointer: str, value: Any) -> None:
        where, last = walk(pointer)
        if isinstance(where, list):
            where.insert(len(where) if last == "-" else int(last), value)
        else:
            where[last] = value

    def remove(pointer: str) -> Any:
        where, last = walk(pointer)
        return where.pop(int(last)) if isinstance(where, list) else where.pop(last)

    for each in operations:
        try:
            kind, path = each["op"], each["path"]
            if kind == "test" and get(path) != each["value"]:
                raise KeyError("testing value failed")
            if kind in ("remove", "replace"):
                remove(path)
            if kind in ("add", "replace"):
                add(path, deepcopy(each["value"]))
            if kind in ("move", "copy"):
                add(path, remove(each["from"]) if kind == "move" else deepcopy(get(each["from"])))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            told = f"the server rejected our request due to an error in our request: {each}: {error}"
            raise ApiError(422, told) from None
    return document[""]


def _key(item: Any, keys: list[str], where: schema.Schema | None) -> str:
    found: Object = {}
    for key in keys:
        below = (schema.child(schema.items(where), key) if where else None) or {}
        found[key] = item.get(key, below.get("default", "TCP" if key == "protocol" else None))
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def strategic(target: Any, patch: Any, where: schema.Schema | None) -> Any:
    """Apply a strategic merge patch with its directives and return the result."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {name: deepcopy(value) for name, value in patch.items() if name != "$patch"}
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if name == "$retainKeys":
            result = {each: kept for each, kept in result.items() if each in value}
        elif name.startswith("$deleteFromPrimitiveList/"):
            field = name.split("/", 1)[1]
            result[field] = [each for each in result.get(field, []) if each not in value]
    for name, value in patch.items():
        below = schema.child(where, name) if where else None
        if name.startswith("$"):
            continue
        if value is None:
            result.pop(name, None)
        elif isinstance(value, list) and (keys := schema.map_keys(below)):
            result[name] = _merge_list(result.get(name) or [], value, keys[:1], below)
        elif isinstance(value, list) and schema.is_set(below):
            result[name] = list(dict.fromkeys([*(result.get(name) or []), *value]))
        elif isinstance(value, dict) and value.get("$patch") == "delete":
            result.pop(name, None)
        else:
            result[name] = strategic(result.get(name), value, below)
    for name, value in patch.items():
        if name.startswith("$setElementOrder/") and isinstance(
            result.get(field := name.split("/", 1)[1]), list
        ):
            below = schema.child(where, field) if where else None
            keys = schema.map_keys(below)[:1]
            order = [_key(each, keys, below) if keys else each for each in value]
            marks = [_key(each, keys, below) if keys else each for each in result[field]]
            ranked = sorted(
                range(len(marks)), key=lambda n: order.index(marks[n]) if marks[n] in order else n
            )
            result[field] = [result[field][n] for n in ranked]
    return result


def _merge_list(old: list[Any], new: list[Any], keys: list[str], where: schema.Schema | None) -> list[Any]:
    if any(each.get("$patch") == "replace" for each in new):
        return [deepcopy(each) for each in new if "$patch" not in each]
    result = {_key(each, keys, where): each for each in old}
    for each in new:
        mark = _key(each, keys, where)
        if each.get("$patch") == "delete":
            result.pop(mark, None)
        else:
            result[mark] = strategic(result.get(mark), each, schema.items(where) if where else None)
    return list(result.values())


# Server-side apply. A field is a path of `f:name` and `k:{...}` or `v:...` steps, as in `fieldsV1`.

_NOBODYS = {
    ("f:apiVersion",), ("f:kind",), ("f:metadata",), ("f:metadata", "f:name"), ("f:metadata", "f:namespace"),
    ("f:metadata", "f:uid"), ("f:metadata", "f:resourceVersion"), ("f:metadata", "f:generation"),
    ("f:metadata", "f:creationTimestamp"), ("f:metadata", "f:managedFields"),
    ("f:metadata", "f:generateName"),
    ("f:metadata", "f:deletionTimestamp"), ("f:metadata", "f:deletionGracePeriodSeconds"),
    ("f:metadata", "f:selfLink"),
}  # fmt: skip


def fields(value: Any, where: schema.Schema | None, path: Path = ()) -> dict[Path, Any]:
    """Return the fields that an object sets, with their values."""
    if path in _NOBODYS and path != ("f:metadata",):
        return {}
    found: dict[Path, Any] = {}
    atomic = where is not None and where.get("x-kubernetes-map-type") == "atomic"
    if isinstance(value, dict) and value and not atomic:
        for name, each in value.items():
            if path != ("f:metadata",) or name != "managedFields":
                below = schema.child(where, name) if where else None
                found |= fields(each, below, (*path, f"f:{name}"))
        return found
    if isinstance(value, list) and (keys := schema.map_keys(where)):
        for each in value:
            here = (*path, "k:" + _key(each, keys, where))
            found[here] = True
            found |= fields(each, schema.items(where) if where else None, here)
        return found
    if isinstance(value, list) and schema.is_set(where):
        return {(*path, "v:" + json.dumps(each)): each for each in value}
    return {path: value} if path and path not in _NOBODYS else {}


def _tree(paths: set[Path]) -> Object:
    tree: Object = {}
    for path in sorted(paths):
        node = tree
        for step in path:
            node = node.setdefault(step, {})
    return tree


def _paths(tree: Object, path: Path = ()) -> Iterator[Path]:
    if not tree or (path and path[-1].startswith("k:")):
        yield path
    for step, below in tree.items():
        yield from _paths(below, (*path, step))


def _owners(live: Object) -> list[tuple[Object, set[Path]]]:
    return [
        (entry, set(_paths(entry.get("fieldsV1", {})))) for entry in live["metadata"].get("managedFields", [])
    ]


def _keep_owners(result: Object, owners: list[tuple[Object, set[Path]]]) -> None:
    kept = [{**entry, "fieldsV1": _tree(paths)} for entry, paths in owners if paths]
    result["metadata"]["managedFields"] = kept


def _entry(resource: Resource, manager: str, operation: str, subresource: str) -> Object:
    entry = {
        "manager": manager,
        "operation": operation,
        "apiVersion": resource.api_version,
        "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "fieldsType": "FieldsV1",
    }
    return {**entry, **({"subresource": subresource} if subresource else {})}


def _is(entry: Object, manager: str, operation: str, subresource: str) -> bool:
    found = (entry["manager"], entry["operation"], entry.get("subresource", ""))
    return found == (manager, operation, subresource)


def note_update(
    resource: Resource, old: Object | None, new: Object, manager: str, subresource: str = ""
) -> None:
    """Note in `new` that a manager has changed what differs from `old`."""
    where = shape(resource)
    before, after = fields(old or {}, where), fields(new, where)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    owners = _owners(old or {"metadata": {}})
    kept = []
    mine: set[Path] = set()
    for entry, paths in owners:
        if _is(entry, manager, "Update", subresource):
            mine = paths & set(after)
        else:
            kept.append((entry, (paths & set(after)) - changed))
    kept.append((_entry(resource, manager, "Update", subresource), mine | changed))
    _keep_owners(new, kept)


def apply(resource: Resource, live: Object | None, config: Object, manager: str, force: bool) -> Object:
    """Return the object after a server-side apply; 409 where another manager holds a different value."""
    where = shape(resource)
    config = deepcopy(config)
    if config.get("metadata", {}).get("managedFields"):
        raise ApiError(400, "metadata.managedFields must be nil")
    wanted = fields(config, where)
    base = live or {"metadata": {}}
    have = fields(base, where)
    owners, mine, clashes = [], set(), []
    for entry, paths in _owners(base):
        if _is(entry, manager, "Apply", ""):
            mine = paths
            continue
        clash = {path for path in paths & set(wanted) if have.get(path) != wanted[path]}
        if clash and not force:
            clashes += [(entry, path) for path in sorted(clash)]
        owners.append((entry, paths - clash))
    if clashes:
        raise _clash(clashes)
    result: Object = strategic(base, config, where)
    others = set().union(*(paths for _, paths in owners)) if owners else set()
    for path in sorted(mine - set(wanted) - others, key=len, reverse=True):
        if not any(each[: len(path)] == path for each in (*wanted, *others)):
            _remove(result, path, where)
    owners.append((_entry(resource, manager, "Apply", ""), set(wanted)))
    _keep_owners(result, owners)
    return result


def _remove(value: Any, path: Path, where: schema.Schema | None) -> bool:
    """Remove a field; say whether what held it is empty now."""
    step, rest = path[0], path[1:]
    if step.startswith("f:"):
        name = step[2:]
        if not isinstance(value, dict) or name not in value:
            return False
        if not rest or _remove(value[name], rest, schema.child(where, name) if where else None):
            del value[name]
    elif isinstance(value, list):
        keys = schema.map_keys(where)
        for number, each in enumerate(value):
            mark = "k:" + _key(each, keys, where) if keys else "v:" + json.dumps(each)
            if mark == step:
                if not rest:
                    del value[number]
                else:
                    _remove(each, rest, schema.items(where) if where else None)
                break
    return not value


def _clash(clashes: list[tuple[Object, Path]]) -> ApiError:
    causes = []
    for entry, path in clashes:
        told = "".join(f".{step[2:]}" if step[0] == "f" else f"[{step[2:]}]" for step in path)
        using = f'conflict with "{entry["manager"]}"' + (
            f" using {entry['apiVersion']}" if entry["operation"] == "Update" else ""
        )
        causes.append({"reason": "FieldManagerConflict", "message": using, "field": told})
    count = f"{len(causes)} conflict{'s' if len(causes) > 1 else ''}"
    text = f"Apply failed with {count}: " + ", ".join(
        f"{each['message']}: {each['field']}" for each in causes
    )
    return ApiError(409, text, details={"causes": causes})
