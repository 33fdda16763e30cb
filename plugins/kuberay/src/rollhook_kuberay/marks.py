"""How objects are marked as ours: by labels, and by a hash of what they were applied as."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]

MANAGED = {"app.kubernetes.io/managed-by": "rollhook"}
OWNER, RUN, ATTEMPT, ROLE = "rollhook/owner", "rollhook/run", "rollhook/attempt", "rollhook/role"
HASH, STOPPED = "rollhook/spec-hash", "rollhook/stopped"


def sanitise(user: str) -> str:
    """Return a user's name as a label and part of a name: `Jane_D.oe` is `jane-d-oe`."""
    return re.sub(r"[^a-z0-9-]+", "-", user.lower()).strip("-")[:40] or "nobody"


def spec_hash(manifest: Mapping[str, Any]) -> str:
    """Return what an object was last applied as: 32 hex digits over its canonical JSON.

    The order of mappings does not count, nor that of lists whose items have names (env, volumes, ports).
    """
    text = json.dumps(_canonical(manifest), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _canonical(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [_canonical(each) for each in value]
        names = [each.get("name") if isinstance(each, dict) else None for each in items]
        named = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
        return sorted(items, key=lambda each: str(each["name"])) if named else items
    return value


def with_hash(manifest: Object) -> Object:
    """Return the object with the hash of itself among its annotations."""
    metadata = manifest["metadata"]
    notes = {**(metadata.get("annotations") or {}), HASH: spec_hash(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": notes}}


def owned(manifest: Object, owner: Mapping[str, Any]) -> Object:
    """Return the object as the dependant of another, with which Kubernetes removes it."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"].get("uid", f"(uid of the {owner['kind']})"),
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}
