"""`rollhook compare`: which tasks are paired, what is said to differ, evaluations of runs that trained."""

import json
from dataclasses import replace

import pytest

from rollhook.cli.main import main
from rollhook.durable import write_atomic
from rollhook.episode_store import EpisodeStore
from rollhook.errors import RunError, UsageError
from rollhook.records import EpisodeRecord, Outcome
from rollhook.rundir import RunDir
from rollhook.runtime.compare import compare, compare_first_and_last, compare_two, find_scores
from rollhook.runtime.scores import NAME, Scores, TaskScore, score, write_scores

CONDITIONS = {"split": "heldout", "environment": ["riddles"], "sampling": {"temperature": 1.0, "top_p": 1.0}}


def task(number, c, n=4, family="f", **changes):
    return replace(TaskScore("riddles", f"t{number}", f"d{number}", family, n, c, 0), **changes)


def scores(run_id, *tasks, **conditions):
    return Scores(run_id, "sampled", list(tasks), {**CONDITIONS, **conditions})


def test_families_and_total_are_compared_over_the_common_tasks():
    a = scores("a", *(task(n, 1, family="fg"[n % 2]) for n in range(12)))
    b = scores("b", *(task(n, 3 if n % 2 else 1, family="fg"[n % 2]) for n in range(12)))
    found = compare(a, b)
    assert [line.family for line in found.lines] == ["f", "g", None]
    f, g, total = (line.difference for line in found.lines)
    assert (f.value, f.p) == (0, 1)
    assert (g.value, g.p) == (0.5, 2 / 2**6)
    assert (total.value, total.tasks) == (0.25, 12)
    assert (found.lines[1].a.value, found.lines[1].b.value) == (0.25, 0.75)
    assert found.warnings == []


def test_what_is_not_alike_is_named_and_left_out():
    a = scores("a", *(task(n, 1) for n in range(9)))
    b = scores(
        "b", task(0, 1), task(1, 2, digest="other"), task(2, 0, n=0, errors=4), task(99, 1), task(3, 2, n=5),
        split="test", sampling={"temperature": 0.5, "top_p": 1.0},
    )  # fmt: skip
    found = compare(a, b)
    assert found.tasks == 2
    assert found.warnings == [
        "split differs: 'heldout' in a, 'test' in b",
        "sampling.temperature differs: 1.0 in a, 0.5 in b",
        "samples per task differ: 4 in a, 5 in b",
        "1 tasks have changed (their digests differ) and are left out: t1",
        "1 tasks have no verdict on one side and are left out: t2",
        "5 tasks are in the first only and are left out: t4, t5, t6, t7, t8",
        "1 tasks are in the second only and are left out: t99",
    ]


def test_without_a_common_task_there_is_nothing_to_compare():
    with pytest.raises(RunError, match="a and b have no task in common"):
        compare(scores("a", task(1, 1)), scores("b", task(2, 1)))


def test_the_same_task_id_in_two_environments_is_two_tasks():
    a = scores("a", task(1, 4), task(1, 0, environment="sums"))
    found = compare(a, a)
    assert [line.family for line in found.lines] == ["riddles/f", "sums/f", None]
    assert [line.a.value for line in found.lines] == [1, 0, 0.5]


def test_files_are_compared_and_printed(tmp_path, capsys):
    for name, c in (("a", 1), ("b", 3)):
        (tmp_path / name).mkdir()
        write_scores(tmp_path / name, scores(name, *(task(n, c) for n in range(8))), [1])
    paths = [str(tmp_path / name / NAME) for name in "ab"]

    def run(*more):
        with pytest.raises(SystemExit) as ended:
            main(["compare", *paths, *more])
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert "+0.500 [" in run()
    data = json.loads(run("--json"))
    (line,) = data["comparisons"][0]["lines"]
    assert data["schema"] == 1
    assert line["difference"]["p"] == pytest.approx(2 / 2**8)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"schema": 1, "tasks": [{"n": 1}]}', '{"schema": 99}'])
def test_a_file_that_is_no_evaluation_is_refused_in_words(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(RunError, match=r"is no evaluation|upgrade rollhook"):
        find_scores(str(tmp_path / NAME))


def record(attempt, step, mode, number, reward, again=0, kind="scored"):
    outcome = Outcome(kind, reward, boundary="" if reward is not None else "engine")
    return EpisodeRecord(
        episode_id=f"a{attempt}-s{step:05d}-{mode}-{number:05d}-t{again}", run_id="r", attempt=attempt,
        purpose="eval", group_id="g", task_id=f"t{number}", task_digest=f"d{number}", environment="rooms",
        family="f", seed=number, ended="done", outcome=outcome, reward=reward,
    )  # fmt: skip


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A run whose second attempt went on from step 5, after the first had evaluated step 10."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = RunDir.create(tmp_path, "r", run_id="r")
    recipe = {
        "environment": {"use": "rooms"}, "evaluation": {"split": "heldout"}, "agent": {"use": "x"},
        "rollout": {"sampling": {"temperature": 1.0}}, "budgets": {},
    }  # fmt: skip
    write_atomic(run.lock_path, json.dumps({"recipe": recipe}).encode())
    store = EpisodeStore(run.episodes)
    for number, made in enumerate(
        [
            [(0, n, 0.0) for n in range(6)]
            + [(5, n, 0.0) for n in range(6)]
            + [(10, n, 1.0) for n in range(6)],
            [(8, n, float(n > 0)) for n in range(6)],
        ],
        start=1,
    ):
        attempt = run.claim()
        if number == 2:
            attempt.journal.append("resumed", step=5, version=3, checkpoint="x")
        for step, n, reward in made:
            store.append(record(number, step, "sampled", n, reward), ())
        attempt.finish("succeeded")
    store.append(record(2, 8, "sampled", 6, None, kind="infra_error"), ())
    store.append(record(2, 8, "sampled", 6, 1.0, again=1), ())
    store.close()
    return run


def test_a_run_that_trained_is_compared_with_itself_along_its_surviving_lineage(trained):
    assert [each.step for each in find_scores("r")] == [0, 5, 8]
    (found,) = compare_first_and_last("r")
    assert (found.a, found.b, found.tasks) == ("r at step 0", "r at step 8", 6)
    assert found.lines[-1].difference.value == pytest.approx(5 / 6)
    assert find_scores("r")[-1].tasks[-1].n == 1, "the try that was judged counts, not the one before it"
    (found,) = compare_two("r", str(trained.path))
    assert found.lines[-1].difference.value == 0
    assert found.warnings == []
    trained.lock_path.write_text("recipe: [")
    with pytest.raises(RunError, match=r"cannot be read: [^\n]+$"):
        find_scores("r")


def test_one_evaluation_cannot_be_compared_with_itself(trained, tmp_path):
    write_scores(trained.path, scores("r", task(1, 1)), [1])
    with pytest.raises(UsageError, match="name another"):
        compare_first_and_last("r")
    RunDir.create(tmp_path, "q", run_id="q")
    with pytest.raises(RunError, match="run q has no evaluation"):
        compare_two("q", "r")


def test_a_judged_try_counts_whatever_came_before_or_after_it():
    tries = [record(1, 0, "sampled", 1, None, kind="infra_error"), record(1, 0, "sampled", 1, 1.0)]
    for order in (tries, tries[::-1]):
        (found,) = score((1, each) for each in order)
        assert (found.n, found.c, found.errors) == (1, 1, 0)


@pytest.mark.parametrize(
    "change", [{"n": "4"}, {"c": 9}, {"c": -1}, {"errors": -1}, {"task_id": 7}, {"family": None}]
)
def test_counts_that_cannot_be_are_refused(change, tmp_path):
    write_scores(tmp_path, scores("a", task(1, 1)), [1])
    data = json.loads((tmp_path / NAME).read_bytes())
    data["tasks"][0] |= change
    (tmp_path / NAME).write_text(json.dumps(data))
    with pytest.raises(RunError, match="is no evaluation of Rollhook"):
        find_scores(str(tmp_path / NAME))


def test_a_name_that_no_file_can_have_is_no_run(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["compare", "x" * 300])
    assert ended.value.code == 1
    assert "there is no run" in capsys.readouterr().err


def test_names_of_tasks_and_families_do_not_reach_the_terminal_as_they_are(tmp_path, capsys):
    evil = "\x1b[2J\u202e[/red]\n"
    for name, more in (("a", ()), ("b", (task(9, 1, task_id=evil),))):
        (tmp_path / name).mkdir()
        write_scores(tmp_path / name, scores(name, task(1, 1), task(2, 1, family=evil), *more), [1])
    with pytest.raises(SystemExit):
        main(["compare", str(tmp_path / "a" / NAME), str(tmp_path / "b" / NAME)])
    said = capsys.readouterr()
    assert not {"\x1b", "\u202e"} & set(said.out + said.err)
    assert "\\x1b[2J\\u202e[/red]\\n  1 " in said.out
    assert "\\x1b[2J\\u202e[/red]" in said.err
