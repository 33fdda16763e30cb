"""Throw-away distributions: metadata and modules in a directory that a test puts on `sys.path`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_distribution(
    directory: Path,
    name: str,
    *,
    entry_points: Mapping[str, str],
    modules: Mapping[str, str],
    version: str = "1.0",
    requires: Sequence[str] = (),
) -> None:
    """Write what pip would leave of a distribution: a dist-info directory and its modules, by name."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(metadata) + "\n")
    points = "\n".join(f"{key} = {value}" for key, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[rollhook]\n{points}\n")
    for module, source in modules.items():
        path = directory / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
