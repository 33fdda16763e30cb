"""`rollhook check`: everything that can be proven about a recipe before anything is started, all at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from rollhook.installed import EntryInfo
from rollhook.plugins import LoadError, Plugins, load
from rollhook.recipe.composition import Composition
from rollhook.recipe.digests import digest_of
from rollhook.recipe.load import Loaded, read_recipe
from rollhook.recipe.lock import digest
from rollhook.recipe.match import let_through, mismatches, remarks
from rollhook.recipe.parts import Part, find_parts
from rollhook.recipe.problem import Problem, RecipeError
from rollhook.recipe.rules import check_rules
from rollhook.secrets import Secret

Site = Literal["here", "none"]


@dataclass
class Checked:
    """A recipe that was checked: its parts, and all that is wrong with it and with what it needs.

    `mismatches` are those of the problems that say what is no longer as a lock has it.
    """

    loaded: Loaded
    plugins: Plugins
    parts: list[Part]
    problems: list[Problem]
    site: Site
    mismatches: list[Problem] = field(default_factory=list)

    @property
    def composition(self) -> list[Problem]:
        """What is wrong everywhere."""
        return [each for each in self.problems if each.scope == "composition"]

    @property
    def here(self) -> list[Problem]:
        """What is wrong on this machine only."""
        return [each for each in self.problems if each.scope == "site"]


def check_recipe(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    site: Site | None = None,
    needs_results: Mapping[str, Mapping[str, Any]] | None = None,
    evaluating: bool = False,
) -> Checked:
    """Check a recipe and the recipes that it needs; what is wrong is returned, never raised.

    `site` `here` also checks this machine; the default is `here` for launcher `local`, else `none`. With
    `evaluating` nothing is looked at that an evaluation alone has no use for.
    """
    return _check(source, overrides, site, needs_results, (), evaluating=evaluating)


def compose(
    source: str | Path,
    overrides: Sequence[str] = (),
    *,
    needs_results: Mapping[str, Mapping[str, Any]] | None = None,
    allow_changed: Collection[str] = (),
    evaluating: bool = False,
    site: Site | None = "here",
) -> tuple[Loaded, Plugins]:
    """Return a recipe that can run here and its plugins. Raises RecipeError with all that is wrong.

    With `site` None one need not be able to run here whose launcher drives runs elsewhere.

    What is no longer as a lock says is wrong too, unless `allow_changed` names it, or is `all`: it is then
    among the remarks of what is returned.
    """
    if site is None:
        site = "here" if drives_itself(read_recipe(source, overrides)) else "none"
    checked = check_recipe(source, overrides, site=site, needs_results=needs_results, evaluating=evaluating)
    loaded, stopped = checked.loaded, [each for each in checked.problems if each not in checked.mismatches]
    if allow_changed and loaded.locked is None and loaded.resolved:
        stopped.append(Problem("", "--allow-changed is for a lock, and this is a recipe", loaded.name))
    recipe = loaded.validated
    if recipe is not None and recipe.trainer is None and recipe.environment and not evaluating:
        hint = "set it, e.g. to torch, or use `rollhook eval`"
        stopped.append(Problem("trainer", "is missing: a run trains", loaded.name, hint=hint))
    still, let = let_through(checked.mismatches, allow_changed)
    loaded.remarks += let
    if stopped or still:
        raise RecipeError([*stopped, *still])
    return loaded, checked.plugins


def drives_itself(loaded: Loaded) -> bool:
    """Return whether the recipe's launcher lets the caller drive the run; also while that is not known."""
    use = loaded.validated.launcher.use if loaded.validated is not None else "local"
    try:
        return use == "local" or bool(load([("launcher", use)]).load_class("launcher", use).in_process)
    except LoadError:
        return True  # the check says what is wrong with it


def _check(
    source: str | Path,
    overrides: Sequence[str],
    site: Site | None,
    needs_results: Mapping[str, Mapping[str, Any]] | None,
    above: tuple[str, ...],
    *,
    evaluating: bool = False,
    entries: list[EntryInfo] | None = None,
) -> Checked:
    loaded = read_recipe(source, overrides, needs_results=needs_results)
    if not loaded.resolved:
        return Checked(loaded, load([]), [], loaded.problems, site or "none")
    if site is None and loaded.validated is not None:
        site = "here" if loaded.validated.launcher.use == "local" else "none"
    parts = find_parts(loaded, whole=site == "here", entries=entries)
    found = list(parts.problems)
    if loaded.validated is not None:
        composition = Composition(loaded, loaded.validated, parts, evaluating)
        found += check_rules(composition)
        found += _secrets(composition)
        found += _hooks(composition)
        if site == "here":
            from rollhook.recipe.site import check_site

            found += check_site(composition)
    problems = loaded.problems + [loaded.locate(problem) for problem in found]
    if not evaluating:
        problems += _needed(loaded, site, needs_results, (*above, loaded.name), parts.plugins.entries)
    changed: list[Problem] = []
    if loaded.locked is not None and site == "here":
        changed = mismatches(loaded, parts.plugins)
        loaded.remarks += remarks(loaded, parts.plugins)
        problems += changed
    if site == "none":
        problems = [problem for problem in problems if problem.scope != "site"]
    problems = list(dict.fromkeys(problems))
    return Checked(loaded, parts.plugins, parts.parts, problems, site or "none", changed)


def _needed(
    loaded: Loaded,
    site: Site | None,
    results: Mapping[str, Any] | None,
    above: tuple[str, ...],
    entries: list[EntryInfo],
) -> Iterator[Problem]:
    """Yield what is wrong with the recipes under `needs` that have not run yet."""
    if loaded.validated is None:
        return
    needs = loaded.validated.needs
    for alias, need in needs.items():
        key = f"needs.{alias}.recipe"
        if alias in (results or {}) or any(each.key == key for each in loaded.problems):
            continue
        inner = read_recipe(need.recipe)
        if inner.name in above:
            chain = " -> ".join((*above, inner.name))
            yield loaded.locate(Problem(key, f"goes round in a circle: {chain}"))
            continue
        checked = _check(need.recipe, need.overrides, site, None, above, entries=entries)
        if not checked.composition and not checked.loaded.unresolved:
            further = {key: each for key, each in checked.loaded.met.items() if key.startswith("needs.")}
            loaded.met[f"needs.{alias}"] = digest_of([digest(checked.loaded, checked.plugins), further])
        yield from checked.problems


def secret_fields(parts: Sequence[Part]) -> Iterator[tuple[str, Secret]]:
    """Yield (key path, reference) of every secret among the components' keys."""
    for part in parts:
        if part.config is not None:
            yield from _secrets_in(part.config, part.key)


def _secrets_in(value: Any, key: str) -> Iterator[tuple[str, Secret]]:
    inner: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, Secret):
        yield key, value
    elif isinstance(value, BaseModel):
        inner = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    for name, each in inner:
        yield from _secrets_in(each, f"{key}.{name}")


def _secrets(composition: Composition) -> Iterator[Problem]:
    """Yield the references whose scheme the launcher cannot carry to the node."""
    launcher = composition.part("launcher")
    if launcher is None or launcher.cls is None:
        return
    carried = launcher.cls.secret_schemes
    found = [*secret_fields(composition.parts.parts)]
    token = composition.recipe.gateway.token
    if token is not None:
        found.append(("gateway.token", token))
    for key, secret in found:
        if secret.scheme not in carried:
            yield Problem(
                key,
                f"launcher {launcher.name} cannot carry {secret.scheme}: secrets",
                allowed=f"schemes it carries: {', '.join(sorted(carried))}",
            )


def _hooks(composition: Composition) -> Iterator[Problem]:
    """Yield what plugins have to say; one that fails is a problem itself."""
    plugins = composition.parts.plugins
    for implementation in plugins.manager.hook.rollhook_check.get_hookimpls():
        owner = plugins.owner(implementation.plugin)
        try:
            function: Any = implementation.function
            yield from function(composition.recipe) if implementation.argnames else function()
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises is reported as its fault
            yield Problem("plugins", f"rollhook_check of {owner} fails with {type(error).__name__}: {error}")
