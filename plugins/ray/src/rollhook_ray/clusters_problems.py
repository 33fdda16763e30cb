"""What keeps a cluster from coming up, read from what its hosts have answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollhook_ray.clusters_plan import Node, on
from rollhook_ray.clusters_site import Site, called, place


def problems(site: Site) -> list[str]:
    """Return all that keeps the cluster from coming up, a sentence each."""
    found = [
        f"host {called(host)}: {reason}" for host, reason in site.unreachable.items() if on(site.nodes, host)
    ]
    head = site.seen.get(site.nodes[0].host)
    for host, seen in site.seen.items():
        nodes = on(site.nodes, host)
        if nodes:
            found += [f"host {called(host)}: {each}" for each in _problems_of(site, host, seen, nodes, head)]
    places: dict[tuple[str, ...], tuple[str, str]] = {}
    for host, seen in site.seen.items():
        for node in on(site.nodes, host)[:1]:
            other, machine = places.setdefault(place(seen), (host, node.machine))
            if machine != node.machine:
                found.append(
                    f"{called(other)} and {called(host)} are one machine, so that their ports would clash; "
                    "name it the same in launcher.cluster.hosts"
                )
    return found


def _problems_of(
    site: Site, host: str, seen: Mapping[str, Any], nodes: Sequence[Node], head: Mapping[str, Any] | None
) -> list[str]:
    found = []
    python = site.machines[host].python
    if seen["ray"] is None:
        found.append(
            f"{python} has no Ray; `rollhook cluster up --install` puts it there, "
            "or set launcher.cluster.python to one that has it"
        )
    elif head is not None and (seen["ray"], _minor(seen)) != (head["ray"], _minor(head)) and head["ray"]:
        found.append(
            f"it has Ray {seen['ray']} and Python {seen['python']}, and the head has Ray {head['ray']} and "
            f"Python {head['python']}; they have to be the same (--install puts one Ray on all)"
        )
    if not seen["temp"]:
        found.append(f"{site.keys.temp_root} cannot be written; set launcher.cluster.temp_root")
    for node in nodes:
        if node.address not in seen["addresses"]:
            found.append(
                f"{node.address} of {node.name} is not an address of it; "
                "set `address` of its entry in launcher.cluster.hosts"
            )
        there = seen["nodes"].get(node.name)
        if there and there["nonce"] != site.record.nonce and there["left"]:
            found.append(
                f"{node.name} of a cluster that is also called {site.keys.name}, brought up by "
                f"{there['from']}, runs there; choose another launcher.cluster.name, or remove it: "
                "rollhook cluster down --old"
            )
        if site.pid(node) is not None:
            continue
        for busy in seen["busy"]:
            if busy["port"] in node.ports:
                by = f"process {busy['pid']} ({busy['command']})" if busy["pid"] else "another user's process"
                key = f"launcher.cluster.{node.ports[busy['port']]}"
                found.append(
                    f"port {busy['port']} of {node.name} is taken by {by}; set {key} to one that is free, "
                    "or if that is an old deployment of yours: rollhook cluster down --old"
                )
    return found


def _minor(seen: Mapping[str, Any]) -> str:
    return str(seen["python"].rpartition(".")[0])
