from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollhook.recipe import paths
from rollhook.recipe.check import check_recipe
from rollhook.recipe.overrides import Override, parse
from rollhook.recipe.problem import Problem
from rollhook.recipe.schema import Recipe
from rollhook.recipe.tree import Origin, Tree, normalise

keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
key_paths = st.lists(keys, min_size=1, max_size=5)
#: JSON writes characters beyond these as two escapes, which YAML does not join
words = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
)


@given(key_paths, values, st.sampled_from(["", "+"]))
def test_any_json_value_is_parsed_as_itself(path: list[str], value: Any, sign: str) -> None:
    parsed = parse(f"{sign}{'.'.join(path)}={json.dumps(value)}")
    assert isinstance(parsed, Override)
    assert parsed.path == tuple(path)
    assert parsed.action == ("add" if sign else "set")
    assert parsed.value == value


@given(key_paths)
def test_a_deletion_is_a_path_alone(path: list[str]) -> None:
    parsed = parse("~" + ".".join(path))
    assert isinstance(parsed, Override)
    assert (parsed.action, parsed.path) == ("delete", tuple(path))


@given(st.text())
def test_any_text_is_an_override_or_a_problem_and_never_a_crash(text: str) -> None:
    parsed = parse(text)
    assert isinstance(parsed, Override | Problem)
    if isinstance(parsed, Override):
        assert parsed.path
        assert all(part != "" for part in parsed.path)


@given(st.text(alphabet="ab.[]0=~+-: {}'\"\n#&*!%@`|>", max_size=12))
def test_text_of_the_grammars_own_characters_never_crashes(text: str) -> None:
    assert isinstance(parse(text), Override | Problem)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1), ("a=1e-3", 0.001), ("a=true", True), ("a=on", "on"), ("a=null", None), ("a=", None),
        ("a=x=y", "x=y"), ("a=[1, x]", [1, "x"]), ("a={b: 1}", {"b": 1}), ("a='1'", "1"), ("a=# no", None),
        ("a=${oc.env:B}", "${oc.env:B}"), ("a=2026-01-01", "2026-01-01"), ("a=x y", "x y"),
    ],
)  # fmt: skip
def test_values_are_yaml(text: str, value: object) -> None:
    parsed = parse(text)
    assert isinstance(parsed, Override)
    assert parsed.value == value
    assert type(parsed.value) is type(value)


@pytest.mark.parametrize("text", ["a=[1", "a=b: c", "a=@x", "a=1\nb: 2", "a=1\n---\n2", "a={b: 1, b: 2}"])
def test_a_value_that_is_not_one_yaml_value_is_a_problem(text: str) -> None:
    assert isinstance(parse(text), Problem)


def test_brackets_are_indexes() -> None:
    parsed = parse("environment[1].split=x")
    assert isinstance(parsed, Override)
    assert parsed.path == ("environment", 1, "split")


free_keys = keys.filter(lambda key: normalise({key: "x"}) == {key: "x"})


@given(st.lists(st.tuples(st.lists(free_keys, min_size=1, max_size=3), scalars), max_size=8))
def test_putting_values_gives_each_leaf_the_origin_of_the_last_that_set_it(
    puts: list[tuple[list[str], Any]],
) -> None:
    tree = Tree()
    for index, (path, value) in enumerate(puts):
        tree.put(tuple(path), value, Origin(f"put {index}", 0))
    leaves = dict(paths.leaves(tree.data)) if tree.data else {}
    assert set(tree.origins) == set(leaves)
    for index, (path, value) in enumerate(puts):
        origin = tree.origins.get(tuple(path))
        if origin == Origin(f"put {index}", 0):
            assert leaves[tuple(path)] == value
    if puts:
        last, value = puts[-1]
        assert tree.origins[tuple(last)].source == f"put {len(puts) - 1}"
        assert leaves[tuple(last)] == value


names = st.sampled_from([*Recipe.model_fields, "extends", "use", "recipe", "init", "stick", "inner", "odd"])
WORDS = """
base.yaml room box wrapper a+b pack:sand/x pack: pack:? needs:x env:A ${seed} ${needs.a.checkpoint} ${X} ${
0.0.0.0 . ~ recipe.yaml learner sft
"""
words_of_recipes = st.sampled_from(WORDS.split())
recipe_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | words_of_recipes,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, recipe_values, max_size=6), st.booleans())
def test_whatever_stands_in_a_recipe_it_is_answered_and_never_crashes(
    toys: Path, data: dict[str, Any], extends: bool
) -> None:
    data = {**data, "extends": "base.yaml"} if extends else data
    (toys / "recipe.yaml").write_text(yaml.safe_dump(data))
    checked = check_recipe("recipe.yaml", site="here")
    assert all(str(problem) for problem in checked.problems)


overrides = st.tuples(
    st.sampled_from(["", "+", "~"]),
    st.lists(names | st.sampled_from(["0", "3"]), min_size=1, max_size=3),
    recipe_values,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(overrides, max_size=4))
def test_whatever_is_overridden_it_is_answered_and_never_crashes(toys: Path, given_: list[Any]) -> None:
    texts = [
        f"{sign}{'.'.join(path)}" + ("" if sign == "~" else f"={json.dumps(value)}")
        for sign, path, value in given_
    ]
    checked = check_recipe("base.yaml", texts, site="here")
    assert all(str(problem) for problem in checked.problems)
