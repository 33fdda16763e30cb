"""Failures as the API server tells them: a Status object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from doubles.kubernetes.resources import Resource

_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    500: "InternalError",
}


class ApiError(Exception):
    """What a request is refused with."""

    def __init__(self, code: int, message: str, *, reason: str = "", details: dict[str, Any] | None = None):
        super().__init__(message)
        self.code = code
        self.body: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason or _REASONS.get(code, "Unknown"),
            "code": code,
            **({"details": details} if details else {}),
        }


def _details(resource: Resource, name: str, **more: Any) -> dict[str, Any]:
    group = {"group": resource.group} if resource.group else {}
    return {"name": name, **group, "kind": more.pop("kind", resource.plural), **more}


def not_found(resource: Resource, name: str) -> ApiError:
    """404 for an object."""
    return ApiError(404, f'{resource.qualified} "{name}" not found', details=_details(resource, name))


def exists(resource: Resource, name: str) -> ApiError:
    """409 for a name that is taken."""
    text = f'{resource.qualified} "{name}" already exists'
    return ApiError(409, text, reason="AlreadyExists", details=_details(resource, name))


def conflict(resource: Resource, name: str, why: str) -> ApiError:
    """409 for a change of something that has changed."""
    text = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, text, details=_details(resource, name))


CHANGED = "the object has been modified; please apply your changes to the latest version and try again"


def invalid(resource: Resource, name: str, faults: Iterable[tuple[str, str, str]]) -> ApiError | None:
    """422 that names every fault (reason, field, message); None when there is none."""
    causes = [{"reason": why, "message": told, "field": field} for why, field, told in faults]
    if not causes:
        return None
    told = [f"{each['field']}: {each['message']}" for each in causes]
    joined = told[0] if len(told) == 1 else "[" + ", ".join(told) + "]"
    text = f'{resource.kind}{"." if resource.group else ""}{resource.group} "{name}" is invalid: {joined}'
    return ApiError(422, text, details=_details(resource, name, kind=resource.kind, causes=causes))


def forbidden(user: str, verb: str, group: str, plural: str, namespace: str, name: str = "") -> ApiError:
    """403 as RBAC tells it."""
    what = f"{plural}.{group}".rstrip(".") + (f' "{name}"' if name else "")
    where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
    text = (
        f'{what} is forbidden: User "{user}" cannot {verb} resource "{plural}" in API group "{group}" {where}'
    )
    return ApiError(403, text, details={"name": name, "group": group, "kind": plural})
