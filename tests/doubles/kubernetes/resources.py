"""The resources that the double serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Resource:
    """A kind, and where it is served."""

    group: str
    version: str
    plural: str
    kind: str
    short: tuple[str, ...] = ()
    namespaced: bool = True
    #: status is a subresource: other writes cannot change it, and it cannot change the rest
    status: bool = False
    subresources: tuple[str, ...] = ()
    verbs: tuple[str, ...] = (
        "create", "delete", "deletecollection", "get", "list", "patch", "update", "watch",
    )  # fmt: skip

    @property
    def api_version(self) -> str:
        """`v1`, `ray.io/v1`."""
        return f"{self.group}/{self.version}".lstrip("/")

    @property
    def qualified(self) -> str:
        """`pods`, `rayjobs.ray.io`, as messages have it."""
        return f"{self.plural}.{self.group}".rstrip(".")

    @property
    def generated(self) -> bool:
        """Whether changes of its spec are counted in `generation`."""
        return self.status or self.group in ("apps", "batch", "ray.io")


_ONLY_CREATE = ("create",)
RESOURCES = (
    Resource("", "v1", "namespaces", "Namespace", ("ns",), namespaced=False, status=True),
    Resource("", "v1", "nodes", "Node", ("no",), namespaced=False, status=True),
    Resource(
        "", "v1", "pods", "Pod", ("po",), status=True, subresources=("log", "exec", "portforward")
    ),
    Resource("", "v1", "services", "Service", ("svc",), status=True),
    Resource("", "v1", "endpoints", "Endpoints", ("ep",)),
    Resource("", "v1", "configmaps", "ConfigMap", ("cm",)),
    Resource("", "v1", "secrets", "Secret"),
    Resource("", "v1", "serviceaccounts", "ServiceAccount", ("sa",)),
    Resource("", "v1", "events", "Event", ("ev",)),
    Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", ("pvc",), status=True),
    Resource("apps", "v1", "deployments", "Deployment", ("deploy",), status=True),
    Resource("batch", "v1", "jobs", "Job", status=True),
    Resource("rbac.authorization.k8s.io", "v1", "roles", "Role"),
    Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Resource(
        "authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview",
        namespaced=False, verbs=_ONLY_CREATE,
    ),
    Resource(
        "authentication.k8s.io", "v1", "selfsubjectreviews", "SelfSubjectReview",
        namespaced=False, verbs=_ONLY_CREATE,
    ),
    Resource("resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate"),
    Resource("resource.k8s.io", "v1", "deviceclasses", "DeviceClass", namespaced=False),
    Resource("resource.nvidia.com", "v1beta1", "computedomains", "ComputeDomain", status=True),
    Resource("ray.io", "v1", "rayclusters", "RayCluster", status=True),
    Resource("ray.io", "v1", "rayjobs", "RayJob", status=True),
)  # fmt: skip

_BY_PATH = {(each.group, each.version, each.plural): each for each in RESOURCES}
_BY_KIND = {(each.api_version, each.kind): each for each in RESOURCES}


def find(group: str, version: str, plural: str) -> Resource | None:
    """Return a resource by the words of its path."""
    return _BY_PATH.get((group, version, plural))


def of(body: dict[str, Any]) -> Resource | None:
    """Return the resource of an object or of a reference to one."""
    return _BY_KIND.get((body.get("apiVersion", ""), body.get("kind", "")))


def named(plural: str) -> Resource:
    """Return a resource by its plural name alone."""
    return next(each for each in RESOURCES if each.plural == plural)


def groups() -> dict[str, str]:
    """Return the named API groups and their version."""
    return {each.group: each.version for each in RESOURCES if each.group}


def resource_list(group: str, version: str) -> dict[str, Any]:
    """Return an APIResourceList."""
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}".lstrip("/"),
        "resources": [
            row for each in RESOURCES if (each.group, each.version) == (group, version) for row in _rows(each)
        ],
    }


def _rows(each: Resource) -> Iterator[dict[str, Any]]:
    row = {
        "name": each.plural,
        "singularName": each.kind.lower(),
        "namespaced": each.namespaced,
        "kind": each.kind,
        "verbs": list(each.verbs),
    }
    more: dict[str, Any] = {"shortNames": list(each.short)} if each.short else {}
    if each.plural in ("pods", "services", "deployments", "jobs", "rayclusters", "rayjobs"):
        more["categories"] = ["all"]
    yield {**row, **more}
    if each.status:
        yield {
            **row,
            "name": f"{each.plural}/status",
            "singularName": "",
            "verbs": ["get", "patch", "update"],
        }
    for name in each.subresources:
        verbs = {"log": ["get"]}
        yield {
            **row,
            "name": f"{each.plural}/{name}",
            "singularName": "",
            "verbs": verbs.get(name, ["create", "get"]),
        }
