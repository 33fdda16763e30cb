"""Which plugins are installed, from metadata alone: nothing here imports a plugin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, entry_points
from pathlib import Path

GROUP = "rollhook"

#: kind -> how its components are called when there are several
KINDS = {
    "sandbox": "sandboxes",
    "environment": "environments",
    "agent": "agents",
    "router": "router policies",
    "engine": "engines",
    "trainer": "trainers",
    "launcher": "launchers",
    "tracker": "trackers",
    "pack": "packs",
    "plugin": "observer plugins",
    "command": "commands",
}


@dataclass(frozen=True)
class EntryInfo:
    """One entry point of a plugin. `requires` are the distribution's requirements, as its metadata says."""

    kind: str
    name: str
    module: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The entry point's name."""
        return f"{self.kind}.{self.name}"


def installed() -> list[EntryInfo]:
    """Return every entry point of the group `rollhook`, sorted by name, duplicates included."""
    found = []
    read: dict[int, tuple[str, str, tuple[str, ...]]] = {}
    for point in entry_points(group=GROUP):
        kind, _, name = point.name.partition(".")
        if id(point.dist) not in read:
            read[id(point.dist)] = _about(point.dist)
        found.append(EntryInfo(kind, name, point.value, *read[id(point.dist)]))
    return sorted(found, key=lambda entry: (entry.full_name, entry.distribution))


def _about(distribution: Distribution | None) -> tuple[str, str, tuple[str, ...]]:
    """Return name, version and requirements; reading a distribution's metadata is what takes the time."""
    if distribution is None:
        return "", "", ()
    metadata = distribution.metadata
    return metadata["Name"], metadata["Version"], tuple(metadata.get_all("Requires-Dist") or ())


def claimed_twice(entries: Iterable[EntryInfo]) -> dict[tuple[str, str], list[EntryInfo]]:
    """Return the names that more than one distribution claims."""
    by_name: dict[tuple[str, str], list[EntryInfo]] = {}
    for entry in entries:
        by_name.setdefault((entry.kind, entry.name), []).append(entry)
    return {key: found for key, found in by_name.items() if len(found) > 1}


def known_plugins() -> Mapping[str, Mapping[str, str]]:
    """Return the plugins that this version knows of: kind -> name -> distribution."""
    import tomllib
    from importlib import resources

    text = resources.files("rollhook").joinpath("known_plugins.toml").read_text("utf-8")
    return tomllib.loads(text)


def editable_directory(distribution: str) -> str:
    """Return the directory that `pip install -e` installed a distribution from, else an empty string."""
    import json
    from urllib.parse import unquote, urlparse

    try:
        origin = json.loads(Distribution.from_name(distribution).read_text("direct_url.json") or "{}")
        editable = origin.get("dir_info", {}).get("editable", False)
    except (PackageNotFoundError, ValueError, AttributeError):
        return ""
    return unquote(urlparse(origin["url"]).path) if editable else ""


def pip_command(distribution: str) -> str:
    """Return the command that installs a known distribution: from the checkout when core runs in one."""
    root = Path(__file__).resolve().parents[3]
    short = distribution.removeprefix("rollhook-")
    for folder in ("plugins", "envs"):
        if (root / folder / short / "pyproject.toml").is_file() and (root / "core").is_dir():
            return f"pip install -e {root / folder / short}"
    return f"pip install {distribution}"


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the choice that `word` most likely means, or an empty string."""
    import difflib

    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)), "")
