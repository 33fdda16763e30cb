"""Before verl's trainer starts: does the code come from where the job spec says, on every node?

    python3 precheck.py CODE_PATH PACKAGE PATH...

Needs the standard library, and Ray to ask the other nodes. Ends with 0, or with 1 and a sentence per problem.
"""

# ruff: noqa: T201 - what it prints is read by people in the job's log
from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

MARKER = "mvp_marker"
#: what the workers of a busy cluster may take to start
SECONDS = 120


def look(code_path: str, package: str, paths: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return where a package comes from here, the marker beside it, and what is wrong, in sentences."""
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(package)
    origin = (spec.origin or "") if spec is not None else ""
    try:
        marker = str(importlib.import_module(MARKER).MARKER)
    except (ImportError, AttributeError):
        marker = ""
    wrong = [f"{path} is not there" for path in [code_path, *paths] if not os.path.exists(path)]
    if not origin:
        wrong.append(f"there is no package {package}")
    elif not os.path.realpath(origin).startswith(os.path.realpath(code_path) + os.sep):
        wrong.append(f"{package} is imported from {origin}, not from {code_path}")
    if marker and marker != os.path.basename(code_path):
        wrong.append(f"{MARKER} says {marker}, and {code_path} was asked for")
    return origin, marker, wrong


def everywhere(code_path: str, package: str, paths: Sequence[str]) -> dict[str, list[str]]:
    """Return what is wrong on each node that has CPUs: its address -> sentences."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(log_to_driver=False, logging_level="ERROR")
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    asked: dict[Any, str] = {}
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU"):
            place = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
            reference = task.options(scheduling_strategy=place).remote(code_path, package, paths)
            asked[reference] = node["NodeManagerAddress"]
    answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=SECONDS)
    said = {asked[each]: [f"gave no answer within {SECONDS} s"] for each in late}
    for each in answered:
        try:
            said[asked[each]] = ray.get(each)[2]
        except ray.exceptions.RayError as error:
            said[asked[each]] = [" ".join(str(error).split())]
    return said


def main(code_path: str, package: str, *paths: str) -> int:
    """Say what was found, and return the exit code."""
    origin, marker, wrong = look(code_path, package, paths)
    print(f"MVP_PRECHECK_{package.upper()}_FILE={origin or 'none'}")
    print(f"MVP_PRECHECK_MARKER={marker or 'none'}", flush=True)
    if importlib.util.find_spec("ray") is None:
        wrong.append(f"python3, which is {sys.executable}, has no Ray: let `setup` put the right one on PATH")
    wrong = [f"{each} (on {socket.gethostname()})" for each in wrong]
    if not wrong:
        importlib.import_module(package)
        nodes = everywhere(code_path, package, [*paths, os.environ["ROLLHOOK_JOB_DIR"]])
        print(f"MVP_PRECHECK_NODES={','.join(sorted(nodes))}", flush=True)
        wrong = [f"{each} (on {node})" for node, said in sorted(nodes.items()) for each in said]
    for each in wrong:
        print(f"precheck: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
