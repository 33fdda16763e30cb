"""The JSON Schema of recipes: what editors accept and underline."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from test_bad_recipes import read_table

from rollhook.cli.main import main
from rollhook.recipe.check import check_recipe
from rollhook.recipe.json_schema import recipe_schema
from rollhook.recipe.lock import lock_text
from rollhook.recipe.reading import read_text
from rollhook.testing.distributions import write_distribution

#: cases of bad_recipes.txt that are wrong whatever else the recipe says
SEEN_BY_EDITORS = """
an unknown top-level key
a misspelt extends
an unknown key in a section
an unknown key of a component
a misspelt key of a component
an unknown component
a component of another kind
a known plugin that is not installed
a misspelt name of a known plugin
an unknown policy in a chain
keys of a policy outside its name
an unknown observer
an unknown tracker
an unknown component inside a component
a wrong key inside a wrapped component
text for a number
a fraction for a whole number
true for a number
a number for text
a list for a mapping
a number that is too small
a number that is too large
an unknown choice
an unknown choice of a component
a list of the wrong length
null for what must be there
a name that cannot be a run's
no name
a tokenizer that is neither a name nor to be trained
a value in place of a secret
extends that is not a name
several things at once
""".strip().splitlines()

RIGHT = """
{name: x, agent: worker, sandbox: {use: box, memory_bytes: 5, warm: 2}}
{extends: [a, b.yaml], sandbox: {memory_bytes: 5}, trainer: {lr: 0.1}}
{extends: a, sandbox: {use: wrapper, inner: {use: wrapper, inner: box}}, environment: null}
{extends: a, environment: [room, {use: room, weight: 2, split: heldout, size: 3}], trackers: log}
{extends: a, environment: {use: room, pack: sand}, trackers: [log, {use: log}], plugins: [watcher]}
{extends: a, router: stick+spread}
{extends: a, router: {use: spread + stick, stick: {ttl: 3}}}
{extends: a, router: {use: stick, stick: null}, plugins: watcher}
{extends: a, router: {dp_aware: 'on', health: {interval: 5, up_after: '${x}'}, drain_on_update: 60}}
{extends: a, needs: {sft: first, other: {recipe: x.yaml, overrides: [seed=1]}}}
{extends: a, steps: '${oc.env:STEPS}', rollout: {drop_zero_variance: '${x}', sampling: '${y}'}}
{extends: a, outcomes: {timeout: '${x}'}, gateway: {token: 'env:KEY'}, trainer: {betas: ['${x}', 0.5]}}
{extends: a, agent: {use: '${x}'}, engine: '${y}', name: '${z}'}
{extends: a, model: {path: null, init: {architecture: llama, sizes: {hidden_size: 96}}}}
{extends: a, model: {tokenizer: {train: 'pack:sand/rows.jsonl'}}, budgets: {agent: 1e3, turn: 30}}
""".strip().splitlines()

WRONG = """
{extends: a, sandbox: {use: wrapper}}
{extends: a, sandbox: {use: box, weight: 3}}
{extends: a, environment: [{use: room, wieght: 2}]}
{extends: a, environment: {use: room, pack: box}}
{extends: a, trackers: [log, lag]}
{extends: a, router: stick+sprad}
{extends: a, router: {use: stick, stick: {ttl: 0}}}
{extends: a, router: {dp_aware: perhaps}}
{extends: a, router: {health: {every: 5}}}
{extends: a, needs: {sft: {recipe: x, overides: []}}}
{extends: a, trainer: {lrr: 1}}
{extends: a, rollout: {sampling: {temp: 1}}}
""".strip().splitlines()


@pytest.fixture
def validator(toys: Path) -> Draft7Validator:
    schema, left_out = recipe_schema()
    assert left_out == []
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def test_bad_recipes_are_rejected(validator: Draft7Validator, toys: Path) -> None:
    cases = {case.name: case for case in read_table()}
    accepted = [
        name for name in SEEN_BY_EDITORS if validator.is_valid(read_text(cases[name].recipe, "recipe").data)
    ]
    assert accepted == []


def test_right_recipes_are_accepted(validator: Draft7Validator, toys: Path) -> None:
    for file in [toys / "base.yaml", *toys.parent.glob("shipped/*.yaml")]:
        assert messages(validator, yaml.safe_load(file.read_text())) == []
    for text in RIGHT:
        assert messages(validator, read_text(text, "recipe").data) == [], text


@pytest.mark.parametrize("text", WRONG)
def test_wrong_recipes_are_rejected(validator: Draft7Validator, text: str) -> None:
    assert not validator.is_valid(read_text(text, "recipe").data)


def test_the_recipe_in_a_lock_is_accepted(validator: Draft7Validator, toys: Path) -> None:
    (toys / "recipe.yaml").write_text("extends: base.yaml\nneeds: {sft: toy-sft}\ntrackers: log\n")
    for name in ("base.yaml", "recipe.yaml"):
        checked = check_recipe(name, site="none")
        recipe = yaml.safe_load(lock_text(checked.loaded, checked.plugins))["recipe"]
        assert messages(validator, recipe) == []


def test_every_key_has_a_description_and_components_their_summaries(toys: Path) -> None:
    schema, _ = recipe_schema()
    assert [key for key, value in schema["properties"].items() if "description" not in value] == []
    trainer = schema["definitions"]["trainer"]["anyOf"]
    assert trainer[0] == {
        "type": "string", "enum": ["learner", "tuner"], "enumDescriptions": ["learner", "tuner"],
    }  # fmt: skip
    (learner,) = [
        each["then"]["properties"]
        for each in trainer[2]["allOf"]
        if each["if"].get("properties") == {"use": {"const": "learner"}}
    ]
    assert (learner["lr"]["description"], learner["lr"]["default"]) == ("learning rate", 1e-4)


def test_a_plugin_that_cannot_be_loaded_or_described_is_left_out_by_name(
    toys: Path, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = (
        "from typing import Callable\nfrom rollhook import Component, Config, hookimpl\n"
        "class Odd(Config):\n    call: Callable[[], int]\n"
        "@hookimpl\ndef rollhook_agents():\n    return [Component('odd', Odd, 'x:Y', 'odd')]\n"
    )
    for name, source in {"odd": odd, "broken": "import no_such_module\n"}.items():
        write_distribution(
            site, f"rollhook-toy-{name}",
            entry_points={f"agent.{name}": f"toy_{name}"}, modules={f"toy_{name}": source},
        )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        main(["schema"])
    said = capsys.readouterr()
    assert ended.value.code == 0
    names = json.loads(said.out)["definitions"]["agent"]["anyOf"][0]["enum"]
    assert {"odd", "broken"}.isdisjoint(names)
    assert "worker" in names
    assert [line.partition(": ")[2].partition(":")[0] for line in said.err.splitlines()] == [
        "agent.broken",
        "agent.odd",
    ]


def messages(validator: Draft7Validator, data: Any) -> list[str]:
    errors: Iterable[Any] = validator.iter_errors(data)
    return [f"{'.'.join(map(str, error.path))}: {error.message[:200]}" for error in errors]
