"""Evaluation: choice of tasks, what is counted, names of metrics, the table before and after."""

import asyncio
import logging
import math
from collections import Counter
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from rollhook.engine import SamplingParams
from rollhook.environment import Task
from rollhook.records import Outcome
from rollhook.runtime.evaluate import Evaluation, choose, comparison, evaluate
from rollhook.runtime.progress import Display, summaries
from rollhook.runtime.statistics import Rate

TASKS = [Task(f"{f}{n}", f"{f}{n}", "heldout", f) for f in ("big",) for n in range(40)]
TASKS += [Task(f"s{n}", f"s{n}", "heldout", "small") for n in range(10)]


def test_a_choice_is_the_same_each_time_and_spread_over_the_families():
    chosen = choose(TASKS, 16, 1, seed=3)
    assert chosen == choose(TASKS, 16, 1, seed=3)
    assert chosen != choose(TASKS, 16, 1, seed=4)
    assert Counter(t.family for t in chosen) == {"big": 8, "small": 8}


def test_without_a_number_every_task_is_chosen_and_samples_repeat_it():
    assert sorted(t.id for t in choose(TASKS, None, 1, 0)) == sorted(t.id for t in TASKS)
    repeated = Counter(t.id for t in choose(TASKS, 20, 4, 0))
    assert set(repeated.values()) == {4}
    assert len(repeated) == 5


def test_an_evaluation_larger_than_the_split_is_remarked_once(caplog):
    for _ in range(3):
        assert len(choose(TASKS, 1234, 2, 0)) == 100
    assert [record.getMessage() for record in caplog.records] == [
        "evaluation.episodes is 1234, and 50 tasks, 2 samples each, give 100: all of these are run"
    ]


class FakeRunner:
    """Gives the outcomes of a task in turn, and repeats the last."""

    def __init__(self, **outcomes):
        self.left = {task: list(found) for task, found in outcomes.items()}

    async def run(self, request):
        left = self.left[request.task.id]
        outcome = left.pop(0) if len(left) > 1 else left[0]
        return SimpleNamespace(record=SimpleNamespace(episode_id=request.episode_id, outcome=outcome))


GOOD, BAD = Outcome("scored", 1.0), Outcome("scored", 0.0)
BROKEN = Outcome("infra_error", boundary="engine", cause="gone")


async def test_samples_of_a_task_give_pass_at_k_and_errors_are_tried_again():
    tasks = [Task(name, name, "heldout", "f") for name in ("always", "half", "never", "shaky") for _ in "ab"]
    runner = FakeRunner(always=[GOOD], half=[GOOD, BAD], never=[BAD], shaky=[BROKEN, GOOD, BROKEN])
    finished = []
    found = await evaluate(
        runner, tasks, SamplingParams(), step=3, attempt=1, seed=0, slots=asyncio.Semaphore(1),
        finished=lambda result: finished.append(result.record.episode_id),
    )  # fmt: skip
    assert found.families == {"f": Rate(4, 7, 1)}
    assert sorted(found.tasks) == [(1, 1), (2, 0), (2, 1), (2, 2)]
    assert len(set(finished)) == len(finished) == 8 + 1 + 2
    metrics = found.metrics()
    assert metrics["eval/pass_at_2"] == pytest.approx(2 / 3)  # of the tasks with both samples
    assert metrics["eval/stderr"] == pytest.approx(math.sqrt(0.6875 / 3 / 4))


def test_one_sample_per_task_has_no_pass_at_k():
    found = Evaluation(3, "sampled", {"f": Rate(1, 4)}, tasks=[(1, 1), (1, 0), (1, 0), (1, 0)]).metrics()
    assert not any("pass_at" in name for name in found)
    assert found["eval/stderr"] == Rate(1, 4).stderr


def test_metric_names_are_those_that_readers_know():
    found = Evaluation(4, "greedy", {"sort": Rate(3, 4, 1)}).metrics()
    assert found["eval/pass_rate_greedy"] == 0.75
    assert found["eval/errors_greedy"] == 1
    assert found["eval_family_greedy/sort"] == 0.75
    assert Evaluation(4, "sampled", {"sort": Rate(1, 4)}).metrics()["eval_family/sort"] == 0.25


def test_a_comparison_ends_with_the_total():
    before = Evaluation(0, "sampled", {"a": Rate(1, 4), "b": Rate(2, 4)})
    after = Evaluation(9, "sampled", {"a": Rate(4, 4), "b": Rate(2, 4)})
    assert comparison(before, after)[-1] == ("all", Rate(3, 8), Rate(6, 8))


@pytest.mark.parametrize(
    ("families", "labels"),
    [
        ({"": Rate(1, 4)}, ["all"]),
        ({"": Rate(1, 4), "sort": Rate(2, 4)}, ["(none)", "sort", "all"]),
        ({"all": Rate(1, 4), "some": Rate(2, 4)}, ["all", "some", "all"]),
    ],
)
def test_the_table_has_a_row_for_each_family_and_one_for_all(families, labels):
    (shown,) = summaries(
        [Evaluation(step, mode, families) for step in (0, 9) for mode in ("sampled", "greedy")]
    )
    assert shown is not None
    assert list(shown.columns[0].cells) == labels
    assert len(shown.columns) == 1 + 2 * 3


def test_each_of_several_environments_has_its_metrics_and_its_table():
    found = [Evaluation(s, "sampled", {"x": Rate(s, 9)}, environment=e) for s in (1, 9) for e in ("a", "b")]
    assert [table.title for table in summaries(found)] == [
        f"Held-out pass rate of {name}, before and after" for name in "ab"
    ]
    assert found[3].metrics()["eval/b/pass_rate"] == 1.0
    assert found[3].metrics()["eval_family/b/x"] == 1.0


def test_names_of_families_are_no_markup_and_no_commands_to_the_terminal() -> None:
    found = [Evaluation(step, "sampled", {"[/red]\x1b[2J": Rate(1, 2)}, 1.0) for step in (0, 3)]
    console = Console(file=StringIO(), width=120)
    for table in summaries(found):
        console.print(table)
    assert "[/red]\\x1b[2J" in console.file.getvalue()


def test_a_warning_that_quotes_somebody_is_no_command_to_the_terminal(monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    console = Console(file=StringIO(), width=120)
    Display(console).take_logs()
    logging.getLogger("rollhook.there").warning("503: %s", "[/red]\x1b[2J")
    assert "503: [/red]\\x1b[2J" in console.file.getvalue()
