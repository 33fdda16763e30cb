"""`checkpoint.load_from`: what it may name, what becomes of it in recipe and lock, and what is refused."""

import pytest
import yaml
from driving import Rig, chain

from rollhook.checkpoints import CheckpointStore
from rollhook.errors import RollhookError
from rollhook.recipe.check import check_recipe
from rollhook.recipe.load import read_recipe
from rollhook.recipe.lock import lock_text
from rollhook.recipe.start import find_weights
from rollhook.rundir import RunDir
from rollhook.runtime.lineage import Lineage

TRAINS = """\
extends: base.yaml
name: goes-on
checkpoint: {load_from: NAME}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with the checkpoints of steps 2 and 3, and one that was never completed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = RunDir.create(tmp_path / "runs", "demo", run_id="demo")
    store = CheckpointStore(made.checkpoints)
    for step in (2, 3):
        path = store.begin(step)
        (path / "config.json").write_text("{}")
        store.commit(path, step, step, [], 0)
    (made.checkpoints / "00000004").mkdir()
    return made


def test_a_run_by_id_or_directory_means_its_newest_checkpoint(run):
    newest = run.checkpoints / "00000003"
    assert find_weights("demo") == newest
    assert find_weights(str(run.path)) == newest


def test_a_directory_of_weights_means_itself(run, tmp_path, monkeypatch):
    assert find_weights(str(run.checkpoints / "00000002")) == run.checkpoints / "00000002"
    (tmp_path / "llm").mkdir()
    (tmp_path / "llm/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_weights("llm") == tmp_path / "llm"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dmeo", "there is no run 'dmeo' on this machine; did you mean 'demo'"),
        ("./absent", "'./absent' does not exist here"),
        ("{run}/checkpoints/00000004", "is no complete checkpoint"),
        ("{run}/checkpoints", "holds no weights"),
        ("empty", "run empty has committed no step"),
    ],
)
def test_what_holds_no_weights_is_refused_with_the_reason(run, name, said):
    RunDir.create(run.path.parent, "empty", run_id="empty")
    with pytest.raises(RollhookError, match=said):
        find_weights(name.format(run=run.path))


def test_the_resolved_recipe_and_its_lock_have_the_directory_and_its_digest(toys, run):
    (toys / "goes-on.yaml").write_text(TRAINS.replace("NAME", "demo"))
    checked = check_recipe("goes-on.yaml", ["~model"], site="here")
    newest = str(run.checkpoints / "00000003")
    assert [
        problem for problem in checked.problems if "model" in problem.key or "checkpoint" in problem.key
    ] == []
    assert checked.loaded.recipe.checkpoint.load_from == newest
    lock = yaml.safe_load(lock_text(checked.loaded, checked.plugins))
    assert lock["recipe"]["checkpoint"]["load_from"] == newest
    assert lock["digests"]["checkpoint.load_from"]


def test_a_run_that_is_not_here_is_a_problem_of_this_machine_once(toys, run):
    (toys / "goes-on.yaml").write_text(TRAINS.replace("NAME", "elsewhere"))
    here = check_recipe("goes-on.yaml", site="here").problems
    (problem,) = [each for each in here if each.key == "checkpoint.load_from"]
    assert problem.scope == "site"
    assert "there is no run 'elsewhere'" in problem.message
    assert problem.source == "goes-on.yaml:3"
    assert all(
        each.key != "checkpoint.load_from" for each in check_recipe("goes-on.yaml", site="none").problems
    )


def test_the_result_of_a_recipe_that_has_yet_to_run_stays(toys, run):
    text = TRAINS.replace("NAME", '"${needs.first.checkpoint}"') + "needs: {first: toy-sft}\n"
    (toys / "goes-on.yaml").write_text(text)
    loaded = read_recipe("goes-on.yaml")
    assert loaded.resolved["checkpoint"]["load_from"] == "needs:first.checkpoint"
    results = {"first": {"checkpoint": str(run.checkpoints / "00000002"), "run_id": "demo"}}
    done = read_recipe("goes-on.yaml", needs_results=results)
    assert done.recipe.checkpoint.load_from == str(run.checkpoints / "00000002")


def test_model_path_beside_it_has_no_effect_unless_it_was_there_before(toys, run):
    beside = TRAINS.replace("NAME", "demo") + "model: {path: other/model}\n"
    (toys / "goes-on.yaml").write_text(beside)
    (problem,) = [
        each for each in check_recipe("goes-on.yaml", site="none").problems if each.key == "model.path"
    ]
    assert "has no effect: checkpoint.load_from says where weights are" in problem.message
    (toys / "goes-on.yaml").write_text(TRAINS.replace("NAME", "demo"))
    assert check_recipe("goes-on.yaml", site="none").problems == []


async def test_a_run_that_starts_from_another_is_evaluated_before_its_first_step(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "one"))
    first = Rig(tmp_path / "first", steps=2)
    await first.drive()
    weights = find_weights(str(first.run.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "two"))
    second = Rig(
        tmp_path / "second", steps=1, checkpoint={"load_from": str(weights)},
        evaluation={"every": 5, "split": "heldout"},
    )  # fmt: skip
    result = await second.drive()
    assert [evaluation.step for evaluation in result.evaluations] == [0, 1]
    (batch,) = Lineage.read(second.run).batches.values()
    trained = [episode for group in batch["groups"] for episode in group["episodes"]]
    assert second.trained() == {"steps": 1, "digest": chain(first.trained()["digest"], 0, trained)}
