"""Replays of runs whose records are made by hand, with a trainer that computes."""

import asyncio
import importlib
import json
import random
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from rollhook.checkpoints import CheckpointStore
from rollhook.cli.main import main
from rollhook.component import BuildContext, Component, Config
from rollhook.episode_store import EpisodeStore
from rollhook.errors import RunError, UsageError
from rollhook.metrics_file import MetricsWriter
from rollhook.recipe.schema import Recipe
from rollhook.records import EpisodeRecord, Group, Outcome
from rollhook.rundir import RunDir
from rollhook.runtime.batch import permute_rewards
from rollhook.runtime.parts import Parts
from rollhook.runtime.recorded import recorded_recipe, step_range
from rollhook.runtime.replay import Replay, comparable, differing
from rollhook.runtime.seeds import derive
from rollhook.runtime.training import Training
from rollhook.testing.distributions import write_distribution
from rollhook.testing.trainer import FakeTrainer, batch

SEED = 5


class OwnData(FakeTrainer):
    """Trains on rows of its own, the same ones for the same step."""

    @classmethod
    def needs_rollouts(cls, config):
        return False

    def step(self, groups, step):
        assert not groups
        return super().step(batch(step), step)


class FakePlugins:
    """Supplies the trainer under test."""

    def __init__(self, trainer):
        self.trainer = trainer

    def component(self, kind, name):
        return Component(name, Config, f"{__name__}:{self.trainer.__name__}", "")

    def config(self, kind, name, keys, key):
        return Config()

    def load_class(self, kind, name):
        return self.trainer


class FakeCluster:
    """Places objects in this process."""

    async def place(self, target, *args, name, gpus=0):
        module, _, attribute = target.partition(":")
        return FakeRemote(getattr(importlib.import_module(module), attribute)(*args))


class FakeRemote:
    def __init__(self, target):
        self.target = target

    async def call(self, method, *args):
        return getattr(self.target, method)(*args)

    async def stop(self):
        self.target = None


class Recording:
    """A run as the driver writes it, made by hand: what `train` is given is trained, and recorded."""

    def __init__(self, root, trainer=FakeTrainer, keep=2, **rollout):
        self.run = RunDir.create(root / "runs", "demo", run_id="demo")
        self.model = root / "model"
        self.model.mkdir()
        FakeTrainer.initialise_model({}, self.model, 0)
        self.recipe = Recipe.model_validate(
            {"name": "demo", "model": {"path": str(self.model)}, "trainer": {"use": "fake"}, "seed": SEED,
             "rollout": rollout, "checkpoint": {"keep": keep}, "steps": 10}
        )  # fmt: skip
        self.trainer_class = trainer
        self.own_data = trainer is OwnData
        self.begin(None)

    def begin(self, checkpoint):
        """Claim an attempt that goes on from a checkpoint."""
        self.attempt = self.run.claim()
        self.trainer = self.trainer_class(Config(), BuildContext(None, None, None))
        self.trainer.setup(self.model, total_steps=10, seed=derive(SEED, "trainer"))
        step = 0
        if checkpoint is not None:
            step = checkpoint.step
            self.trainer.load(checkpoint.path)
        self.attempt.journal.append("resumed", step=step, version=1, checkpoint=None)
        self.metrics = MetricsWriter(self.run.metrics_path)
        self.store = EpisodeStore(self.run.episodes)
        self.checkpoints = CheckpointStore(self.run.checkpoints)

    def train(self, step, groups, *, commit=True, row=True, rejected=()):
        """Record and train step `step` (from 0); `rejected` groups are recorded only."""
        for group in (*groups, *rejected):
            for sample in group:
                self.store.append(record_of(sample), [sample])
        if not self.own_data:
            self.attempt.journal.append(
                "batch", step=step, version=step + 1, rejected=[group[0].group_id for group in rejected],
                groups=[
                    {"group_id": g[0].group_id, "episodes": [s.episode_id for s in g]} for g in groups
                ],
            )  # fmt: skip
        given = self.permuted(step, groups, rejected) if self.recipe.rollout.permute_rewards else groups
        metrics = self.trainer.step([] if self.own_data else given, step) if given or self.own_data else {}
        if commit:
            path = self.checkpoints.begin(step + 1)
            self.trainer.save(path)
            self.checkpoints.commit(path, step + 1, step + 2, [], 0)
            self.checkpoints.prune(self.recipe.checkpoint.keep)
        if row:
            more = {"time/train": 0.1, "train/step_seconds": random.random()}
            self.metrics.write(step + 1, self.attempt.number, {**metrics, **more})

    def permuted(self, step, groups, rejected):
        made = {
            g[0].group_id: Group(g[0].group_id, "", "", "", len(g), [record_of(s) for s in g], list(g))
            for g in (*groups, *rejected)
        }
        permute_rewards([made[name] for name in sorted(made)], derive(SEED, "permute", step))
        return [made[g[0].group_id].samples for g in groups]

    def end(self):
        self.store.close()
        self.metrics.close()
        self.attempt.finish("stopped")

    def parts(self):
        return Parts(self.recipe, FakePlugins(self.trainer_class), self.model, "demo", 0)

    def replay(self, first=1, last=None, tolerance=1e-6, drain=None):
        """Replay and return the steps."""
        work = Replay(self.run, self.parts())
        done = []
        scratch = self.run.path.parent / "scratch"
        scratch.mkdir(exist_ok=True)

        async def train():
            training = Training(self.parts(), FakeCluster(), scratch)
            await work.run(
                training, first, last or work.steps, tolerance, done.append, drain or asyncio.Event()
            )
            await training.stop()

        asyncio.run(train())
        return done


def record_of(sample):
    return EpisodeRecord(
        episode_id=sample.episode_id, run_id="demo", attempt=1, purpose="train", group_id=sample.group_id,
        task_id=sample.task_id, task_digest="d", environment="sums", family="", seed=0, ended="done",
        outcome=Outcome("scored", sample.reward), reward=sample.reward,
    )  # fmt: skip


def groups_of(step, prefix="a1"):
    """Return a batch whose episodes do not stand in the order of their ids, one with two leaves."""
    made = []
    for number, group in enumerate(batch(step)):
        name = f"s{step:05d}-g{number:03d}"
        members = [
            replace(s, group_id=name, episode_id=f"{prefix}-{name}-e{n:02d}-t0") for n, s in enumerate(group)
        ]
        made.append(members[::-1])
    return made


@pytest.fixture
def recording(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = []

    def make(**keys):
        made.append(Recording(tmp_path, **keys))
        return made[-1]

    yield make
    for each in made:
        each.end()


def trained(recording, steps, **keys):
    made = recording(**keys)
    for step in range(steps):
        made.train(step, groups_of(step))
    made.end()
    return made


def files_of(run):
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_replay_gives_the_recorded_numbers_and_writes_nothing_into_the_run(recording):
    made = trained(recording, 4)
    before = files_of(made.run)
    done = made.replay()
    assert [step.step for step in done] == [1, 2, 3, 4]
    for step in done:
        assert step.replayed == step.recorded
        assert step.differs == []
        assert set(step.recorded) == {"train/loss", "train/tokens", "train/lr"}
    assert len({step.recorded["train/loss"] for step in done}) == 4
    assert files_of(made.run) == before


def test_a_number_that_is_another_is_named(recording):
    made = trained(recording, 3)
    rows = [json.loads(line) for line in made.run.metrics_path.read_bytes().splitlines()]
    rows[1]["train/loss"] *= 1 + 1e-4
    made.run.metrics_path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    assert [step.differs for step in made.replay()] == [[], ["train/loss"], []]
    assert all(step.differs == [] for step in made.replay(tolerance=1e-3))


def test_a_replay_starts_from_a_checkpoint_that_was_kept_and_names_those_that_are_there(recording):
    made = trained(recording, 5, keep=2)
    done = made.replay(first=5)
    assert [(step.step, step.differs) for step in done] == [(5, [])]
    work = Replay(made.run, made.parts())
    assert work.checkpoint(1) is None
    with pytest.raises(RunError, match=r"no checkpoint of step 2, .* at step 3; it can start at step 1, 5"):
        work.checkpoint(3)


def test_what_a_later_attempt_superseded_is_not_replayed(recording):
    made = recording()
    made.train(0, groups_of(0))
    made.train(1, groups_of(1), commit=False)
    made.end()
    made.begin(CheckpointStore(made.run.checkpoints).newest())
    made.train(1, groups_of(7, "a2"))
    made.end()
    done = made.replay()
    assert [(step.step, step.differs) for step in done] == [(1, []), (2, [])]


def test_a_step_without_accepted_groups_changes_nothing(recording):
    made = recording()
    made.train(0, groups_of(0))
    made.train(1, [], rejected=groups_of(1))
    made.train(2, groups_of(2))
    made.end()
    assert [(step.groups, step.differs) for step in made.replay()] == [(3, []), (0, []), (3, [])]


def test_permuted_rewards_are_permuted_again(recording):
    made = recording(permute_rewards=True)
    for step in range(3):
        groups = groups_of(step)
        made.train(step, groups[1:], rejected=groups[:1])
    made.end()
    assert [step.differs for step in made.replay()] == [[], [], []]
    made.recipe = made.recipe.model_copy(
        update={"rollout": made.recipe.rollout.model_copy(update={"permute_rewards": False})}
    )
    assert any(step.differs for step in made.replay())


def test_a_trainer_with_data_of_its_own_is_replayed_without_episodes(recording):
    made = recording(trainer=OwnData)
    for step in range(3):
        made.train(step, [])
    made.end()
    shutil.rmtree(made.run.episodes)
    done = made.replay()
    assert [(step.step, step.groups, step.differs) for step in done] == [(1, 0, []), (2, 0, []), (3, 0, [])]


def test_a_step_without_a_row_is_trained_and_not_compared(recording):
    made = recording()
    for step in range(3):
        made.train(step, groups_of(step), row=step != 1)
    made.end()
    done = made.replay()
    assert [bool(step.recorded) for step in done] == [True, False, True]
    assert done[1].replayed
    assert all(step.differs == [] for step in done)


def test_fresh_weights_are_those_that_the_run_made(recording, tmp_path):
    made = recording()
    fresh = {"model": {"init": {"architecture": "bigram", "sizes": {}}}}
    made.recipe = Recipe.model_validate(made.recipe.model_dump() | fresh)
    shutil.copytree(made.model, made.attempt.path / "model")
    made.train(0, groups_of(0))
    made.end()
    shutil.rmtree(made.model)
    assert [step.differs for step in made.replay()] == [[]]


def test_an_episode_that_is_gone_and_a_batch_that_was_not_recorded_are_named(recording):
    made = trained(recording, 2)
    part = made.run.episodes / "00001.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(RunError, match=r"episode a1-s00001-g002-e00-t0, which step 2 trained, is not in"):
        made.replay()
    made.metrics = MetricsWriter(made.run.metrics_path)
    made.metrics.write(3, 1, {"train/loss": 1.0, "time/train": 1.0})
    with pytest.raises(RunError, match="do not say what step 3 trained"):
        made.replay(first=3)


def test_a_run_that_trained_nothing_has_nothing_to_replay(recording):
    made = recording()
    made.metrics.write(0, 1, {"eval/pass_rate": 0.5})
    with pytest.raises(RunError, match="run demo has trained no step"):
        Replay(made.run, made.parts())


def test_an_interrupted_replay_ends_after_the_step_under_way(recording):
    made = trained(recording, 2)
    drain = asyncio.Event()
    drain.set()
    assert made.replay(drain=drain) == []


def test_numbers_are_compared_relatively_and_not_a_number_with_not_a_number():
    assert differing({"a": 1.0}, {"a": 1.0 + 1e-7}, 1e-6) == []
    assert differing({"a": 1.0}, {"a": 1.0 + 1e-5}, 1e-6) == ["a"]
    assert differing({"a": 1e-12}, {"a": -3e-11}, 1e-6) == []
    assert differing({"a": None}, {"a": None}, 1e-6) == []
    assert differing({"a": None}, {"a": 1.0}, 1e-6) == ["a"]
    infinite = {"train/loss": float("inf"), "train/kl": float("nan")}
    assert comparable(infinite) == {"train/loss": None, "train/kl": None}, "as metrics.jsonl has them"
    assert differing({"a": 1.0}, {"b": 1.0}, 1e-6) == ["a", "b"]


PLUGIN = """
from rollhook import Component, Config, hookimpl

@hookimpl
def rollhook_trainers():
    return [Component("fake", Config, "rollhook.testing.trainer:FakeTrainer", "for tests")]
"""


@asynccontextmanager
async def fake_cluster(scratch, display):
    yield FakeCluster(), SimpleNamespace(drain=asyncio.Event())


@pytest.fixture
def verb(site, tmp_path, monkeypatch):
    """`rollhook replay demo` with trainer `fake` installed and no Ray; returns its exit code."""
    names = {"trainer.fake": "fake_trainer_plugin"}
    modules = {"fake_trainer_plugin": PLUGIN}
    write_distribution(site, "rollhook-fake", entry_points=names, modules=modules, requires=["rollhook>=0.1"])
    monkeypatch.setattr("rollhook.runtime.launch.own_cluster", fake_cluster)

    def call(made, *words):
        lock = {"lock": 1, "recipe": made.recipe.model_dump(mode="json")}
        made.run.lock_path.write_text(yaml.safe_dump(lock))
        with pytest.raises(SystemExit) as ended:
            main(["replay", "demo", "--root", str(tmp_path / "replays"), *words])
        return ended.value.code

    return call


def test_the_verb_shows_the_losses_and_leaves_a_run_of_its_own(recording, verb, tmp_path, capsys):
    made = trained(recording, 3)
    assert verb(made, "--run-id", "again") == 0
    said = capsys.readouterr()
    head, *rows = said.out.splitlines()
    assert head.split("  ")[0] == "step"
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert "3 of 3 steps gave the recorded numbers, within 1e-06" in said.err
    own = tmp_path / "replays/again"
    assert len((own / "replay.jsonl").read_bytes().splitlines()) == 3
    assert json.loads((own / "attempts/1/status.json").read_bytes())["status"] == "succeeded"


def test_the_verb_fails_where_a_number_differs(recording, verb, capsys):
    made = trained(recording, 3)
    text = made.run.metrics_path.read_text()
    made.run.metrics_path.write_text(text.replace('"train/tokens":', '"train/tokens":9', 1))
    assert verb(made, "--json") == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (found["same"], found["run_id"]) == (False, "demo")
    assert [step["differs"] for step in found["steps"]] == [["train/tokens"], [], []]
    assert (
        "2 of 3 steps gave the recorded numbers, within 1e-06; the first that did not is step 1" in said.err
    )


def test_what_cannot_be_replayed_is_said_before_a_directory_is_made(recording, verb, tmp_path, capsys):
    made = trained(recording, 3, keep=1)
    assert verb(made, "--steps", "3") == 1
    assert "it can start at step 1" in capsys.readouterr().err
    assert verb(made, "--steps", "5") == 2
    made.run.lock_path.unlink()
    with pytest.raises(RunError, match=r"has no recipe\.lock\.yaml"):
        recorded_recipe(made.run)
    assert not (tmp_path / "replays").exists()


@pytest.mark.parametrize(("text", "found"), [(None, (1, 9)), ("3", (3, 3)), ("2-4", (2, 4)), ("9-9", (9, 9))])
def test_steps_count_from_one(text, found):
    assert step_range(text, 9) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [("0-3", "count from 1"), ("4-2", "the smaller one first"), ("a", "write A-B"), ("8-12", "has 9 steps")],
)
def test_a_range_that_makes_no_sense_is_refused(text, said):
    with pytest.raises(UsageError, match=said):
        step_range(text, 9)
