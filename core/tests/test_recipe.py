from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollhook.environment import Task
from rollhook.plugins import Plugins, load
from rollhook.recipe.check import check_recipe, compose
from rollhook.recipe.explain import supplied, values
from rollhook.recipe.load import Loaded, load_recipe, read_recipe
from rollhook.recipe.lock import complete, digest, write_lock
from rollhook.recipe.names import component_names, names_in
from rollhook.recipe.problem import RecipeError
from rollhook.recipe.reading import MAX_BYTES, read_text
from rollhook.recipe.sources import shipped_recipes


def write(directory: Path, text: str, name: str = "recipe.yaml") -> str:
    (directory / name).write_text(text)
    return name


def plugins_of(loaded: Loaded) -> Plugins:
    return load(component_names(loaded.recipe), loaded.recipe.plugins)


def test_a_bare_name_is_a_component_with_its_defaults(toys: Path) -> None:
    loaded = load_recipe(write(toys, "extends: base.yaml\nagent: talker\ntrackers: log\n"))
    assert loaded.resolved["agent"] == {"use": "talker"}
    assert loaded.resolved["trackers"] == [{"use": "log"}]
    assert [each.use for each in loaded.recipe.environment] == ["room"]


def test_later_files_win_and_this_file_wins_over_all(toys: Path) -> None:
    write(toys, "steps: 1\nseed: 1\nname: one\n", "one.yaml")
    write(toys, "steps: 2\nseed: 2\nbudgets: {turns: 7}\n", "two.yaml")
    write(toys, "extends: [base.yaml, one.yaml, two.yaml]\nseed: 3\nbudgets: {agent: 9}\n")
    recipe = load_recipe("recipe.yaml").recipe
    assert (recipe.name, recipe.steps, recipe.seed) == ("one", 2, 3)
    assert (recipe.budgets.turns, recipe.budgets.agent) == (7, 9.0)


def test_extends_is_relative_to_the_file_that_says_it(toys: Path) -> None:
    (toys / "deep" / "er").mkdir(parents=True)
    write(toys / "deep", "extends: ../base.yaml\nsteps: 5\n", "middle.yaml")
    write(toys / "deep" / "er", "extends: ../middle.yaml\n")
    assert load_recipe("deep/er/recipe.yaml").recipe.steps == 5


def test_a_shipped_recipe_is_found_by_its_bare_name(toys: Path) -> None:
    assert shipped_recipes() == ["toy-grpo", "toy-sft"]
    assert load_recipe("toy-sft").recipe.steps == 20
    assert load_recipe(write(toys, "extends: toy-sft.yaml\nseed: 2\n")).recipe.steps == 20


def test_another_component_takes_its_own_keys_along_and_leaves_the_cores(toys: Path) -> None:
    write(toys, "extends: base.yaml\nsandbox: {use: box, memory_bytes: 5, warm: 2}\n", "middle.yaml")
    loaded = load_recipe("middle.yaml", ["sandbox.use=bare", "sandbox.warm=3"])
    assert loaded.resolved["sandbox"] == {"use": "bare", "warm": 3}
    same = load_recipe("middle.yaml", ["sandbox=box"])
    assert same.resolved["sandbox"] == {"use": "box", "memory_bytes": 5, "warm": 2}
    order = load_recipe("middle.yaml", ["sandbox.memory_bytes=7", "sandbox.use=wrapper"])
    assert order.resolved["sandbox"] == {"use": "wrapper", "memory_bytes": 7, "warm": 2}


def test_lists_replace_and_plus_appends(toys: Path) -> None:
    write(toys, "extends: base.yaml\ntrackers: [log]\nplugins: [watcher]\n", "middle.yaml")
    loaded = load_recipe("middle.yaml", ["trackers=[]", "+plugins=other"])
    assert loaded.resolved["trackers"] == []
    assert loaded.resolved["plugins"] == ["watcher", "other"]
    assert load_recipe("base.yaml", ["+trackers=log"]).resolved["trackers"] == [{"use": "log"}]


def test_overrides_set_add_and_delete(toys: Path) -> None:
    loaded = load_recipe(
        "base.yaml", ["steps=7", "+trainer.lr=1e-3", "~trainer.use", "trainer=tuner", "budgets.turns=4"]
    )
    assert loaded.recipe.steps == 7
    assert loaded.resolved["trainer"] == {"lr": 0.001, "use": "tuner"}
    assert loaded.recipe.budgets.turns == 4


def test_an_item_of_a_list_is_overridden_by_its_index(toys: Path) -> None:
    write(toys, "extends: base.yaml\nenvironment: [room, {use: room, weight: 2}]\n")
    loaded = load_recipe("recipe.yaml", ["environment.1.weight=3", "environment[0].split=heldout"])
    assert [(each.weight, each.split) for each in loaded.recipe.environment] == [(1, "heldout"), (3, "train")]


def test_yaml_numbers_and_words_are_what_a_reader_expects(toys: Path) -> None:
    data = read_text(
        "a: 1e-3\nb: 5.0e-4\nc: 1_000\nd: on\ne: 2026-01-01\nf: true\ng: ~\nh: .5\ni: 1.5.2\nj: 3e\n"
        "k: 1:30\nl: 010\nm: 0x1f\nn: -3\no: 0\n",
        "x",
    ).data
    assert data == {
        "a": 0.001, "b": 0.0005, "c": 1000, "d": "on", "e": "2026-01-01", "f": True, "g": None, "h": 0.5,
        "i": "1.5.2", "j": "3e", "k": "1:30", "l": "010", "m": 31, "n": -3, "o": 0,
    }  # fmt: skip


def test_anchors_and_merge_keys_work(toys: Path) -> None:
    document = read_text("a: &x {p: 1, q: 2}\nb: {<<: *x, q: 3}\nc: *x\n", "x")
    assert document.problems == []
    assert document.data["b"] == {"p": 1, "q": 3}
    assert document.data["c"] == {"p": 1, "q": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 5000, "is nested deeper than 32 levels"),
        ("a: " + "{b: " * 40 + "1" + "}" * 40, "is nested deeper than 32 levels"),
        ("a: &a [*a]", "is nested deeper than 32 levels"),
        (
            "\n".join(["a: &a0 [x]"] + [f"b{i}: &a{i + 1} [*a{i},*a{i},*a{i},*a{i}]" for i in range(20)]),
            "more than",
        ),
        ("? [a, b]\n: 1\n", "has a list for a key"),
        ("a: \x00", "is not YAML"),
    ],
)
def test_hostile_yaml_is_a_problem_and_not_a_crash(text: str, message: str) -> None:
    assert message in str(read_text(text, "x.yaml").problems[0])


def test_a_file_that_is_no_text_or_too_large_is_a_problem(toys: Path) -> None:
    (toys / "bytes.yaml").write_bytes(b"name: \xff\xfe")
    (toys / "large.yaml").write_text("#" * (MAX_BYTES + 1))
    assert [str(p) for p in read_recipe("bytes.yaml").problems] == ["bytes.yaml: is not UTF-8 text (byte 6)"]
    assert "is larger than" in str(read_recipe("large.yaml").problems[0])
    assert "is a directory" in str(read_recipe(toys).problems[0])


def test_interpolation_reaches_keys_and_the_defaults_of_the_core(toys: Path) -> None:
    write(toys, 'extends: base.yaml\nbudgets: {turns: "${rollout.group_size}"}\nsteps: "${budgets.turns}"\n')
    recipe = load_recipe("recipe.yaml").recipe
    assert (recipe.budgets.turns, recipe.steps) == (8, 8)


def test_an_environment_variable_is_read_and_may_have_a_default(
    toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_ROOT", "/somewhere")
    write(
        toys,
        'extends: base.yaml\nstorage: {root: "${oc.env:TOY_ROOT}/runs"}\nmodel: {path: "${oc.env:NO,x/y}"}\n',
    )
    recipe = load_recipe("recipe.yaml").recipe
    assert recipe.storage.root == "/somewhere/runs"
    assert recipe.model is not None
    assert recipe.model.path == "x/y"


def test_an_escaped_dollar_stays_as_it_is(toys: Path) -> None:
    write(toys, "extends: base.yaml\nstorage: {root: '/tmp/\\${USER}'}\n")
    assert load_recipe("recipe.yaml").recipe.storage.root == "/tmp/${USER}"


def test_what_sandboxes_miss_here_is_a_site_fact(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = importlib.import_module("rollhook_toy").Box
    monkeypatch.setattr(box, "missing", lambda self: ["there is no engine; start one"], raising=False)
    write(toys, "extends: base.yaml\n")
    (problem,) = check_recipe("recipe.yaml", site="here").problems
    assert (problem.key, problem.scope) == ("sandbox.use", "site")
    assert problem.message == "there is no engine; start one"
    assert check_recipe("recipe.yaml", site="none").problems == []


def test_a_sandbox_is_judged_by_the_tasks_that_the_recipe_uses(
    toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = importlib.import_module("rollhook_toy").Room

    def problems(self: Any, capabilities: frozenset[str], tasks: Any = None) -> list[str]:
        return [f"cannot run {', '.join(sorted({t.id for t in tasks}))}"]

    monkeypatch.setattr(room, "tasks", lambda self, split=None: [Task(f"only-{split}", "1", "f")])
    monkeypatch.setattr(room, "problems", problems)
    write(toys, "extends: base.yaml\nevaluation: {every: 0}\n")
    (problem,) = check_recipe("recipe.yaml", site="here").problems
    assert problem.message.endswith("cannot run only-train")


def test_an_unset_variable_is_a_site_fact_and_its_key_is_not_judged(toys: Path) -> None:
    write(toys, 'extends: base.yaml\nsteps: "${oc.env:TOY_UNSET_STEPS}"\n')
    checked = check_recipe("recipe.yaml", site="here")
    assert checked.composition == []
    assert [(p.key, p.scope) for p in checked.problems] == [("steps", "site")]
    assert check_recipe("recipe.yaml", site="none").problems == []
    with pytest.raises(RecipeError, match="TOY_UNSET_STEPS"):
        load_recipe("recipe.yaml")


NEEDS = """\
extends: base.yaml
needs: {sft: {recipe: toy-sft, overrides: ["seed=${seed}"]}}
model: {path: "${needs.sft.checkpoint}"}
seed: 4
"""


def test_a_needed_result_is_a_placeholder_until_it_is_known(toys: Path) -> None:
    write(toys, NEEDS)
    before = load_recipe("recipe.yaml")
    assert before.resolved["model"] == {"path": "needs:sft.checkpoint"}
    assert before.recipe.needs["sft"].overrides == ["seed=4"]
    after = load_recipe("recipe.yaml", needs_results={"sft": {"checkpoint": "/runs/1/checkpoints/9"}})
    assert after.resolved["model"] == {"path": "/runs/1/checkpoints/9"}


def test_a_needed_recipe_is_found_beside_the_file_that_needs_it(toys: Path) -> None:
    (toys / "deep").mkdir()
    write(toys / "deep", "extends: ../base.yaml\nneeds: {first: other.yaml}\n")
    write(toys / "deep", "extends: ../base.yaml\n", "other.yaml")
    need = load_recipe("deep/recipe.yaml").recipe.needs["first"]
    assert load_recipe(need.recipe).recipe.name == "base"
    assert need.recipe == "deep/other.yaml"


def test_what_is_wrong_with_a_needed_recipe_is_reported_with_its_own_file(toys: Path) -> None:
    write(toys, "extends: base.yaml\nneeds: {first: other.yaml}\n")
    write(toys, "extends: base.yaml\nstpes: 4\n", "other.yaml")
    assert [(p.source, p.key) for p in check_recipe("recipe.yaml").problems] == [("other.yaml:2", "stpes")]


def test_every_value_has_an_origin(toys: Path) -> None:
    write(toys, "extends: base.yaml\nrollout:\n  group_size: 4\ntrackers:\n- log\n")
    loaded = load_recipe("recipe.yaml", ["seed=9"])
    assert loaded.origins["rollout.group_size"] == "recipe.yaml:3"
    assert loaded.origins["trackers.0.use"] == "recipe.yaml:5"
    assert loaded.origins["agent.use"] == "base.yaml:4"
    assert loaded.origins["seed"] == "command line"


def test_explain_names_the_distribution_of_each_part_and_the_source_of_each_value(toys: Path) -> None:
    checked = check_recipe("base.yaml", ["router.stick.ttl=5"], site="none")
    assert ("router.stick", "router.stick", "rollhook-toy", "1.0") in [
        (s.key, s.component, s.distribution, s.version) for s in supplied(checked)
    ]
    found = {each.key: (each.value, each.source) for each in values(checked)}
    assert found["router.stick.ttl"] == (5.0, "command line")
    assert found["trainer.lr"] == (1e-4, "default of trainer.learner")
    assert found["rollout.group_size"] == (8, "default")
    assert found["trainer.use"] == ("learner", "base.yaml:8")
    assert found["sandbox.create_concurrency"] == (4, "default")
    assert found["router.dp_aware"] == ("auto", "default")


@pytest.mark.parametrize(
    ("written", "meant"), [("on", "on"), ("off", "off"), ("'on'", "on"), ("auto", "auto")]
)
def test_what_yaml_takes_for_a_boolean_is_the_word_that_was_written(
    toys: Path, written: str, meant: str
) -> None:
    write(toys, f"extends: base.yaml\nrouter: {{dp_aware: {written}, drain_on_update: 5}}\n")
    checked = check_recipe("recipe.yaml", site="none")
    assert checked.problems == []
    router = checked.loaded.recipe.router
    assert (router.dp_aware, router.drain_on_update, router.keys) == (meant, 5, {})


def test_deviations_are_told_from_the_shipped_recipe(toys: Path) -> None:
    write(toys, "extends: toy-grpo\nname: mine\nsteps: 7\nagent: talker\n")
    deviations = load_recipe("recipe.yaml", ["rollout.group_size=4", "~model"]).deviations
    assert {key: (d.value, d.reference, d.source) for key, d in deviations.items()} == {
        "steps": (7, 100, "recipe.yaml:3"),
        "agent.use": ("talker", "worker", "recipe.yaml:4"),
        "rollout.group_size": (4, 8, "command line"),
        "model.path": (None, "some/model", "deleted"),
    }


def test_a_shipped_recipe_as_it_is_deviates_in_nothing(toys: Path) -> None:
    assert load_recipe("toy-grpo").deviations == {}
    assert load_recipe("toy-grpo", ["steps=100", "agent=worker"]).deviations == {}


def test_without_a_shipped_recipe_overrides_deviate(toys: Path) -> None:
    assert list(load_recipe("base.yaml", ["steps=7"]).deviations) == ["steps"]


def test_a_lock_holds_everything_and_drives_the_same_recipe(toys: Path) -> None:
    write(toys, "extends: toy-grpo\nsteps: 7\nstorage: {root: '/tmp/\\${USER}'}\ntrackers: [log]\n")
    loaded = load_recipe("recipe.yaml", ["rollout.sampling.temperature=0.5"])
    write_lock(toys / "recipe.lock.yaml", loaded, plugins_of(loaded))
    lock = yaml.safe_load((toys / "recipe.lock.yaml").read_text())
    assert lock["versions"]["rollhook-toy"] == "1.0"
    assert lock["versions"]["rollhook"] == "0.1.0"
    assert lock["deviations"]["steps"] == {"value": 7, "reference": 100, "from": "recipe.yaml:2"}
    assert lock["recipe"]["trainer"] == {
        "use": "learner", "algorithm": "grpo", "lr": 1e-4, "data": None, "betas": [0.9, 0.95],
    }  # fmt: skip
    again = load_recipe(toys / "recipe.lock.yaml")
    assert again.recipe.storage.root == "/tmp/${USER}"
    assert again.deviations == loaded.deviations
    assert again.locked == {key: lock[key] for key in ("versions", "revisions", "digests")}
    assert complete(again, plugins_of(again)) == complete(loaded, plugins_of(loaded))
    assert digest(again, plugins_of(again)) == digest(loaded, plugins_of(loaded))
    assert check_recipe("recipe.lock.yaml", site="none").problems == []


def test_a_lock_does_not_depend_on_the_files_it_came_from(toys: Path) -> None:
    write(toys, NEEDS.replace("toy-sft", "first.yaml"))
    write(toys, "extends: toy-sft\n", "first.yaml")
    loaded = load_recipe("recipe.yaml", needs_results={"sft": {"checkpoint": "some/where"}})
    write_lock(toys / "recipe.lock.yaml", loaded, plugins_of(loaded))
    for name in ("base.yaml", "recipe.yaml", "first.yaml"):
        (toys / name).unlink()
    recipe = compose("recipe.lock.yaml")[0].recipe
    assert recipe.model is not None
    assert recipe.model.path == "some/where"


def test_a_variable_unset_where_the_lock_was_written_is_read_where_it_is_driven(
    toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = read_recipe(write(toys, 'extends: base.yaml\nstorage: {root: "${oc.env:TOY_LATER}"}\n'))
    write_lock(toys / "recipe.lock.yaml", loaded, plugins_of(loaded))
    assert [p.scope for p in read_recipe("recipe.lock.yaml").problems] == ["site"]
    monkeypatch.setenv("TOY_LATER", "/later")
    assert load_recipe("recipe.lock.yaml").recipe.storage.root == "/later"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lock: 2\nrecipe: {name: x}\n", "lock: is 2"),
        ("lock: 1\nrecipe: {name: x, stpes: 1}\n", "stpes: 'stpes' is not a key"),
        ("lock: 1\n", "recipe: is not a mapping"),
        ("lock: 1\nrecipe: {steps: 1}\n", "name: is missing"),
        ("lock: 1\nrecipe: [x]\n", "recipe: is not a mapping"),
    ],
)
def test_a_damaged_lock_is_a_problem(toys: Path, text: str, message: str) -> None:
    write(toys, text, "recipe.lock.yaml")
    assert message in "\n".join(str(p) for p in read_recipe("recipe.lock.yaml").problems)


def test_a_lock_takes_no_overrides(toys: Path) -> None:
    loaded = load_recipe("base.yaml")
    write_lock(toys / "recipe.lock.yaml", loaded, plugins_of(loaded))
    with pytest.raises(RecipeError, match="a lock takes no overrides"):
        load_recipe("recipe.lock.yaml", ["steps=3"])


def test_equal_recipes_have_equal_digests_whatever_their_name(toys: Path) -> None:
    def of(*overrides: str) -> str:
        loaded = load_recipe("base.yaml", overrides)
        return digest(loaded, plugins_of(loaded))

    assert of() == of(
        "name=other", "storage.root=/elsewhere", "trackers=[log]", "steps=100", "trainer.lr=1e-4"
    )
    assert len({of(), of("steps=99"), of("trainer.lr=2e-4"), of("seed=1")}) == 4


def test_the_names_of_a_recipe(toys: Path) -> None:
    loaded = load_recipe("toy-sft", ["plugins=[watcher]", "trackers=[log]"])
    assert component_names(loaded.recipe) == [
        ("router", "spread"), ("trainer", "learner"), ("launcher", "here"), ("tracker", "log"),
        ("plugin", "watcher"), ("pack", "sand"),
    ]  # fmt: skip


def test_names_inside_a_component_are_guessed_without_the_plugin() -> None:
    data = {
        "environment": {"use": "room", "pack": "sand"},
        "sandbox": {"use": "wrapper", "inner": {"use": "box"}},
        "agent": {"use": "talker", "pack": {"use": "dust"}},
    }
    assert set(names_in(data)) == {
        ("environment", "room"), ("pack", "sand"), ("sandbox", "wrapper"), ("sandbox", "box"),
        ("agent", "talker"), ("pack", "dust"),
    }  # fmt: skip


def test_what_a_shipped_recipe_says_may_be_switched_off_by_an_override(toys: Path) -> None:
    write(toys, "extends: base.yaml\nevaluation: {every: 5, greedy: true}\n", "middle.yaml")
    write(toys, "extends: middle.yaml\nrollout: {draw: learnable, draw_floor: 0.2}\n")
    overrides = ["evaluation.every=0", "rollout.draw=uniform"]
    assert check_recipe("recipe.yaml", overrides, site="none").problems == []
    sft = ["evaluation.every=0", "trainer.algorithm=sft", "trainer.data=x"]
    assert check_recipe("recipe.yaml", sft, site="none").problems == []
    late = check_recipe("recipe.yaml", [*overrides, "evaluation.samples=3"], site="none").problems
    assert [p.key for p in late] == ["evaluation.samples"]


def test_compose_gives_a_recipe_that_can_run_or_everything_that_is_wrong(toys: Path) -> None:
    loaded, plugins = compose("base.yaml")
    assert ("router", "stick") in plugins.loaded()
    assert loaded.recipe.name == "base"
    with pytest.raises(RecipeError) as caught:
        compose("base.yaml", ["stpes=1", "trainer.lr=-1", "gateway.token=env:TOY_ABSENT"])
    assert {problem.key for problem in caught.value.problems} == {"stpes", "trainer.lr"}
    with pytest.raises(RecipeError, match="TOY_ABSENT is not set"):
        compose("base.yaml", ["gateway.token=env:TOY_ABSENT"])


def test_the_text_of_a_recipe_is_kept_with_its_overrides(toys: Path) -> None:
    text = load_recipe(write(toys, "extends: base.yaml\n# why\n"), ["steps=3"]).text
    assert text == "extends: base.yaml\n# why\n\n# overrides:\n#   steps=3\n"
