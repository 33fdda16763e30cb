"""From a recipe file and overrides to a validated recipe, with everything that is wrong with it at once.

Nothing here imports a plugin: components' own keys are checked by `rollhook.recipe.check`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollhook.installed import nearest
from rollhook.recipe import overrides as parsing
from rollhook.recipe import paths
from rollhook.recipe.interpolate import Resolved, resolve
from rollhook.recipe.problem import Problem, RecipeError
from rollhook.recipe.schema import Recipe
from rollhook.recipe.sources import Sources, gather, point_needs
from rollhook.recipe.start import resolve_start
from rollhook.recipe.tree import Origin, Tree
from rollhook.recipe.validate import validate

#: what the core's keys are where a recipe leaves them out
DEFAULTS = Recipe(name="defaults").model_dump(mode="json")

#: free mappings of the schema, where `key=value` cannot tell a new key from a misspelt one
_FREE = (("needs",), ("model", "init", "sizes"))


@dataclass(frozen=True)
class Deviation:
    """A value that differs from the shipped recipe; `None` where one of the two has no such key."""

    value: Any
    reference: Any
    source: str


@dataclass
class Loaded:
    """A recipe and where it came from. `validated` is None as long as core keys are wrong.

    `resolved` is plain data as written, with interpolations replaced; `origins` maps each key path in it
    to the file and line (or `command line`) that gave it; `layers` to the order of these; `text` is the
    file as given, with the overrides in a comment. `pending`: recipes under `needs` have yet to run.
    `locked` is what a lock says of the machine it was written on; `met` are digests of tasks and needed
    recipes that `check` met here, `remarks` what differs from the lock and stops nothing.
    """

    validated: Recipe | None
    resolved: dict[str, Any]
    origins: dict[str, str]
    layers: dict[str, int]
    deviations: dict[str, Deviation]
    problems: list[Problem]
    sources: list[str]
    text: str = ""
    unresolved: set[str] = field(default_factory=set)
    from_environment: dict[str, str] = field(default_factory=dict)
    pending: bool = False
    locked: dict[str, Any] | None = None
    met: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        """The validated recipe. Raises RecipeError while its core keys are wrong."""
        if self.validated is None:
            raise RecipeError(self.problems)
        return self.validated

    @property
    def name(self) -> str:
        """How messages call this recipe: its file, not that of its infra."""
        own = [each for each in self.sources if not each.endswith(".infra.yaml")]
        return own[-1] if own else "recipe"

    def defaulted(self) -> dict[str, Any]:
        """Return the resolved data with the components that the core adds where a recipe names none."""
        return self.resolved | {k: DEFAULTS[k] for k in ("router", "launcher") if k not in self.resolved}

    def locate(self, problem: Problem) -> Problem:
        """Return the problem with the file and line that gave its key, where none is named yet.

        A value that came out of an environment variable is shown as the recipe writes it.
        """
        for value, written in self.from_environment.items():
            problem = dataclasses.replace(problem, message=problem.message.replace(value, written))
        if problem.source:
            return problem
        parts = problem.key.split(".")
        for end in range(len(parts), 0, -1):
            key = ".".join(parts[:end])
            inside = next((each for each in self.origins if each == key or each.startswith(f"{key}.")), "")
            if inside:
                return dataclasses.replace(problem, source=self.origins[inside])
        return dataclasses.replace(problem, source=self.name)


def load_recipe(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    needs_results: Mapping[str, Mapping[str, Any]] | None = None,
) -> Loaded:
    """Load a recipe or a lock. Raises RecipeError with all problems if it cannot be used here.

    `needs_results` holds the results of the recipes under `needs` by alias; while one is unknown,
    `${needs.sft.checkpoint}` is the placeholder `needs:sft.checkpoint`.
    """
    loaded = read_recipe(source, overrides, needs_results=needs_results)
    if loaded.problems:
        raise RecipeError(loaded.problems)
    return loaded


def read_recipe(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    needs_results: Mapping[str, Mapping[str, Any]] | None = None,
) -> Loaded:
    """Load a recipe as far as it goes; never raises for what is wrong with it.

    An override `infra=FILE` (or `--infra FILE`) lays an infra file over the recipe's `launcher` section.
    """
    given, overrides = overrides, [text for text in overrides if not text.startswith("infra=")]
    sources = gather(source, [text.removeprefix("infra=") for text in given if text.startswith("infra=")])
    if sources.lock is not None:
        from rollhook.recipe.lock import read_lock

        return read_lock(sources.lock, sources.names[0], overrides, needs_results or {})
    problems = list(sources.problems)
    if sources.broken:
        return Loaded(None, {}, {}, {}, {}, problems, sources.names, sources.text)
    problems += _apply(overrides, sources)
    problems += point_needs(sources.tree)
    point_needs(sources.reference)
    if given:
        sources.text += "\n# overrides:\n" + "".join(f"#   {text}\n" for text in given)
    return _finish(sources, problems, needs_results or {})


def as_written(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return recipe data as the schema wants it: one environment as a list of one."""
    result = dict(data)
    if isinstance(result.get("environment"), Mapping):
        result["environment"] = [result["environment"]]
    if result.get("environment", ()) is None:
        del result["environment"]
    return result


def validate_core(
    data: Mapping[str, Any], unresolved: set[paths.Path]
) -> tuple[Recipe | None, list[Problem]]:
    """Validate the core's keys; values that this machine cannot resolve are not judged."""
    recipe, found = validate(Recipe, as_written(data))
    if isinstance(data.get("environment"), Mapping):
        found = [
            dataclasses.replace(each, key=each.key.replace("environment.0", "environment", 1))
            for each in found
        ]
    found = [
        dataclasses.replace(each, nearest=near) if (near := nearest(each.key, ["extends"])) else each
        for each in found
    ]
    ignored = {paths.text(path) for path in unresolved}
    return recipe, [each for each in found if each.key not in ignored]


def _finish(
    sources: Sources, problems: list[Problem], needs_results: Mapping[str, Mapping[str, Any]]
) -> Loaded:
    tree = sources.tree
    resolved = resolve(tree.data, needs_results, DEFAULTS)
    absent = resolve_start(resolved)
    recipe, wrong = validate_core(resolved.data, resolved.unresolved)
    found = [*resolved.problems, *absent, *wrong]
    loaded = Loaded(
        validated=recipe,
        resolved=resolved.data,
        origins={paths.text(path): origin.source for path, origin in tree.origins.items()},
        layers={paths.text(path): origin.layer for path, origin in tree.origins.items()},
        deviations=_deviations(sources, resolved.data),
        problems=problems,
        sources=sources.names,
        text=sources.text,
        from_environment=_from_environment(resolved),
        unresolved={paths.text(path) for path in resolved.unresolved},
        pending=recipe is not None and not recipe.needs.keys() <= needs_results.keys(),
    )
    loaded.problems += [loaded.locate(problem) for problem in found]
    return loaded


def _from_environment(resolved: Resolved) -> dict[str, str]:
    """Return value -> what the recipe says, for values worth hiding (a short one would garble messages)."""
    found = {}
    for path, written in resolved.raw.items():
        value = paths.get(resolved.data, path)
        if "oc.env" in written and isinstance(value, str) and len(value) >= 4:
            found[value] = written
    return found


def _deviations(sources: Sources, resolved: dict[str, Any]) -> dict[str, Deviation]:
    """Compare with the shipped recipe that this one extends or is; else with the file before overrides."""
    here = dict(paths.leaves(sources.tree.data))
    reference = dict(paths.leaves(sources.reference.data))
    defaults = dict(paths.leaves(DEFAULTS))
    found = {}
    for path in sorted({*here, *reference}, key=paths.text):
        if path == ("name",) or (path in here and path in reference and here[path] == reference[path]):
            continue
        if path not in reference and path in here and defaults.get(path, sources) == here[path]:
            continue
        origin = sources.tree.origin(path)
        value = paths.get(resolved, path) if path in here else None
        found[paths.text(path)] = Deviation(
            value, reference.get(path, defaults.get(path)), origin.source if origin else "deleted"
        )
    return found


def _apply(overrides: Sequence[str], sources: Sources) -> list[Problem]:
    problems = []
    origin = Origin("command line", len(sources.names))
    for text in overrides:
        parsed = parsing.parse(text)
        problem = parsed if isinstance(parsed, Problem) else _apply_one(parsed, sources.tree, origin)
        if problem:
            problems.append(problem)
    return problems


def _apply_one(override: parsing.Override, tree: Tree, origin: Origin) -> Problem | None:
    path, key = override.path, paths.text(override.path)
    try:
        present, old = True, paths.get(tree.data, path)
    except KeyError:
        present, old = False, None
    if override.action == "delete":
        if not present:
            return Problem(key, "is not set, so ~ cannot delete it", "command line")
        tree.delete(path)
        return None
    value = override.value
    if override.action == "add" and isinstance(old, list):
        value = [*old, *(value if isinstance(value, list) else [value])]
    elif override.action == "add" and present:
        return Problem(
            key, "is set already, so + cannot add it", "command line", hint=f"replace it: {key}=..."
        )
    if override.action == "set" and not present and any(path[:-1] == free for free in _FREE):
        return Problem(key, "is not set, so = cannot replace it", "command line", hint=f"add it: +{key}=...")
    try:
        tree.put(path, value, origin)
    except (KeyError, TypeError):
        return Problem(key, "is not there: a list has no such index", "command line")
    return None
