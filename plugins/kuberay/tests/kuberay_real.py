"""A namespace of the double whose clusters are real Ray: what the contract's site needs of it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kuberay_site import launcher

from rollhook.launcher import ClusterOptions, Handle
from rollhook.testing.launcher import SENTINEL, LauncherSite
from rollhook_kuberay.launcher import KubeRayLauncher
from rollhook_kuberay.port import Object

SMALL = {"head": {"cpus": "1", "memory": "1Gi"}, "worker": {"cpus": "2", "memory": "1Gi"}}


class Real:
    """The double, its volume under the path that it has here, and Secrets with the sentinel."""

    def __init__(self, double: Any) -> None:
        self.double = double
        self.root = double.claim("default", "ws")

    def keys(self, **given: Any) -> dict[str, Any]:
        """Return keys of a small cluster that has the volume and the secrets."""
        return {
            "kubeconfig": str(self.double.kubeconfig),
            "poll_seconds": 0.5,
            "mounts": [{"path": str(self.root), "claim": "ws"}],
            "env_from": ["tokens"],
            "mount_secrets": ["files"],
            "secrets": {"SECRET_K8S": "k8s:files/token"},
            **given,
        }

    async def prepare(self) -> None:
        """Make the volume and the Secrets."""
        value = base64.b64encode(SENTINEL.encode()).decode()
        claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        objects: list[Object] = [
            _object("PersistentVolumeClaim", "ws", spec=claim),
            _object("Secret", "tokens", type="Opaque", data={"CONTRACT_TOKEN": value}),
            _object("Secret", "files", type="Opaque", data={"token": value}),
        ]
        async with launcher(**self.keys())._site.port() as port:
            for each in objects:
                await port.create(each)
        self.root.mkdir(parents=True, exist_ok=True)

    async def up(self, name: str) -> None:
        """Bring a cluster up."""
        made = self.standing(name)
        await made.cluster_up([], ClusterOptions(timeout=110), print)

    def standing(self, name: str, **given: Any) -> KubeRayLauncher:
        """Return a launcher on a cluster that stays."""
        return launcher(
            **self.keys(mode="raycluster", clusters={"training": {"name": name, **SMALL}}, **given)
        )

    def site(self, make: Callable[[], KubeRayLauncher], **given: Any) -> LauncherSite:
        """Return what the contract runs on."""

        async def view() -> str:
            shown = [each for kind in ("RayJob", "RayCluster", "Pod", "ConfigMap", "Event")
                     for each in await asyncio.to_thread(self.double.objects, kind)]  # fmt: skip
            return json.dumps(shown)

        def unknown(handle: Handle) -> Handle:
            data = {**handle.data, "name": handle.job_id}
            return replace(handle, data=data | ({"scratch": "/tmp/nobody"} if "scratch" in data else {}))

        secrets = {
            "env": "env:CONTRACT_TOKEN",
            "file": "file:/var/run/rollhook/secrets/files/token",
            "k8s": "k8s:files/token",
        }
        return LauncherSite(make(), self.root, secrets, unknown, view, **given)


def _object(kind: str, name: str, **given: Any) -> Object:
    return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **given}
