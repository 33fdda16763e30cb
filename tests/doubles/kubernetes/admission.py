"""What the API server checks and fills in before it stores an object."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from typing import Any

from doubles.kubernetes import errors, schema
from doubles.kubernetes.resources import Resource

Object = dict[str, Any]
Fault = tuple[str, str, str]

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DNS1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?\d+))?")


def admit(resource: Resource, new: Object, old: Object | None, subresource: str = "") -> list[str]:
    """Prune, default and check an object in place; return the paths that were pruned. ApiError 422."""
    new["apiVersion"], new["kind"] = resource.api_version, resource.kind
    pruned: list[str] = []
    faults: list[Fault] = list(_metadata(resource, new)) if not subresource else []
    if resource.group == "ray.io":
        root = schema.root(resource.plural)
        pruned = schema.prune(new, root)
        schema.default(new, root)
        faults += schema.check(new, root, old)
    elif not subresource:
        if resource.kind == "Pod":
            spec = schema.child(schema.pod_template(), "spec") or {}
            pruned = [f"spec.{each}" for each in schema.prune(new.get("spec"), spec)]
            faults += _pod(new.get("spec"), "spec", spec, old)
        elif resource.kind in ("Deployment", "Job"):
            pruned = _workload(new, faults, old)
        elif resource.kind == "Service":
            faults += _service(new, old)
        elif resource.kind in ("Secret", "ConfigMap"):
            faults += _contents(new, old)
    if problem := errors.invalid(resource, new["metadata"].get("name", ""), faults):
        raise problem
    return pruned


def _metadata(resource: Resource, new: Object) -> Iterator[Fault]:
    meta = new["metadata"]
    name = meta.get("name") or ""
    if not name and not meta.get("generateName"):
        yield "FieldValueRequired", "metadata.name", "Required value: name or generateName is required"
    elif name:
        told = f'Invalid value: "{name}": '
        if resource.kind == "Service" and (not _DNS1035.fullmatch(name) or len(name) > 63):
            yield (
                "FieldValueInvalid",
                "metadata.name",
                told
                + "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an "
                "alphabetic character, and end with an alphanumeric character",
            )
        elif resource.group != "rbac.authorization.k8s.io" and (
            not _SUBDOMAIN.fullmatch(name) or len(name) > 253
        ):
            yield (
                "FieldValueInvalid",
                "metadata.name",
                told + "a lowercase RFC 1123 subdomain must consist of lower case alphanumerics, '-' or '.'",
            )
    for key, value in (meta.get("labels") or {}).items():
        if not _LABEL_KEY.fullmatch(key) or len(key.rpartition("/")[2]) > 63:
            told = f"Invalid value: \"{key}\": name part must consist of alphanumerics, '-', '_' or '.'"
            yield "FieldValueInvalid", "metadata.labels", told
        if not isinstance(value, str) or len(value) > 63 or not _LABEL.fullmatch(value):
            told = (
                f'Invalid value: "{value}": a valid label must be an empty string or consist of alphanumeric'
            )
            yield "FieldValueInvalid", "metadata.labels", f"{told} characters, '-', '_' or '.', 63 at most"
    for key, value in (meta.get("annotations") or {}).items():
        if not isinstance(value, str):
            yield "FieldValueInvalid", f"metadata.annotations.{key}", "Invalid value: must be a string"


def _pod(spec: Any, path: str, shape: schema.Schema, old: Object | None = None) -> Iterator[Fault]:
    if not isinstance(spec, dict):
        yield "FieldValueRequired", f"{path}.containers", "Required value"
        return
    schema.default(spec, shape)
    if wrong := list(schema.check(spec, shape, None, path)):
        yield from wrong
        return
    if not spec.get("containers"):
        yield "FieldValueRequired", f"{path}.containers", "Required value"
        return
    for name, value in (
        ("restartPolicy", "Always"), ("dnsPolicy", "ClusterFirst"), ("terminationGracePeriodSeconds", 30),
        ("schedulerName", "default-scheduler"), ("serviceAccountName", "default"), ("securityContext", {}),
        ("enableServiceLinks", True),
    ):  # fmt: skip
        spec.setdefault(name, value)
    volumes = {each.get("name") for each in spec.get("volumes") or []}
    for kind in ("initContainers", "containers"):
        for number, each in enumerate(spec.get(kind) or []):
            here = f"{path}.{kind}[{number}]"
            if not each.get("image"):
                yield "FieldValueRequired", f"{here}.image", "Required value"
            latest = each.get("image", "").rpartition("/")[2].partition(":")[2] in ("", "latest")
            each.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
            each.setdefault("terminationMessagePath", "/dev/termination-log")
            each.setdefault("terminationMessagePolicy", "File")
            each.setdefault("resources", {})
            yield from _container(each, here, volumes)
    if old is not None and _frozen(old["spec"]) != _frozen(spec):
        told = "Forbidden: pod updates may not change fields other than `spec.containers[*].image`"
        yield "FieldValueForbidden", "spec", told


def _container(each: Object, here: str, volumes: set[Any]) -> Iterator[Fault]:
    for number, mount in enumerate(each.get("volumeMounts") or []):
        if mount.get("name") not in volumes:
            yield (
                "FieldValueNotFound",
                f"{here}.volumeMounts[{number}].name",
                f'Not found: "{mount.get("name")}"',
            )
    for kind in ("requests", "limits"):
        for name, value in (each["resources"].get(kind) or {}).items():
            if not _QUANTITY.fullmatch(str(value)):
                told = f'Invalid value: "{value}": quantities must match the regular expression'
                yield "FieldValueInvalid", f"{here}.resources.{kind}[{name}]", told
    for name in each["resources"].get("limits") or {}:
        each["resources"].setdefault("requests", {}).setdefault(name, each["resources"]["limits"][name])


def _frozen(spec: Object) -> Object:
    free = {
        name: value
        for name, value in spec.items()
        if name not in ("tolerations", "activeDeadlineSeconds", "nodeName")
    }
    free["containers"] = [{k: v for k, v in each.items() if k != "image"} for each in spec["containers"]]
    return free


def _workload(new: Object, faults: list[Fault], old: Object | None) -> list[str]:
    spec = new.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("template"), dict):
        faults.append(("FieldValueRequired", "spec.template", "Required value"))
        return []
    pruned = [f"spec.template.{each}" for each in schema.prune(spec["template"], schema.pod_template())]
    shape = schema.child(schema.pod_template(), "spec") or {}
    if new["kind"] == "Job":
        spec["template"].setdefault("spec", {}).setdefault("restartPolicy", "Never")
        spec.setdefault("backoffLimit", 6)
    faults += _pod(spec["template"].get("spec"), "spec.template.spec", shape)
    if new["kind"] == "Deployment":
        spec.setdefault("replicas", 1)
        spec.setdefault(
            "strategy",
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}},
        )
        spec.setdefault("revisionHistoryLimit", 10)
        spec.setdefault("progressDeadlineSeconds", 600)
        wanted = (spec.get("selector") or {}).get("matchLabels") or {}
        have = (spec["template"].get("metadata") or {}).get("labels") or {}
        if not wanted:
            faults.append(("FieldValueRequired", "spec.selector", "Required value"))
        elif not wanted.items() <= have.items():
            told = f"Invalid value: {have}: `selector` does not match template `labels`"
            faults.append(("FieldValueInvalid", "spec.template.metadata.labels", told))
        if old is not None and old["spec"].get("selector") != spec.get("selector"):
            faults.append(("FieldValueInvalid", "spec.selector", "Invalid value: field is immutable"))
    return pruned


def _service(new: Object, old: Object | None) -> Iterator[Fault]:
    spec = new.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    if old is not None and "clusterIP" in old["spec"]:
        spec.setdefault("clusterIP", old["spec"]["clusterIP"])
    if not spec.get("ports") and spec.get("clusterIP") != "None" and spec["type"] != "ExternalName":
        yield "FieldValueRequired", "spec.ports", "Required value"
    names = set()
    for number, each in enumerate(spec.get("ports") or []):
        if not isinstance(each.get("port"), int) or not 0 < each["port"] < 65536:
            told = f"Invalid value: {each.get('port')}: must be between 1 and 65535, inclusive"
            yield "FieldValueInvalid", f"spec.ports[{number}].port", told
        each.setdefault("protocol", "TCP")
        each.setdefault("targetPort", each.get("port"))
        if len(spec["ports"]) > 1 and not each.get("name"):
            yield "FieldValueRequired", f"spec.ports[{number}].name", "Required value"
        if each.get("name") in names:
            yield "FieldValueDuplicate", f"spec.ports[{number}].name", f'Duplicate value: "{each["name"]}"'
        if each.get("name"):
            names.add(each["name"])


def _contents(new: Object, old: Object | None) -> Iterator[Fault]:
    if new["kind"] == "Secret":
        new.setdefault("type", "Opaque")
        for name, value in (new.pop("stringData", None) or {}).items():
            new.setdefault("data", {})[name] = base64.b64encode(value.encode()).decode()
    total = 0
    for name, value in (new.get("data") or {}).items():
        if not re.fullmatch(r"[-._a-zA-Z0-9]+", name) or len(name) > 253:
            told = f"Invalid value: \"{name}\": a config key must consist of alphanumerics, '-', '_' or '.'"
            yield "FieldValueInvalid", f"data[{name}]", told
        if not isinstance(value, str):
            yield "FieldValueTypeInvalid", f"data[{name}]", "Invalid value: must be a string"
            continue
        total += len(value)
        if new["kind"] == "Secret":
            try:
                base64.b64decode(value, validate=True)
            except binascii.Error:
                yield "FieldValueInvalid", f"data[{name}]", "Invalid value: illegal base64 data"
    if total > 1 << 20:
        yield "FieldValueTooLong", "data", "Too long: may not be more than 1048576 bytes"
    if old is not None and old.get("immutable") and old.get("data") != new.get("data"):
        yield "FieldValueForbidden", "data", "Forbidden: field is immutable when `immutable` is set"
