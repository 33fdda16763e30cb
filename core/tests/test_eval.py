"""`rollhook eval` over fake engines and sandboxes: what is counted, resumed, refused and left behind."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import evaluating
import pytest
from conftest import only_toys
from dying import elsewhere

from rollhook.cli.main import main
from rollhook.environment import Task
from rollhook.episode_store import read_records
from rollhook.journal import read
from rollhook.metric_names import unlisted
from rollhook.metrics_file import read_metrics
from rollhook.rundir import RunDir
from rollhook.runtime import standalone_eval
from rollhook.runtime.scores import read_scores
from rollhook.testing.records import check_episodes


@pytest.fixture
def root(site, tmp_path, monkeypatch):
    """A directory for runs, with the parts of the recipe installed; no Ray."""
    evaluating.install(site)
    only_toys(monkeypatch)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("rollhook.cluster.Cluster.start", evaluating.start_nowhere)
    return tmp_path


@pytest.fixture
def evaluate(root, capsys):
    """Run `rollhook eval` in this process: exit code, stdout, stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["eval", *map(str, arguments)])
        shown = capsys.readouterr()
        return ended.value.code, shown.out, shown.err

    return run


def records(root):
    return list(read_records(root / "runs" / "e" / "episodes"))


def test_an_evaluation_counts_by_task_and_leaves_a_run(root, evaluate):
    recipe = evaluating.write_recipe(root)
    code, out, err = evaluate(recipe, "--run-id", "e", "--samples", "4", "--k", "1,2,4", "--json")
    assert code == 0, err
    found, made = json.loads(out), records(root)
    assert found == json.loads((root / "runs/e/evaluation.json").read_bytes())
    assert check_episodes(root / "runs/e/episodes") == []
    assert {record.purpose for record in made} == {"eval"}
    assert len({record.seed for record in made}) == len(made) == 24
    passes = Counter(record.task_id for record in made if record.reward)
    assert {t["task_id"]: (t["n"], t["c"], t["errors"]) for t in found["tasks"]} == {
        f"{f}-{n}": (4, passes[f"{f}-{n}"], 0) for f in ("easy", "hard") for n in range(3)
    }
    easy, hard, total = found["results"]
    assert (easy["family"], hard["family"], total["family"]) == ("easy", "hard", None)
    assert easy["pass_at"]["1"]["value"] == pytest.approx(sum(passes.values()) / 12)
    assert easy["pass_at"]["1"]["value"] <= easy["pass_at"]["2"]["value"] <= easy["pass_at"]["4"]["value"]
    assert hard["pass_at"]["4"]["value"] == 0 < hard["pass_at"]["4"]["high"]
    assert found["conditions"]["sampling"]["temperature"] == 1.0
    assert not list((root / "provider").glob("*"))
    run = RunDir(root / "runs/e")
    assert [attempt.status for attempt in run.attempts()] == ["succeeded"]
    events = Counter(entry.event for entry in read(run.attempts()[0].journal_path))
    assert events["episode_started"] == events["episode_finished"] == 24
    (row,) = read_metrics(run.metrics_path)
    assert row["eval/pass_rate"] == total["pass_at"]["1"]["value"]
    assert row["eval/pass_at_4"] == total["pass_at"]["4"]["value"]
    assert unlisted(row.keys() - {"schema", "step", "attempt", "time"}) == set()
    assert "easy" in err
    assert "pass@4" in err


def test_killed_in_the_middle_it_is_resumed_and_nothing_is_left(root, evaluate):
    evaluate(evaluating.write_recipe(root), "--run-id", "whole")
    whole = read_scores(root / "runs/whole/evaluation.json")
    (root / "faults/kill-hard-1").touch()
    recipe = str(root / "riddles.yaml")
    code = elsewhere(None, 1, evaluating.evaluate_until_killed, ["eval", recipe, "--run-id", "e"])
    assert code == -signal.SIGKILL
    assert len(list((root / "provider").glob("*"))) == 1
    before = records(root)
    assert 0 < len(before) < 12
    (root / "faults/kill-hard-1").unlink()
    code, _, err = evaluate("--resume", "e")
    assert code == 0, err
    assert f"{len(before)} of 12 episodes are kept" in err
    after = records(root)
    assert [each.episode_id for each in after][: len(before)] == [each.episode_id for each in before]
    assert len({each.episode_id for each in after}) == len({each.seed for each in after}) == len(after) == 12
    assert read_scores(root / "runs/e/evaluation.json").tasks == whole.tasks
    assert not list((root / "provider").glob("*"))
    assert [attempt.status for attempt in RunDir(root / "runs/e").attempts()] == [None, "succeeded"]


def test_what_gave_no_verdict_runs_again_on_resume(root, evaluate):
    (root / "faults").mkdir()
    (root / "faults/broken-easy-1").touch()
    code, _, err = evaluate(evaluating.write_recipe(root), "--run-id", "e")
    assert code == 0
    assert "2 episodes gave no verdict" in err
    task = next(t for t in read_scores(root / "runs/e/evaluation.json").tasks if t.task_id == "easy-1")
    assert (task.n, task.errors) == (0, 2)
    (root / "faults/broken-easy-1").unlink()
    count = len(records(root))
    code, _, err = evaluate("--resume", "e", "--k", "1")
    assert code == 0
    assert len(records(root)) == count + 2
    assert all((t.n, t.errors) == (2, 0) for t in read_scores(root / "runs/e/evaluation.json").tasks)


def test_a_complete_evaluation_is_counted_again_without_an_engine(root, evaluate, monkeypatch):
    evaluate(evaluating.write_recipe(root), "--run-id", "e")

    async def refuse(scratch):
        raise AssertionError("nothing is to be started")

    monkeypatch.setattr("rollhook.cluster.Cluster.start", refuse)
    code, out, err = evaluate("--resume", "e", "--k", "2", "--json")
    assert code == 0, err
    assert list(json.loads(out)["results"][0]["pass_at"]) == ["2"]


def test_interrupted_it_stops_in_order_and_says_how_to_go_on(root, evaluate):
    (root / "faults").mkdir()
    (root / "faults/interrupt-hard-0").touch()
    code, _, err = evaluate(evaluating.write_recipe(root), "--run-id", "e")
    assert code == 3
    assert "rollhook eval --resume e" in err
    assert not list((root / "provider").glob("*"))
    assert [attempt.status for attempt in RunDir(root / "runs/e").attempts()] == ["stopped"]
    (root / "faults/interrupt-hard-0").unlink()
    assert evaluate("--resume", "e")[0] == 0
    assert read_scores(root / "runs/e/evaluation.json").samples == 2


def test_without_a_single_verdict_it_ends_early_with_the_cause(root, evaluate, monkeypatch):
    monkeypatch.setattr(standalone_eval, "HOPELESS", 4)
    recipe = evaluating.write_recipe(root)
    for family in ("easy", "hard"):
        for number in range(3):
            (root / f"faults/broken-{family}-{number}").touch()
    code, _, err = evaluate(recipe, "--run-id", "e")
    assert code == 1
    assert "no episode came to a verdict (verifier: OSError: the judge is ill)" in err
    assert len(records(root)) == 4
    assert not (root / "runs/e/evaluation.json").exists()


def test_an_endpoint_needs_neither_weights_nor_ray(root, site):
    recipe = evaluating.write_recipe(root, engine="oracle", more="").read_text()
    recipe = recipe.replace(f"model: {{path: {root}/model}}\n", "").replace("router: first\n", "")
    (root / "riddles.yaml").write_text(recipe)
    source = (
        "import sys\nfrom rollhook.cli.main import main\n"
        f"try:\n    main(['eval', {str(root / 'riddles.yaml')!r}, '--run-id', 'e', '--json'])\n"
        "except SystemExit as ended:\n    assert not ended.code, ended\n"
        "assert not {'ray', 'torch', 'transformers'} & set(sys.modules)\n"
    )
    path = os.pathsep.join([str(site), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["engine"] == {"use": "oracle"}
    assert sum(task["n"] for task in found["tasks"]) == 12
    assert records(root)[0].messages[-1]["content"] == "man"


def test_other_weights_are_evaluated_greedily_and_those_of_the_recipe_need_not_be_there(root, evaluate):
    recipe = evaluating.write_recipe(root)
    (root / "model").rename(root / "other")
    code, out, err = evaluate(
        recipe, "--checkpoint", root / "other", "--greedy", "--samples", 1, "--run-id", "e", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert (found["mode"], found["model"]) == ("greedy", str(root / "other"))
    assert found["conditions"]["sampling"] == {"temperature": 0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--k", "1,8"], "--k 1,8: each must be from 1 to the samples per task, 2; raise --samples"),
        (["--k", "one"], "--k one: write numbers with commas"),
        (["--resume", "e"], "name a recipe to evaluate, or an evaluation to --resume, and not both"),
        (["--checkpoint", "nowhere"], "there is no run 'nowhere'"),
        (["environment=null"], "environment: is missing: there is nothing to evaluate on"),
        (["~model.path", "+model.init={architecture: llama, sizes: {}}"], "an evaluation makes no weights"),
        (["~model"], "model.path: is missing: an evaluation makes no weights"),
    ],
)
def test_wrong_usage_is_refused_in_words(root, evaluate, arguments, said):
    code, _, err = evaluate(evaluating.write_recipe(root), *arguments)
    assert code in {1, 2}
    assert said in " ".join(err.split())


def test_a_run_that_trained_is_not_resumed(root, evaluate):
    run = RunDir.create(root / "runs", "t", run_id="t")
    run.lock_path.write_bytes(b"lock: 1")
    assert "t is no run of `rollhook eval`" in evaluate("--resume", "t")[2]
    run.claim().finish("stopped")
    said = evaluate("--resume", "t")[2]
    assert "t is one of `rollhook run`, so `rollhook eval` cannot go on with it" in said
    assert len(run.attempts()) == 1


def test_an_evaluation_is_not_trained(root, evaluate, capsys):
    evaluate(evaluating.write_recipe(root), "--run-id", "e", "--samples", "1")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--resume", "e"])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "e is one of `rollhook eval`, so `rollhook run` cannot go on with it" in said
    assert "Ray" not in said
    assert evaluate("--resume", "e")[0] == 0


def test_without_a_trainer_a_run_is_refused_before_anything_is_made(root, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", str(evaluating.write_recipe(root, more="")), "environment.split=heldout"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "trainer: is missing: a run trains" in said
    assert "Ray" not in said
    assert not (root / "runs").exists()


def test_names_of_families_are_no_markup_and_no_commands_to_the_terminal(root, evaluate, monkeypatch):
    tasks = [Task(n, n, "heldout", f"[/{n}]\x1b[2J") for n in ("easy", "hard")]
    monkeypatch.setattr(evaluating.Riddles, "tasks", lambda self, split=None: tasks)
    code, _, err = evaluate(evaluating.write_recipe(root), "--run-id", "e", "--samples", "1")
    assert code == 0, err
    assert "[/easy]\\x1b[2J" in err
