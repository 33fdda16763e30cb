"""A pod to work in beside the clusters: its manifest, its secrets, its rights."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollhook.errors import LauncherError, UsageError
from rollhook_kuberay.config import KubeRayLauncherConfig
from rollhook_kuberay.heads import waiting
from rollhook_kuberay.marks import MANAGED, OWNER
from rollhook_kuberay.port import KubeError, Object, Port, wait_for
from rollhook_kuberay.render import Renderer
from rollhook_kuberay.site import Site

USER_SECRETS = "/var/run/rollhook/user-secrets"
_GPU_LABEL = "nvidia.com/gpu.product"
_ROLES = {"edit", "admin", "cluster-admin"}
#: keys and configurations go where programs look for them; nothing is fetched or installed
_START = f"""\
umask 077
mkdir -p ~/.ssh ~/.config/rclone
for file in {USER_SECRETS}/ssh-*; do
    [ -f "$file" ] && cp "$file" ~/.ssh/"$(basename "$file" | cut -c5-)"
done
[ -f {USER_SECRETS}/rclone.conf ] && cp {USER_SECRETS}/rclone.conf ~/.config/rclone/rclone.conf
exec sleep infinity
"""


def pod_name(user: str) -> str:
    """Return the name of a user's pod."""
    return f"{user}-dev-pod"


def secret_name(user: str) -> str:
    """Return the name of a user's Secret."""
    return f"{user}-secrets"


def manifest(keys: KubeRayLauncherConfig, user: str) -> Object:
    """Return the pod: on a node without GPUs, with the recipe's mounts and the user's secrets."""
    renderer = Renderer(keys, user)
    secrets = secret_name(user)
    container: Object = {
        "name": "dev",
        "image": keys.image,
        "command": ["bash", "-c", _START],
        "env": [{"name": "USER", "value": user}, {"name": "ROLLHOOK_USER", "value": user}],
        "envFrom": [{"secretRef": {"name": secrets, "optional": True}}],
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "5", "memory": "10Gi"},
        },
    }  # fmt: skip
    none = [{"key": _GPU_LABEL, "operator": "DoesNotExist"}]
    required = {"nodeSelectorTerms": [{"matchExpressions": none}]}
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
        "containers": [container],
    }
    renderer.patch_common(spec)
    renderer.patch_volumes(spec, container)
    volume = {
        "name": "rollhook-user",
        "secret": {"secretName": secrets, "optional": True, "defaultMode": 0o400},
    }
    spec["volumes"] = [*(spec.get("volumes") or []), volume]
    mount = {"name": "rollhook-user", "mountPath": USER_SECRETS, "readOnly": True}
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), mount]
    metadata = renderer.metadata(pod_name(user), extra={"rollhook/component": "dev-pod"})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


async def connect(site: Site, port: Port, say: Callable[[str], None], seconds: float = 240.0) -> str:
    """Find the pod or make it, wait until it runs, and return its name."""
    await check_rights(site.keys, port, say)
    wanted = manifest(site.keys, site.user)
    name = wanted["metadata"]["name"]
    live = await port.get("Pod", name)
    if live is not None and (live.get("status") or {}).get("phase") in ("Failed", "Succeeded"):
        phase = live["status"]["phase"]
        raise LauncherError(
            f"the pod {name} has {phase.lower()}; `rollhook dev stop`, then connect again", kind="user"
        )
    if live is None:
        await port.create(wanted)
        say(f"the pod {name} was created")
    elif (image := live["spec"]["containers"][0]["image"]) != site.keys.image:
        say(f"the pod {name} has the image {image}; `rollhook dev stop` first for {site.keys.image}")
    try:
        await wait_for(port, "Pod", name, _settled, seconds=seconds, poll_seconds=site.keys.poll_seconds)
    except TimeoutError as error:
        live = await port.get("Pod", name)
        why = waiting(live) if live else "it is gone"
        raise TimeoutError(
            f"the pod {name} does not run after {seconds:.0f} s: {why or 'no reason given'}"
        ) from error
    live = await port.get("Pod", name)
    if live is None or live["status"]["phase"] != "Running":
        raise LauncherError(f"the pod {name} has ended; `kubectl logs {name}` may say why")
    return str(name)


def _settled(live: Object | None) -> bool:
    return live is None or (live.get("status") or {}).get("phase") in ("Running", "Failed", "Succeeded")


async def store_secrets(port: Port, user: str, values: Mapping[str, bytes]) -> str:
    """Put values into the user's Secret beside those that are there, and return its name."""
    name = secret_name(user)
    data = {key: base64.b64encode(value).decode() for key, value in values.items()}
    if await port.get("Secret", name) is None:
        metadata = {"name": name, "labels": {**MANAGED, OWNER: user}}
        secret = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}
        await port.create(secret)
    else:
        await port.patch("Secret", name, {"data": data})
    return name


def secret_key(name: str) -> str:
    """Return a name that a Secret's key may have. Raises UsageError."""
    if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", name):
        raise UsageError("a name of a secret has letters, digits, -, _ and . only")
    return name


async def check_rights(keys: KubeRayLauncherConfig, port: Port, say: Callable[[str], None]) -> None:
    """Say what is missing for work with the cluster from inside the pod."""
    account = keys.service_account or "default"
    try:
        bindings = await port.list("RoleBinding")
    except KubeError as error:
        if error.status != 403:
            raise
        say(f"who may do what in {port.namespace} cannot be read, so the rights of {account} are not known")
        return
    if not any(_binds(each, account) for each in bindings):
        say(
            f"the service account {account} may not work with {port.namespace} from inside the pod; "
            f"someone who may has to apply:\n{binding(account, port.namespace)}"
        )


def _binds(live: Mapping[str, Any], account: str) -> bool:
    subjects = live.get("subjects") or []
    named = any(each.get("kind") == "ServiceAccount" and each.get("name") == account for each in subjects)
    return named and (live.get("roleRef") or {}).get("name") in _ROLES


def binding(account: str, namespace: str) -> str:
    """Return the YAML that lets a service account edit its namespace."""
    return f"""\
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: {account}-rollhook-edit, namespace: {namespace}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}}
subjects: [{{kind: ServiceAccount, name: {account}, namespace: {namespace}}}]
"""
