"""What survives of a run's attempts, and what the next one takes over."""

import numpy as np
import pytest

from rollhook.environment import Task
from rollhook.episode_store import EpisodeStore
from rollhook.errors import RunError
from rollhook.journal import Journal
from rollhook.recipe.schema import Recipe
from rollhook.records import EpisodeRecord, Outcome, Sample
from rollhook.rundir import RunDir
from rollhook.runtime.lineage import Lineage
from rollhook.runtime.reuse import owned_prompts

TASK = Task("t1", "d1", "train", "sort")


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "demo", run_id="demo")


def attempt(run, number, *events):
    """Write the journal of an attempt: (event, data) in order."""
    path = run.path / "attempts" / str(number)
    path.mkdir()
    (path / "owner.json").write_text("{}")
    with Journal(path / "journal.jsonl") as journal:
        for event, data in events:
            journal.append(event, **data)


def prompts(step, count=1):
    drawn = [
        {"group_id": f"s{step:05d}-g{n:03d}", "task_id": "t1", "environment": "fake"} for n in range(count)
    ]
    return "prompts", {"step": step, "prompts": drawn, "draw": {"fake": {"drawn": step}}}


def published(version, step):
    return "published", {"version": version, "step": step}


def batch(step, *group_ids, rejected=()):
    groups = [{"group_id": name, "episodes": [f"a1-{name}-e00-t0"]} for name in group_ids]
    return "batch", {"step": step, "version": 1, "groups": groups, "rejected": list(rejected)}


def resumed(step):
    return "resumed", {"step": step, "version": 0, "checkpoint": None}


def evaluated(step):
    return "evaluated", {"evaluation": {"step": step, "mode": "sampled"}}


def test_what_an_attempt_did_beyond_the_next_ones_base_does_not_survive(run):
    attempt(
        run, 1, published(1, 0), prompts(0), evaluated(0), batch(0, "s00000-g000"), published(2, 1),
        prompts(1), batch(1, "s00001-g000"), published(3, 2), evaluated(2), prompts(2),
    )  # fmt: skip
    attempt(run, 2, resumed(1), published(4, 1), batch(1, "s00002-g000"), published(5, 2))
    lineage = Lineage.read(run)
    assert lineage.bases == {1: 0, 2: 1}
    assert lineage.versions == {1: 0, 2: 1, 4: 1, 5: 2}
    assert lineage.newest_version == 5
    assert lineage.batches[1]["groups"][0]["group_id"] == "s00002-g000"
    assert lineage.consumed == {"s00000-g000", "s00002-g000"}
    assert [each["step"] for each in lineage.evaluations] == [0]
    assert list(lineage.prompts) == ["s00000-g000", "s00001-g000", "s00002-g000"]
    assert (lineage.next_step, lineage.draw) == (3, {"fake": {"drawn": 2}})


def test_rows_that_a_later_attempt_did_again_are_superseded(run):
    attempt(run, 1)
    attempt(run, 2, resumed(2))
    attempt(run, 3)  # died before it went on
    attempt(run, 4, resumed(3))
    rows = [{"attempt": a, "step": s} for a, s in [(1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (4, 4)]]
    kept = [(row["attempt"], row["step"]) for row in Lineage.read(run).surviving(rows)]
    assert kept == [(1, 1), (1, 2), (2, 3), (4, 4)]


def episode(run, episode_id, versions, outcome=None):
    """Store a finished episode whose tokens have these versions."""
    outcome = outcome or Outcome("scored", 1.0)
    group_id = episode_id.split("-", 1)[1].rpartition("-e")[0]
    record = EpisodeRecord(
        episode_id=episode_id, run_id="demo", attempt=1, purpose="train", group_id=group_id, task_id="t1",
        task_digest="d1", environment="fake", family="sort", seed=0, ended="done", outcome=outcome,
        reward=outcome.reward, versions=versions,
    )  # fmt: skip
    ones, spans = np.ones(1, np.uint8), np.array([[0, 1, *versions]], np.int32)
    sample = Sample(
        episode_id,
        group_id,
        "t1",
        0,
        ones.astype(np.int32),
        ones,
        np.zeros(1, np.float32),
        spans,
        1.0,
        "scored",
    )
    store = EpisodeStore(run.episodes)
    store.append(record, [sample] if outcome.trains else [])
    store.close()


def owned(run, base, limit, find=lambda name, task_id: TASK):
    recipe = Recipe.model_validate({"name": "r", "rollout": {"group_size": 2, "max_staleness": limit}})
    lineage = Lineage.read(run)
    lineage.cut(base)
    lineage.bases[9] = base
    prompts, refused = owned_prompts(lineage, run, recipe, find)
    return {
        prompt.group_id: [record.episode_id for record in group.records] for prompt, group in prompts
    }, refused


def test_prompts_that_no_surviving_step_took_are_owned_again_with_episodes_that_may_still_train(run):
    attempt(
        run, 1, published(1, 0), prompts(0, 2), batch(0, "s00000-g000"), published(2, 1), prompts(1, 2),
        batch(1, "s00001-g000", rejected=["s00000-g001"]), published(3, 2),
    )  # fmt: skip
    episode(run, "a1-s00000-g000-e00-t0", (1, 1))  # trained, and that survives
    episode(run, "a1-s00000-g001-e00-t0", (1, 1))  # rejected in a step that did not survive
    episode(run, "a1-s00001-g000-e00-t0", (1, 2))  # trained in a step that did not survive
    episode(run, "a1-s00001-g000-e01-t0", (2, 3))  # has a token of a version that did not survive
    episode(run, "a1-s00001-g001-e01-t0", (2, 2), Outcome("infra_error", boundary="sandbox", cause="gone"))
    episode(run, "a1-s00001-g001-e01-t1", (2, 2))
    again, refused = owned(run, base=1, limit=1)
    assert again == {
        "s00000-g001": ["a1-s00000-g001-e00-t0"],
        "s00001-g000": ["a1-s00001-g000-e00-t0"],
        "s00001-g001": ["a1-s00001-g001-e01-t1"],
    }
    assert refused == {"a1-s00001-g000-e01-t0": "lineage"}
    again, refused = owned(run, base=1, limit=0)
    assert again == {
        "s00000-g001": [],
        "s00001-g000": [],
        "s00001-g001": ["a1-s00001-g001-e01-t1"],
    }
    assert refused["a1-s00000-g001-e00-t0"] == "stale"


def test_a_task_that_is_gone_is_named(run):
    attempt(run, 1, published(1, 0), prompts(0))
    with pytest.raises(RunError, match="task t1 of environment fake, which is not there any more"):
        owned(run, base=0, limit=0, find=lambda name, task_id: None)
