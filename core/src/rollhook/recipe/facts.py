"""What a lock records of where it is written: versions, revisions, and digests of what a run reads."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rollhook
from rollhook import packs
from rollhook.errors import RollhookError
from rollhook.installed import editable_directory
from rollhook.recipe import paths
from rollhook.recipe.digests import digest_files, digest_of

if TYPE_CHECKING:
    from rollhook.plugins import Plugins
    from rollhook.recipe.load import Loaded
    from rollhook.recipe.schema import Recipe

#: what a placeholder in place of the result of a needed recipe begins with
_NEEDS = "needs:"


def distributions(plugins: Plugins) -> list[str]:
    """Return the distributions that supply a recipe's parts, `rollhook` first."""
    loaded = {plugins.distribution(kind, name)[0] for kind, name in plugins.loaded()}
    return ["rollhook", *sorted(loaded - {"rollhook"})]


def versions(plugins: Plugins) -> dict[str, str]:
    """Return the versions that decide numbers: Python, the loaded distributions, and what these require.

    From metadata alone. What `rollhook` itself requires reads recipes and draws tables, so only the extras
    that a distribution asks of it count.
    """
    loaded = distributions(plugins)
    libraries = {name for each in loaded[1:] for name in _required(each)} - set(loaded)
    found = {"python": platform.python_version(), "rollhook": rollhook.__version__}
    return found | {name: here for name in [*loaded[1:], *sorted(libraries)] if (here := version_here(name))}


def version_here(name: str) -> str:
    """Return the version of a distribution, or of Python, that is here; empty where it is not installed."""
    if name == "python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def revisions(names: Iterable[str]) -> list[dict[str, Any]]:
    """Return the git revisions that distributions installed in editable mode stand at, and whose they are.

    `dirty`: the checkout holds changes that are in no revision. No path of this machine is in it.
    """
    found: dict[tuple[str, bool], list[str]] = {}
    by_root: dict[str, tuple[str, bool] | None] = {}
    for name in names:
        directory = editable_directory(name)
        root = _git(directory, "rev-parse", "--show-toplevel") if directory else ""
        if not root:
            continue
        if root not in by_root:
            commit = _git(root, "rev-parse", "HEAD")
            by_root[root] = (commit, bool(_git(root, "status", "--porcelain"))) if commit else None
        at = by_root[root]
        if at is not None:
            found.setdefault(at, []).append(name)
    return [{"commit": c, "dirty": dirty, "distributions": of} for (c, dirty), of in found.items()]


def digests(loaded: Loaded, plugins: Plugins) -> dict[str, str | None]:
    """Return the digests of what the recipe names, by key; None for what is not here. Reads files.

    Tasks and needed recipes are those that `check` met; a model of the hub, known by name only, has none.
    """
    recipe = loaded.recipe
    found: dict[str, str | None] = {key: loaded.met.get(key) for key in task_keys(loaded)}
    found |= {key: digest for key, digest in loaded.met.items() if key.startswith("needs.")}
    if recipe.model is not None and recipe.model.init is not None:
        found["model.init"] = digest_of(recipe.model.init.model_dump(mode="json"))
    named = {key: str(value) for key, value in named_files(recipe).items()}
    for path, value in paths.leaves(loaded.resolved):
        if isinstance(value, str) and value.startswith(packs.PREFIX):
            named[paths.text(path)] = value
    for key, value in sorted(named.items()):
        if key in loaded.unresolved or value.startswith(_NEEDS):
            continue
        if value.startswith(packs.PREFIX):
            found[key] = _pack(value, plugins)
        elif not (key == "model.path" and is_hub_name(value)):
            found[key] = digest_files(Path(value).expanduser())
    return found


def named_files(recipe: Recipe) -> dict[str, str]:
    """Return the core's keys that name a file or directory, and what they name."""
    model = recipe.model
    named = {"checkpoint.load_from": recipe.checkpoint.load_from}
    if model is not None:
        named |= {"model.path": model.path, "model.chat_template": model.chat_template}
        if isinstance(model.tokenizer, str):
            named["model.tokenizer"] = model.tokenizer
        elif model.tokenizer is not None:
            named["model.tokenizer.train"] = model.tokenizer.train
    return {key: name for key, name in named.items() if name is not None}


def is_hub_name(name: str) -> bool:
    """`owner/name` is a model of the hub, not a path, unless it is written like one or is here."""
    return not name.startswith(("/", ".", "~")) and name.count("/") <= 1 and not Path(name).exists()


def task_keys(loaded: Loaded) -> list[str]:
    """Return the keys of the digests of tasks: those of each environment, a split of it in each."""
    recipe = loaded.recipe
    several = isinstance(loaded.resolved.get("environment"), list)
    keys = []
    for index, use in enumerate(recipe.environment):
        splits = [use.split, *([recipe.evaluation.split] if recipe.evaluation.every else [])]
        keys += [tasks_key(f"environment.{index}" if several else "environment", split) for split in splits]
    return list(dict.fromkeys(keys))


def tasks_key(environment: str, split: str) -> str:
    """Return the key of the digest of a split, e.g. `environment.tasks.train`."""
    return f"{environment}.tasks.{split}"


def _pack(reference: str, plugins: Plugins) -> str | None:
    """Return the digest of a pack's generator and keys and the file named in it; nothing is generated."""
    try:
        parsed = packs.parse_reference(reference)
        assert parsed is not None
        plugins.add([("pack", parsed.name)])
        return digest_of([packs.build(parsed.name, parsed.keys, plugins).digest(), parsed.file])
    except RollhookError:
        return None


def _required(distribution: str) -> Iterator[str]:
    """Yield what a distribution requires here, and what the extras of `rollhook` do that it asks for."""
    for requirement in _requirements(distribution):
        if requirement.name != "rollhook":
            yield canonicalize_name(requirement.name)
        for extra in sorted(requirement.extras) if requirement.name == "rollhook" else ():
            yield from (canonicalize_name(each.name) for each in _requirements("rollhook", extra))


def _requirements(distribution: str, extra: str = "") -> Iterator[Requirement]:
    """Yield what a distribution requires on this machine, or what one of its extras adds."""
    try:
        listed = requires(distribution) or []
    except PackageNotFoundError:
        return
    for requirement in map(Requirement, listed):
        marker = requirement.marker
        of_an_extra = marker is not None and "extra" in str(marker)
        if of_an_extra == bool(extra) and (marker is None or marker.evaluate({"extra": extra})):
            yield requirement


def _git(directory: str, *arguments: str) -> str:
    """Return what git says, or an empty string where there is no git or no checkout."""
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", directory, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
