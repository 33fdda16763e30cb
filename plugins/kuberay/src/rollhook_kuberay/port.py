"""What this launcher needs of Kubernetes: ten verbs. Everything else here is written against them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from rollhook.errors import Kind, LauncherError

Object = dict[str, Any]

#: kind -> (apiVersion, plural)
KINDS = {
    "Pod": ("v1", "pods"),
    "Service": ("v1", "services"),
    "ConfigMap": ("v1", "configmaps"),
    "Secret": ("v1", "secrets"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "Event": ("v1", "events"),
    "Deployment": ("apps/v1", "deployments"),
    "RayJob": ("ray.io/v1", "rayjobs"),
    "RayCluster": ("ray.io/v1", "rayclusters"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
    "ResourceClaimTemplate": ("resource.k8s.io/v1", "resourceclaimtemplates"),
    "ComputeDomain": ("resource.nvidia.com/v1beta1", "computedomains"),
    "SelfSubjectAccessReview": ("authorization.k8s.io/v1", "selfsubjectaccessreviews"),
    "LocalSubjectAccessReview": ("authorization.k8s.io/v1", "localsubjectaccessreviews"),
}


class KubeError(LauncherError):
    """The API server refused, failed or was not reached.

    `status` is that of its HTTP answer, 0 for none; `retried`: an earlier try may have been carried out.
    """

    def __init__(self, message: str, *, status: int = 0, kind: Kind | None = None) -> None:
        super().__init__(message, kind=kind)
        self.status = status
        self.retried = False


@dataclass(frozen=True)
class Executed:
    """What a command in a container gave."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Its output, else what it said of its failure."""
        return (self.stdout or self.stderr).decode("utf-8", "replace").strip()


class Port(Protocol):
    """A namespace of a Kubernetes API. Errors are KubeError; an absent object is None or False."""

    @property
    def namespace(self) -> str:
        """The namespace in which everything happens."""
        ...

    async def get(self, kind: str, name: str) -> Object | None:
        """Return an object; of a Secret its metadata alone."""
        ...

    async def list(self, kind: str, labels: Mapping[str, str] = {}) -> list[Object]:
        """Return the objects with these labels; of Secrets their metadata alone."""
        ...

    async def create(self, manifest: Object) -> Object:
        """Create an object; one with our hash that is there already is ours from a lost reply."""
        ...

    async def apply(self, manifest: Object) -> Object:
        """Create an object or change it to what is said (server-side apply), and return it."""
        ...

    async def patch(self, kind: str, name: str, patch: Object) -> Object:
        """Change an object by a JSON merge patch, and return it."""
        ...

    async def delete(self, kind: str, name: str) -> bool:
        """Delete an object, its dependants in the background; False if there was none."""
        ...

    def watch(self, kind: str, name: str, version: str) -> AsyncIterator[tuple[str, Object]]:
        """Give (event, object) from a version on, until the server ends it. KubeError 410: too old."""
        ...

    def logs(self, pod: str, *, follow: bool = False, container: str | None = None) -> AsyncIterator[bytes]:
        """Give a container's output from its beginning."""
        ...

    async def exec(
        self, pod: str, argv: Sequence[str], *, stdin: bytes = b"", container: str | None = None
    ) -> Executed:
        """Run a command in a container; stdin is not closed after what is given."""
        ...

    def forward(
        self, pod: Callable[[], Awaitable[str]], port: int, *, local_port: int = 0
    ) -> AbstractAsyncContextManager[str]:
        """Give `127.0.0.1:PORT`, which leads to a port of a pod; `pod` is asked for each connection."""
        ...


async def wait_for(
    port: Port,
    kind: str,
    name: str,
    condition: Callable[[Object | None], Any],
    *,
    seconds: float,
    poll_seconds: float,
) -> Object | None:
    """Return an object once the condition holds for it (or for its absence, None). Raises TimeoutError.

    The object is watched; a watch that ends, or is too old, begins anew after a look. An API that does not
    answer is asked again until the time is over.
    """
    deadline = time.monotonic() + seconds
    failed: KubeError | None = None
    while True:
        found: Object | None = None
        try:
            found = await port.get(kind, name)
            failed = None
            if condition(found):
                return found
        except KubeError as error:
            if error.kind != "retryable":
                raise
            failed = error
        left = deadline - time.monotonic()
        if left <= 0:
            break
        if found is not None and failed is None:
            try:
                async with asyncio.timeout(left):
                    async for event, each in port.watch(kind, name, found["metadata"]["resourceVersion"]):
                        if event == "DELETED" or condition(each):
                            break  # and look again: another object may have its name now
                continue
            except TimeoutError:
                continue
            except KubeError as error:
                if error.status != 410 and error.kind != "retryable":
                    raise
        await asyncio.sleep(min(poll_seconds, max(0.0, left)))
    if failed is not None:
        raise failed
    raise TimeoutError(f"{kind} {name} was waited for {seconds:.0f} s")
