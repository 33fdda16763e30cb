"""The plugin loader: imports what a recipe names, once, and nothing else.

Our own rather than pluggy's, which skips a duplicate name silently and refuses one module under two
names. Everything that metadata can prove (duplicates, API range) is proven before any import.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import shlex
import traceback
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
from pydantic import BaseModel

import rollhook
from rollhook import hookspecs
from rollhook import installed as metadata
from rollhook.component import BuildContext, Component
from rollhook.errors import PluginError
from rollhook.installed import KINDS, EntryInfo, claimed_twice, installed, nearest
from rollhook.recipe.problem import Problem, RecipeError
from rollhook.recipe.validate import validate

__all__ = ["EntryInfo", "LoadError", "Plugins", "installed", "load"]

Name = tuple[str, str]


class LoadError(PluginError):
    """A plugin that cannot be loaded: unknown, ambiguous, broken, or of another API range."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem

    def at(self, key: str) -> Problem:
        """Return the problem as one of the recipe key that names the plugin."""
        return dataclasses.replace(self.problem, key=key)


class Plugins:
    """What has been loaded: components by (kind, name), observers and filters in `manager`.

    `failures` holds the names that could not be loaded, when loading was told to go on.
    """

    def __init__(self, entries: Iterable[EntryInfo]) -> None:
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self.failures: dict[Name, LoadError] = {}
        #: the entry points that were found when it was made
        self.entries = list(entries)
        self._twice = claimed_twice(self.entries)
        self._components: dict[Name, Component] = {}
        self._by_name: dict[Name, EntryInfo] = {}
        self._owners: dict[str, str] = {}

    def __reduce__(self) -> tuple[type[Plugins], tuple[list[EntryInfo]]]:
        """In another process the same entries are there, and load when they are built."""
        return Plugins, (self.entries,)

    def add(self, names: Iterable[Name], *, strict: bool = True) -> None:
        """Load further names; LoadError at the first that cannot be, or noted in `failures` if not strict."""
        for key in dict.fromkeys(names):
            if key in self._by_name or (key in self.failures and not strict):
                continue
            try:
                self._add(*key)
            except LoadError as error:
                if strict:
                    raise
                self.failures[key] = error

    def component(self, kind: str, name: str) -> Component:
        """Return a loaded component. Raises LoadError for one that failed, KeyError for one not asked for."""
        if (kind, name) in self.failures:
            raise self.failures[kind, name]
        return self._components[kind, name]

    def loaded(self) -> list[Name]:
        """Return the names that were loaded, in order."""
        return list(self._by_name)

    def distribution(self, kind: str, name: str) -> tuple[str, str]:
        """Return name and version of the distribution that supplied a component."""
        entry = self._by_name[kind, name]
        return entry.distribution, entry.version

    def owner(self, module: object) -> str:
        """Return the distribution that a registered plugin module came from."""
        return self._owners.get(self.manager.get_name(module) or "", "")

    def config(self, kind: str, name: str, keys: Mapping[str, Any], key_path: str) -> BaseModel:
        """Return a component's validated keys. Raises RecipeError with everything that is wrong with them."""
        model, problems = validate(self.component(kind, name).config, keys, key_path)
        if model is None:
            raise RecipeError(problems)
        return model

    def load_class(self, kind: str, name: str) -> type[Any]:
        """Import a component's class. Raises LoadError when the module or what it imports is absent."""
        dotted = self.component(kind, name).load
        module, _, attribute = dotted.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except Exception as error:
            raise LoadError(
                Problem(
                    "",
                    f"{kind} {name!r} cannot be used: {dotted} fails with {_short(error)}{_where(error)}",
                    hint=f"mend it, or reinstall it: {_reinstall(self.distribution(kind, name)[0])}",
                    scope="site",
                )
            ) from error
        if not inspect.isclass(found):
            raise LoadError(Problem("", f"{kind} {name!r} cannot be used: {dotted} is not a class"))
        return found

    def build(
        self, kind: str, name: str, keys: Mapping[str, Any], context: BuildContext, key_path: str = ""
    ) -> Any:
        """Construct a component, loading it first where it is not.

        Unless the context brings its own, `context.build` builds what a `ComponentRef` field names.
        """
        self.add([(kind, name)])
        config = self.config(kind, name, keys, key_path or kind)

        def build(other_kind: str, spec: Any) -> Any:
            return self.build(other_kind, spec.use, spec.keys, context, f"{key_path or kind}.{spec.use}")

        if context.build is BuildContext.build:
            context = dataclasses.replace(context, build=build)
        return self.load_class(kind, name)(config, context)

    def _add(self, kind: str, name: str) -> None:
        entry = self._find(kind, name)
        _check_api_range(entry)
        module = self._register(entry)
        if kind != "plugin":
            self._components[kind, name] = self._component(entry, module)
        self._by_name[kind, name] = entry

    def _find(self, kind: str, name: str) -> EntryInfo:
        if kind not in KINDS:
            raise LoadError(_unknown_kind(kind, name))
        if (kind, name) in self._twice:
            claims = " and ".join(f"{e.distribution} {e.version}" for e in self._twice[kind, name])
            raise LoadError(
                Problem(
                    "",
                    f"{kind} {name!r} is claimed by {claims}",
                    hint=f"uninstall one: pip uninstall {self._twice[kind, name][-1].distribution}",
                )
            )
        for entry in self.entries:
            if (entry.kind, entry.name) == (kind, name):
                return entry
        raise LoadError(_unknown_name(kind, name, self.entries))

    def _register(self, entry: EntryInfo) -> ModuleType:
        try:
            module = import_module(entry.module)
        except (Exception, SystemExit) as error:
            raise LoadError(
                Problem(
                    "",
                    f"{entry.distribution} {entry.version} cannot be imported: {entry.module} fails with "
                    f"{_short(error)}{_where(error)}",
                    hint=f"mend, reinstall or remove it: {_reinstall(entry.distribution)}",
                )
            ) from error
        if self.manager.is_registered(module):
            return module
        _verify(entry, module)
        self.manager.register(module, entry.module)
        self._owners[entry.module] = entry.distribution
        return module

    def _component(self, entry: EntryInfo, module: ModuleType) -> Component:
        hook = hookspecs.PROVIDER_HOOKS[entry.kind]
        implementations = getattr(self.manager.hook, hook).get_hookimpls()
        supplied = [c for impl in implementations if impl.plugin is module for c in _call(entry, hook, impl)]
        for component in supplied:
            if component.name == entry.name:
                return component
        names = sorted(component.name for component in supplied)
        raise LoadError(
            Problem(
                "",
                f"{entry.distribution} {entry.version} registers {entry.full_name!r}, but {hook} of "
                f"{entry.module} does not supply it",
                allowed=f"it supplies: {', '.join(names) or 'nothing'}",
                nearest=nearest(entry.name, names),
            )
        )


def load(
    names: Iterable[Name],
    observers: Iterable[str] = (),
    *,
    strict: bool = True,
    entries: Iterable[EntryInfo] | None = None,
) -> Plugins:
    """Load components by (kind, name) and observer plugins by name, and nothing else.

    `entries` are what `installed` found, for whoever has just asked that. Raises LoadError at the first that
    cannot be loaded; with `strict` off these are in `.failures`.
    """
    plugins = Plugins(installed() if entries is None else entries)
    plugins.add([*names, *(("plugin", name) for name in observers)], strict=strict)
    return plugins


def _call(entry: EntryInfo, hook: str, implementation: pluggy.HookImpl) -> list[Component]:
    try:
        supplied: Any = implementation.function()
        return list(supplied)
    except Exception as error:
        raise LoadError(
            Problem(
                "",
                f"{entry.distribution} {entry.version} is broken: {hook} of {entry.module} fails with "
                f"{_short(error)}{_where(error)}",
            )
        ) from error


def _verify(entry: EntryInfo, module: ModuleType) -> None:
    """Find misspelt hooks and wrong arguments in a manager of their own, so that no other plugin suffers."""
    trial = pluggy.PluginManager(hookspecs.PROJECT)
    trial.add_hookspecs(hookspecs)
    try:
        trial.register(module, entry.module)
        trial.check_pending()
    except pluggy.PluginValidationError as error:
        hooks = [name for name in vars(hookspecs) if name.startswith("rollhook_")]
        written = [name for name in vars(module) if name.startswith("rollhook_") and name not in hooks]
        raise LoadError(
            Problem(
                "",
                f"{entry.distribution} {entry.version} is broken: {' '.join(str(error).split())}",
                nearest=nearest(written[0], hooks) if written else "",
            )
        ) from error


def _check_api_range(entry: EntryInfo) -> None:
    """Compare the distribution's own requirement on `rollhook` with this version, before any import."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for text in entry.requires:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) != hookspecs.PROJECT:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        if not requirement.specifier.contains(rollhook.__version__, prereleases=True):
            raise LoadError(
                Problem(
                    "",
                    f"{entry.distribution} {entry.version} needs rollhook{requirement.specifier}, "
                    f"this is {rollhook.__version__}",
                    hint=f"get one that fits: pip install --upgrade rollhook {entry.distribution}",
                )
            )


def _unknown_kind(kind: str, name: str) -> Problem:
    return Problem(
        "",
        f"{kind!r} is not a kind of plugin (in {kind}.{name})",
        allowed=f"kinds: {', '.join(KINDS)}",
        nearest=nearest(kind, KINDS),
    )


def _unknown_name(kind: str, name: str, entries: list[EntryInfo]) -> Problem:
    here = sorted({entry.name for entry in entries if entry.kind == kind})
    known = metadata.known_plugins().get(kind, {})
    near = nearest(name, here) or nearest(name, known)
    hint = ""
    for word in (name, near):
        if word in known and word not in here:
            hint = f"install it: {metadata.pip_command(known[word])}"
            break
    for entry in entries:
        if entry.name == name and entry.kind not in KINDS and nearest(entry.kind, KINDS) == kind:
            hint = (
                f"{entry.distribution} registers {entry.full_name!r}, whose kind is misspelt: "
                f"it should be {kind}.{name}"
            )
    others = [entry.kind for entry in entries if entry.name == name and entry.kind in KINDS]
    if others and not hint:
        hint = f"{name} is {_a(others[0])}"
    return Problem(
        "",
        f"{name!r} is not {_a(kind)} that is installed",
        allowed=f"{KINDS[kind]} here: {', '.join(here) or 'none'}",
        nearest="" if near == name else near,
        hint=hint,
    )


def _a(kind: str) -> str:
    noun = {"router": "router policy", "plugin": "observer plugin"}.get(kind, kind)
    return f"an {noun}" if noun[0] in "aeo" else f"a {noun}"


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _where(error: BaseException) -> str:
    """Return file and line of a plugin's own code where an import or a hook failed, in brackets."""
    if isinstance(error, SyntaxError):
        return ""  # its text ends with them
    ours = {__file__, importlib.__file__}
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in ours and not frame.filename.startswith("<frozen importlib")
    ]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _reinstall(distribution: str) -> str:
    directory = metadata.editable_directory(distribution)
    return (
        f"pip install -e {shlex.quote(directory)}"
        if directory
        else f"pip install --force-reinstall {distribution}"
    )
