"""What the submitting machine knows of the clusters that were brought up from it."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollhook.durable import check_schema
from rollhook.errors import LauncherError
from rollhook_ray import clusters_node
from rollhook_ray.cluster_keys import ClusterKeys


@dataclass
class Record:
    """What the submitting machine knows of a cluster, in `<state>/rollhook/clusters/<name>/cluster.json`.

    `hosts` are all that a node was ever started on; `keys` are `launcher.cluster` as it was brought up.
    """

    name: str
    nonce: str
    keys: dict[str, Any]
    hosts: list[str] = field(default_factory=list)
    address: str = ""
    dashboard: str = ""
    since: float = 0.0
    schema: int = 1


def record_path(name: str) -> Path:
    """Return where a cluster is recorded on this machine."""
    return Path(clusters_node.clusters_directory()) / name / "cluster.json"


def token_path(name: str) -> Path:
    """Return where the token of a cluster that was brought up from this machine is, if it has one."""
    return record_path(name).with_name("token")


def read_record(name: str) -> Record | None:
    """Return what this machine knows of a cluster."""
    path = record_path(name)
    try:
        data = json.loads(path.read_bytes())
        check_schema(data["schema"], Record.schema, path)
        record = Record(**data)
        ClusterKeys.model_validate(record.keys)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = " ".join(str(error).split())
        raise LauncherError(f"{path} cannot be read ({why}); remove it if it is damaged") from error
    # an empty host is this machine; one that begins with - would be an option of ssh
    hosts = isinstance(record.hosts, list) and all(
        isinstance(each, str) and not each.startswith("-") for each in record.hosts
    )
    if record.name != name or not isinstance(record.nonce, str) or not hosts:
        raise LauncherError(f"{path} is no record of cluster {name}; remove it if it is damaged")
    return record


def write_record(record: Record) -> None:
    """Write it, durably, before anything that it says is true."""
    clusters_node.directory(record.name)
    clusters_node.write(str(record_path(record.name)), json.dumps(vars(record), indent=1))


def new_record(keys: ClusterKeys) -> Record:
    """Return the record of a cluster that is to be brought up."""
    return Record(keys.name, secrets.token_hex(16), keys.model_dump(mode="json"), since=time.time())
