"""What `check` says of a recipe that serves with SGLang."""

from __future__ import annotations

import sys

import pytest

from rollhook.recipe.schema import Recipe
from rollhook_sglang import rollhook_check


def problems(**keys: object) -> list[tuple[str, str, str]]:
    recipe = Recipe(name="r", engine={"use": "sglang", **keys})
    return [(each.key, each.scope, each.message) for each in rollhook_check(recipe)]


def test_another_engine_is_none_of_its_business() -> None:
    assert rollhook_check(Recipe(name="r", engine={"use": "transformers"})) == []
    assert rollhook_check(Recipe(name="r")) == []


def test_keys_that_are_wrong_are_told_elsewhere() -> None:
    assert problems(tp_size=0) == []


def test_an_interpreter_without_sglang_is_a_matter_of_this_machine() -> None:
    ((key, scope, message),) = problems(python="/no/such/python")
    assert (key, scope, message) == ("engine.python", "site", "/no/such/python has no SGLang")


@pytest.mark.parametrize("version", ["0.4.10", "0.5.6", "0.6.0"])
def test_a_release_that_is_not_supported_is_wrong_everywhere(version: str) -> None:
    ((key, scope, message),) = problems(version=version)
    assert (key, scope) == ("engine.version", "composition")
    assert message == f"SGLang {version} is not supported; releases from 0.5.7 on and below 0.6 are"


def test_a_release_that_fits_is_no_problem(sites: dict[str, str]) -> None:
    env = {"PYTHONPATH": sites["0.5.16"]}
    for python in (None, sys.executable):
        assert problems(env=env, python=python, profile="balanced") == []
    assert problems(env=env, version="0.5.16") == []


def test_another_release_than_the_recipe_names(sites: dict[str, str]) -> None:
    ((key, scope, message),) = problems(env={"PYTHONPATH": sites["0.5.16"]}, version="0.5.23")
    assert (key, scope) == ("engine.version", "site")
    assert message == "SGLang 0.5.16 is installed here, not 0.5.23"


def test_an_option_that_the_installed_release_lacks(sites: dict[str, str]) -> None:
    arguments = ["--disable-radix-cache", "--no-such-option=3"]
    ((key, scope, message),) = problems(env={"PYTHONPATH": sites["0.5.16"]}, extra_args=arguments)
    assert (key, scope) == ("engine.extra_args", "site")
    assert message == "SGLang 0.5.16, which is installed here, has no option --no-such-option"
