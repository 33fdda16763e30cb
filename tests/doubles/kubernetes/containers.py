"""What a container gets from its pod's spec: environment, files of volumes, and a view of this machine.

The view is made by bubblewrap: the machine's own files read-only, /tmp and the home directory of the pod's
own, and each volume's directory at its mount path. "Images" are this machine, so any `image` will do.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from doubles import machines
from doubles.kubernetes import resources
from doubles.kubernetes.store import Object, Store

_CHECKOUT = Path(__file__).resolve().parents[3]
_HOME = Path(os.path.expanduser("~root"))


class NotYet(Exception):
    """Something that the pod refers to is not there. `args`: the reason of the waiting state, the message."""


@dataclass(eq=False)
class Container(machines.Machine):
    """A machine with a view of this one."""

    binds: list[tuple[Path, str]] = field(default_factory=list)

    def _argv(self, info: int) -> list[str]:
        argv = ["bwrap", *machines._namespaces(), "--as-pid-1", "--die-with-parent", "--info-fd", str(info)]
        argv += view([Path(inner) for _, inner in self.binds])
        argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm"]
        for source, inner in sorted(self.binds, key=lambda each: each[1].count("/")):
            argv += ["--bind", str(source), inner]
        # what python runs from may lie below what was just covered
        for each in sorted({str(_CHECKOUT), sys.prefix, sys.base_prefix}, key=len):
            argv += ["--ro-bind", each, each]
        return [*argv, "--chdir", "/", "/bin/sh", "-c", machines._FIRST]


def view(mounts: list[Path]) -> list[str]:
    """Return bubblewrap's arguments for a read-only view of / in which every mount point can be made."""
    argv: list[str] = []

    def show(directory: Path) -> None:
        for each in sorted(directory.iterdir()):
            below = [mount for mount in mounts if each in mount.parents]
            if str(each) in ("/proc", "/dev", "/sys", "/tmp") or each in mounts:
                continue
            if each.is_symlink():
                argv.extend(("--symlink", os.readlink(each), str(each)))
            elif any(not mount.exists() for mount in below):
                argv.extend(("--dir", str(each)))
                show(each)
            else:
                argv.extend(("--ro-bind-try", str(each), str(each)))

    show(Path("/"))
    return argv


def container_of(pod: Object, name: str | None = None) -> Object:
    """Return a container of a pod, by default the first; KeyError."""
    for each in pod["spec"]["containers"]:
        if name in (None, "", each["name"]):
            return each  # type: ignore[no-any-return]
    raise KeyError(name)


def _referred(
    store: Store, kind: str, namespace: str, name: str, optional: bool, reason: str
) -> Object | None:
    found = store.find(resources.named(kind), namespace, name)
    if found is None and not optional:
        raise NotYet(reason, f'{kind.removesuffix("s")} "{name}" not found')
    return found


def _contents(each: Object) -> dict[str, bytes]:
    if each["kind"] == "Secret":
        return {k: base64.b64decode(v) for k, v in (each.get("data") or {}).items()}
    binary = {k: base64.b64decode(v) for k, v in (each.get("binaryData") or {}).items()}
    return {k: v.encode() for k, v in (each.get("data") or {}).items()} | binary


def environment(store: Store, pod: Object, container: Object) -> dict[str, str]:
    """Return the variables of a container; NotYet while a reference cannot be resolved."""
    env: dict[str, str] = {}
    namespace, reason = pod["metadata"]["namespace"], "CreateContainerConfigError"
    for each in container.get("envFrom") or []:
        for kind, ref in (("secrets", each.get("secretRef")), ("configmaps", each.get("configMapRef"))):
            if ref and (found := _referred(store, kind, namespace, ref["name"], ref.get("optional"), reason)):
                prefix = each.get("prefix") or ""
                env |= {prefix + k: v.decode() for k, v in _contents(found).items()}
    for each in container.get("env") or []:
        source = each.get("valueFrom") or {}
        if ref := source.get("secretKeyRef") or source.get("configMapKeyRef"):
            kind = "secrets" if "secretKeyRef" in source else "configmaps"
            found = _referred(store, kind, namespace, ref["name"], ref.get("optional"), reason)
            value = _contents(found).get(ref["key"]) if found else None
            if value is None and not ref.get("optional"):
                raise NotYet(reason, f"couldn't find key {ref['key']} in {kind} {namespace}/{ref['name']}")
            if value is not None:
                env[each["name"]] = value.decode()
        elif path := (source.get("fieldRef") or {}).get("fieldPath"):
            env[each["name"]] = _field(pod, path)
        elif not source:
            text = each.get("value") or ""
            env[each["name"]] = re.sub(r"\$\((\w+)\)", lambda hit: env.get(hit[1], hit[0]), text)
    return env


def _field(pod: Object, path: str) -> str:
    if found := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str((pod["metadata"].get(found[1]) or {}).get(found[2], ""))
    value: Any = pod
    for name in path.split("."):
        value = (value or {}).get(name)
    return str(value or "")


@dataclass
class Volumes:
    """The directories of volumes: `directory` is the double's own."""

    store: Store
    directory: Path

    def claim(self, namespace: str, name: str) -> Path:
        """Return the directory behind a PersistentVolumeClaim."""
        path = self.directory / "claims" / namespace / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def mounts(self, pod: Object, container: Object) -> Iterator[tuple[Path, str]]:
        """Yield (directory or file here, path inside) of a container's mounts; NotYet."""
        volumes = {each["name"]: each for each in pod["spec"].get("volumes") or []}
        for mount in container.get("volumeMounts") or []:
            if mount["mountPath"] == "/dev/shm":  # each pod has its own
                continue
            source = self._volume(pod, volumes[mount["name"]])
            if below := mount.get("subPath"):
                source = source / below
                if not source.exists():
                    source.mkdir(parents=True)
            yield source, os.path.realpath(mount["mountPath"])  # /var/run is a link here

    def _volume(self, pod: Object, volume: Object) -> Path:
        namespace = pod["metadata"]["namespace"]
        path = self.home(pod) / "volumes" / volume["name"]
        if "hostPath" in volume:
            host = self.directory / "host" / volume["hostPath"]["path"].strip("/")
            host.mkdir(parents=True, exist_ok=True)
            return host
        if claim := volume.get("persistentVolumeClaim"):
            _referred(
                self.store, "persistentvolumeclaims", namespace, claim["claimName"], False, "Unschedulable"
            )
            return self.claim(namespace, claim["claimName"])
        path.mkdir(parents=True, exist_ok=True)
        sources = (volume.get("projected") or {}).get("sources") or [volume]
        for source in sources:
            for kind, word in (("secrets", "secret"), ("configmaps", "configMap")):
                if word in source:
                    self._files(path, kind, source[word], namespace, volume)
        return path

    def _files(self, path: Path, kind: str, source: Object, namespace: str, volume: Object) -> None:
        name = source.get("secretName") or source["name"]
        found = _referred(
            self.store, kind, namespace, name, source.get("optional", False), "ContainerCreating"
        )
        contents = _contents(found) if found else {}
        items = source.get("items") or [{"key": each, "path": each} for each in contents]
        for each in items:
            if each["key"] not in contents:
                raise NotYet("ContainerCreating", f"references non-existent config key: {each['key']}")
            file = path / each["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(contents[each["key"]])
            file.chmod(each.get("mode") or source.get("defaultMode") or volume.get("defaultMode") or 0o644)

    def home(self, pod: Object) -> Path:
        """Return the directory of a pod's own files."""
        return self.directory / "pods" / pod["metadata"]["uid"][:8]


async def start(volumes: Volumes, pod: Object, container: Object, env: dict[str, str]) -> Container:
    """Start the machine of a container; NotYet while a volume cannot be made."""
    home = volumes.home(pod)
    for name in ("tmp", "root"):
        (home / name).mkdir(parents=True, exist_ok=True)
    binds = [(home / "tmp", "/tmp"), (home / "root", str(_HOME)), *volumes.mounts(pod, container)]
    path = f"{sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    known = {"PATH": path, "HOSTNAME": pod["metadata"]["name"], "LANG": "C.UTF-8", **env}
    made = Container(
        pod["metadata"]["uid"], Path("/"), env=known, workdir=container.get("workingDir") or "/", binds=binds
    )
    await made.start()
    return made


async def remove(volumes: Volumes, pod: Object) -> None:
    """Remove a pod's own files."""
    await asyncio.to_thread(shutil.rmtree, volumes.home(pod), ignore_errors=True)
