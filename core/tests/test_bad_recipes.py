"""A table of bad recipes and the exact messages of each: bad_recipes.txt."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollhook.recipe.check import Site, check_recipe

TABLE = Path(__file__).parent / "bad_recipes.txt"


@dataclass
class Case:
    name: str
    recipe: str = ""
    overrides: list[str] = field(default_factory=list)
    site: Site = "none"
    messages: str = ""


def read_table() -> list[Case]:
    cases = []
    for block in re.split(r"^=== ", TABLE.read_text(), flags=re.MULTILINE)[1:]:
        name, _, rest = block.partition("\n")
        given, _, messages = rest.partition("\n---\n")
        lines = given.split("\n")
        overrides = [line[2:] for line in lines if line.startswith("$ ")]
        recipe = "\n".join(line for line in lines if not line.startswith("$ "))
        site: Site = "here" if "--site here" in overrides else "none"
        overrides = [each for each in overrides if each != "--site here"]
        cases.append(Case(name, recipe.replace("---- ", "---") + "\n", overrides, site, messages.strip()))
    return cases


def what_check_says(case: Case, directory: Path) -> str:
    (directory / "recipe.yaml").write_text(case.recipe)
    checked = check_recipe("recipe.yaml", case.overrides, site=case.site)
    text = "\n".join(str(problem) for problem in checked.problems)
    root = Path(__file__).resolve().parents[2]
    return text.replace(f"{root}{os.sep}", "CHECKOUT/")


@pytest.mark.parametrize("case", read_table(), ids=lambda case: case.name.replace(" ", "-"))
def test_a_bad_recipe_is_answered_with_all_that_is_wrong(case: Case, toys: Path) -> None:
    """Invariant 8: failing early is free, and all at once."""
    assert what_check_says(case, toys) == case.messages


@pytest.mark.parametrize("sandbox", ["box", "{use: wrapper, inner: box}"])
def test_agents_in_sandboxes_elsewhere_need_an_address(
    toys: Path, monkeypatch: pytest.MonkeyPatch, sandbox: str
) -> None:
    import rollhook_toy  # type: ignore[import-not-found]

    monkeypatch.setattr(rollhook_toy.Box, "elsewhere", True)
    monkeypatch.setattr(rollhook_toy.Worker, "asks_from", classmethod(lambda cls, config: "sandbox"))
    said = what_check_says(Case("", f"extends: base.yaml\nsandbox: {sandbox}\n"), toys)
    assert "gateway.public_url: is missing: agent worker asks the policy from sandboxes of " in said


def test_the_sound_recipe_of_the_table_has_no_problems(toys: Path) -> None:
    assert check_recipe("base.yaml", site="here").problems == []


def test_the_table_is_long_enough() -> None:
    assert len(read_table()) >= 40
