"""A recipe with its parts, as the rules and the checks of a site see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollhook.recipe import paths
from rollhook.recipe.load import Loaded
from rollhook.recipe.parts import Part, Parts
from rollhook.recipe.problem import Problem
from rollhook.recipe.schema import Recipe


@dataclass
class Composition:
    """A recipe with its parts, as the rules see it."""

    loaded: Loaded
    recipe: Recipe
    parts: Parts
    #: for an evaluation alone: what concerns training is not looked at
    evaluating: bool = False

    def part(self, kind: str) -> Part | None:
        """Return the first part of a kind, if it could be loaded."""
        return next(iter(self.parts.of(kind)), None)

    @property
    def trains(self) -> bool:
        """Whether the recipe has a trainer, and it is to train."""
        return self.recipe.trainer is not None and not self.evaluating

    @property
    def trains_on_episodes(self) -> bool:
        """Whether its trainer trains on episodes; assumed while its keys are wrong."""
        part = self.part("trainer") if self.trains else None
        if part is None or part.cls is None or part.config is None:
            return self.trains
        return bool(part.cls.needs_rollouts(part.config))

    @property
    def rolls_out(self) -> bool:
        """Whether episodes are run, to train on or to evaluate."""
        return self.trains_on_episodes or not self.trains

    @property
    def asks_endpoint(self) -> bool:
        """Whether its engine takes messages, so that nothing here needs weights or a tokenizer."""
        part = self.part("engine")
        return part is not None and part.cls is not None and not part.cls.gives_tokens

    @property
    def has_weights(self) -> bool:
        """Whether the recipe says where weights are."""
        path = self.recipe.model.path if self.recipe.model is not None else None
        return path is not None or self.recipe.checkpoint.load_from is not None

    def says(self, key: str) -> bool:
        """Return whether the recipe gives a key, or one below it, a value other than null."""
        try:
            value = paths.get(self.loaded.resolved, paths.parse(key))
        except KeyError:
            return False
        return value is not None

    def layer(self, key: str) -> int:
        """Return the layer that gave a key (later wins); -1 for a default."""
        found = [
            layer for each, layer in self.loaded.layers.items() if each == key or each.startswith(f"{key}.")
        ]
        return max(found, default=-1)


def asks_from(c: Composition) -> str:
    """Return whence the recipe's agent asks the policy over HTTP; empty if it does not, or is not known."""
    agent = c.part("agent")
    known = agent is not None and agent.cls is not None and agent.config is not None
    return str(agent.cls.asks_from(agent.config)) if agent is not None and agent.cls and known else ""


def idle(c: Composition, keys: list[str], chosen: int, reason: str) -> Iterator[Problem]:
    """Yield those of the keys that the recipe gives in the layer `chosen` or later: they have no effect."""
    for key in keys:
        if c.says(key) and c.layer(key) >= chosen:
            yield Problem(key, f"has no effect: {reason}", hint=f"delete it: ~{key}")


def use_name(use: object) -> str:
    """Return the name of the component that a section names; empty without one."""
    return str(getattr(use, "use", ""))


def given(c: Composition) -> Iterator[str]:
    """Yield the keys that the recipe gives, those of lists of components without their number."""
    for key in dict.fromkeys(c.loaded.layers):
        yield ".".join(name for name in key.split(".") if not name.isdigit())
