"""Older deployments of Ray on a host: other clusters that are known there, Ray's processes, containers."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shutil
import subprocess
import time
from typing import Any

from rollhook_ray.clusters_node import (
    Process,
    Refused,
    arguments,
    belonging,
    below,
    clusters_directory,
    command,
    end,
    end_node,
    forget,
    locked,
    process,
    states_here,
)

_SESSION = re.compile(r"(/[^\s=:]+/session_\d{4}-[0-9_-]+)")
_RAY_PROGRAM = re.compile(
    r"ray/core/src/ray/|ray/dashboard/|/log_monitor\.py|/autoscaler/_private/monitor\.py"
)


def find_old(
    cluster: str, nonce: str, wanted: dict[str, Any], table: dict[int, Process], ours: set[int]
) -> list[dict[str, Any]]:
    """Return what else of Ray is on this host: other clusters that are known, Ray's processes, containers."""
    found = []
    for path in sorted(glob.glob(os.path.join(clusters_directory(), "*", "nodes"))):
        name = os.path.basename(os.path.dirname(path))
        states = [each for each in states_here(name).values() if name != cluster or each["nonce"] != nonce]
        groups = [belonging(each, table) for each in states]
        ours = ours | {each.pid for group in groups for each in group}
        if states:
            count = sum(map(len, groups))
            names = ", ".join(each["node"] for each in states)
            when = time.strftime("%Y-%m-%d at %H:%M", time.localtime(states[0]["started"]))
            text = f"cluster {name} ({names}), brought up by {states[0]['from']} on {when}, {count} processes"
            nodes = [[each["node"], each["nonce"]] for each in states]
            found.append({"kind": "cluster", "text": text, "cluster": name, "nodes": nodes})
    sessions: dict[str, set[int]] = {}
    for each in table.values():
        line = command(each.pid) if each.user == os.getuid() and each.pid not in ours else ""
        match = _SESSION.search(line)
        if match and _RAY_PROGRAM.search(line) and fnmatch.fnmatch(match[1], wanted["sessions"]):
            sessions.setdefault(match[1], set()).add(each.pid)
    for session, roots in sorted(sessions.items()):
        parents = {table[pid].parent for pid in roots} & set(table)
        roots |= {pid for pid in parents if _is_ray_start(arguments(pid))}
        group = below(roots, table) - ours - {os.getpid()}
        starters = {table[pid].parent for pid in roots} - group - {0, 1}
        by = "".join(f", started by process {pid} ({command(pid)[:80]})" for pid in sorted(starters)[:1])
        text = f"Ray in {session}, {len(group)} processes{by}"
        found.append({
            "kind": "ray", "text": text, "processes": [[pid, table[pid].ticks] for pid in sorted(group)],
        })  # fmt: skip
    return found + _old_containers(wanted["containers"])


def _is_ray_start(argv: list[str]) -> bool:
    """Return whether it is `ray start --block`, not a shell or a driver that has started Ray."""
    by_module = argv[1:4] == ["-m", "ray.scripts.scripts", "start"]
    return by_module or (len(argv) > 2 and os.path.basename(argv[1]) == "ray" and argv[2] == "start")


def _old_containers(patterns: list[str]) -> list[dict[str, Any]]:
    for program in ("docker", "podman"):
        if not patterns or shutil.which(program) is None:
            continue
        form = "{{.ID}}\t{{.Names}}\t{{.Image}}\t{{.Status}}"
        try:
            answer = subprocess.run(
                [program, "ps", "--all", "--format", form],
                capture_output=True, text=True, timeout=20, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            continue
        rows = [line.split("\t") for line in answer.stdout.splitlines() if line.count("\t") == 3]
        return [
            {"kind": "container", "program": program, "id": ident,
             "text": f"container {name} of {image} ({status})"}
            for ident, name, image, status in rows
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        ] if answer.returncode == 0 else []  # fmt: skip
    return []


def remove_old(request: dict[str, Any]) -> list[str]:
    """Remove older deployments that `probe` has named, and nothing that has come since."""
    removed = []
    for each in request["old"]:
        if each["kind"] == "cluster":
            states = states_here(each["cluster"])
            for node, nonce in each["nodes"]:
                if states.get(node, {}).get("nonce") == nonce:
                    with locked(each["cluster"], node):
                        end_node(states[node])
            forget(each["cluster"])
        elif each["kind"] == "ray":
            meant = [process(pid) for pid, ticks in each["processes"]]
            known = {(pid, ticks) for pid, ticks in each["processes"]}
            end([p for p in meant if p is not None and (p.pid, p.ticks) in known], request["stop_seconds"])
        else:
            answer = subprocess.run(
                [each["program"], "rm", "--force", each["id"]], capture_output=True, text=True, check=False
            )  # fmt: skip
            if answer.returncode:
                raise Refused("{} was not removed: {}".format(each["text"], answer.stderr.strip()[-300:]))
        removed.append(each["text"])
    return removed
