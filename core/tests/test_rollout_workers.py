"""Rollout worker processes: episodes shared out, results back, a death that costs nobody an episode."""

import asyncio
import json
import os
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from driving import FakeCluster, Rig
from surviving import assert_survived, events

from rollhook.environment import Task
from rollhook.errors import BudgetExceeded, RollhookError, RunError, UsageError
from rollhook.recipe.schema import Recipe
from rollhook.records import Outcome
from rollhook.router import Worker
from rollhook.runtime import remote_worker, rollout_worker, rollout_workers, worker_host
from rollhook.runtime.episode import EpisodeRequest
from rollhook.runtime.live import Live
from rollhook.runtime.live_file import snapshot
from rollhook.runtime.mirror import merged, total_stats
from rollhook.runtime.parts import share_of
from rollhook.runtime.peer import Peer
from rollhook.session.workers import Entry

STEPS = 3
TASK = Task("room-1", "digest", "train", "rooms")


def rig_of(tmp_path, **changes):
    rollout = {"workers": 2, "max_staleness": 1, **changes.pop("rollout", {})}
    return Rig(tmp_path, steps=STEPS, rollout=rollout, **changes)


def gated(tmp_path, **changes):
    """Return a rig whose episodes wait for a file, and the directory in which they say that they do."""
    gate = tmp_path / "gate"
    gate.mkdir()
    return rig_of(tmp_path, agent={"use": "answers", "gate": str(gate)}, **changes), gate


async def until(condition, driving):
    """Return once something holds; raises what ends the driving before."""
    while not condition():
        if driving.done():
            raise AssertionError(driving.result())
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(rollout_workers, "FIRST_PAUSE", 0.01)


async def test_a_run_shares_its_episodes_out_and_the_driver_writes_it_all_down(tmp_path):
    cluster = FakeCluster()
    rig, gate = gated(tmp_path, evaluation={"every": 2, "episodes": 4})
    driving = asyncio.ensure_future(rig.drive(cluster=cluster))
    await until(lambda: len(list(gate.iterdir())) == 4, driving)  # the evaluation before the first step
    urls = json.loads((rig.run.path / "attempts/1/gateway.json").read_bytes())["urls"]
    assert len(set(urls)) == 2
    (gate / "open").touch()
    await driving
    assert_survived(rig.run, STEPS)
    assert set(cluster.remotes) == {"trainer", "rollout-worker-1", "rollout-worker-2"}
    written = [entry.event for entry in events(rig.run)]
    assert written.count("lease") == written.count("lease_created") == written.count("lease_released") > 0
    assert rig.sandboxes() == []


async def test_the_episodes_of_a_worker_that_died_run_elsewhere(tmp_path):
    """Invariants 3 and 4: their prompts have an owner, and their sandboxes are deleted."""
    cluster = FakeCluster()
    rig, gate = gated(tmp_path)
    driving = asyncio.ensure_future(rig.drive(cluster=cluster))
    await until(lambda: len(list(gate.iterdir())) == 8, driving)
    assert len(rig.sandboxes()) == 8
    cluster.remotes["rollout-worker-1"][0].die()
    await until(lambda: len(cluster.remotes["rollout-worker-1"]) == 2, driving)
    (gate / "open").touch()
    result = await driving
    assert result.status == "succeeded"
    assert_survived(rig.run, STEPS)
    (lost,) = [entry.data for entry in events(rig.run) if entry.event == "worker_lost"]
    assert (lost["worker"], len(lost["episodes"])) == (1, 4)
    ends = [e.data for e in events(rig.run) if e.event == "episode_finished"]
    assert {end["outcome"] for end in ends} == {"scored"}, "a death cost a refill"
    assert rig.sandboxes() == []


@pytest.mark.parametrize(("host", "looked"), [("elsewhere", 3), (None, 1)])
async def test_a_worker_on_another_host_deletes_what_earlier_attempts_left_there(
    tmp_path, monkeypatch, host, looked
):
    """Invariant 4, for backends whose sandboxes are on the host that made them."""
    rig = rig_of(tmp_path)
    rig.run.claim().finish("failed")
    if host is not None:
        monkeypatch.setattr(worker_host, "socket", SimpleNamespace(gethostname=lambda: host))
    assert (await rig.drive(cluster=FakeCluster())).status == "succeeded"
    reaped = [entry for entry in events(rig.run) if entry.event == "sandboxes_reaped"]
    assert len(reaped) == looked


async def test_sessions_that_others_may_reach_are_announced_by_the_address_of_their_node(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("GATEWAY_TOKEN", "s3cret")
    monkeypatch.setattr(rollout_worker, "node_address", lambda: "10.1.2.3")
    rig = rig_of(tmp_path, gateway={"bind": "0.0.0.0", "token": "env:GATEWAY_TOKEN"})
    await rig.drive(cluster=FakeCluster())
    urls = json.loads((rig.run.path / "attempts/1/gateway.json").read_bytes())["urls"]
    assert [url.rpartition(":")[0] for url in urls] == ["http://10.1.2.3"] * 2


async def test_a_trainer_gets_the_gpus_that_it_asks_for_and_rollout_workers_none(tmp_path):
    cluster = FakeCluster()
    await rig_of(tmp_path, trainer={"use": "counting", "gpus": 0.5}).drive(cluster=cluster)
    assert cluster.gpus == {"trainer": 0.5, "rollout-worker-1": 0, "rollout-worker-2": 0}


async def test_an_episode_that_kills_its_workers_ends_as_an_infrastructure_error(tmp_path):
    cluster = FakeCluster()
    rig, gate = gated(tmp_path, rollout={"max_concurrent": 1, "workers": 2, "refill_limit": 1})
    driving = asyncio.ensure_future(rig.drive(cluster=cluster))
    for count in range(1, 4):
        await until(lambda n=count: len(list(gate.iterdir())) and _busy(cluster) is not None, driving)
        busy = _busy(cluster)
        busy.die()
        await until(lambda n=count: len(_all(cluster)) == 2 + n, driving)
    (gate / "open").touch()
    await driving
    ended = [e.data for e in events(rig.run) if e.event == "episode_finished"]
    assert [end["outcome"] for end in ended if end["outcome"] != "scored"] == ["infra_error"]
    assert_survived(rig.run, STEPS)


def _all(cluster):
    return [each for name, made in cluster.remotes.items() if name != "trainer" for each in made]


def _busy(cluster):
    """Return the live worker that has an episode."""
    for each in _all(cluster):
        if not each.died.is_set() and each._target._worker._live.episodes:
            return each
    return None


async def test_a_run_whose_workers_all_die_again_and_again_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout_workers, "MOST_DEATHS", 2)
    cluster = FakeCluster()
    rig, gate = gated(tmp_path)
    driving = asyncio.ensure_future(rig.drive(cluster=cluster))
    await until(lambda: len(list(gate.iterdir())) == 8, driving)
    while not driving.done():
        for each in _all(cluster):
            if not each.died.is_set():
                each.die()
        await asyncio.sleep(0.01)
    with pytest.raises(
        RunError, match=r"every rollout worker died 2 times in a row; their logs are in .*logs"
    ):
        await driving
    assert rig.sandboxes() == []


async def test_what_keeps_workers_from_being_replaced_ends_the_run(tmp_path, monkeypatch):
    async def fail(self, number):
        raise RuntimeError("the cluster is gone")

    cluster = FakeCluster()
    rig, gate = gated(tmp_path)
    driving = asyncio.ensure_future(rig.drive(cluster=cluster))
    await until(lambda: len(list(gate.iterdir())) == 8, driving)
    monkeypatch.setattr(rollout_workers.RolloutWorkers, "_start", fail)
    for each in _all(cluster):
        each.die()
    with pytest.raises(RuntimeError, match="the cluster is gone"):
        await driving
    assert rig.sandboxes() == []


async def test_a_worker_that_stands_still_counts_as_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_worker, "SILENCE", 2.0)
    cluster = FakeCluster()
    rig, gate = gated(tmp_path)
    driving = asyncio.ensure_future(rig.drive(cluster=cluster))
    await until(lambda: len(list(gate.iterdir())) == 8, driving)
    cluster.remotes["rollout-worker-2"][0].stand_still()
    await until(lambda: len(cluster.remotes["rollout-worker-2"]) == 2, driving)
    (gate / "open").touch()
    await driving
    assert_survived(rig.run, STEPS)
    (lost,) = [entry.data for entry in events(rig.run) if entry.event == "worker_lost"]
    assert "said nothing for 2 s" in lost["reason"]


async def test_what_episodes_do_elsewhere_is_seen_here_and_ended_from_here(tmp_path, monkeypatch):
    made = []
    place = rollout_workers.RolloutWorkers.place
    monkeypatch.setattr(
        rollout_workers.RolloutWorkers, "place", lambda self: made.append(self) or place(self)
    )
    monkeypatch.setattr(worker_host, "SEEN_INTERVAL", 0.05)
    cluster = FakeCluster()
    rig, gate = gated(tmp_path)
    driving = asyncio.ensure_future(rig.drive(cluster=cluster))
    await until(lambda: made and len(made[0].live.episodes) == 8, driving)
    (workers,) = made
    shown = workers.live.episodes
    await until(lambda: all(live.node == "agent" for live in shown.values()), driving)
    found = snapshot(workers.live, workers.table)
    assert {box for each in found["episodes"] for box in each["sandboxes"].values()} == {
        path.stem for path in (tmp_path / "provider").iterdir()
    }
    assert {each["deadline"]["name"] for each in found["episodes"]} == {"agent's clock"}
    assert [engine["open_sessions"] for engine in found["engines"]] == [8]
    hosted = [each._target._worker for each in _all(cluster)]
    for each in hosted:  # each router sees the sessions of both
        (entry,) = each._policy.table
        await until(lambda h=each, e=entry: h._policy.table.load(e).open_sessions == 8, driving)
        assert entry.open_sessions == 4
    name = sorted(shown)[0]
    shown[name].cancel("stale")
    last = asyncio.ensure_future(workers.runners["rooms"].run(EpisodeRequest("last", "g", TASK, 1)))
    await asyncio.sleep(0)
    shown["last"].cancel("no longer wanted")  # in one breath with its beginning
    assert (await last).record.outcome == Outcome("cancelled", cause="no longer wanted")
    await until(lambda: name not in shown, driving)
    (gate / "open").touch()
    await driving
    ends = {e.data["episode_id"]: e.data for e in events(rig.run) if e.event == "episode_finished"}
    assert [i for i, end in ends.items() if end["outcome"] != "scored"] == [name]
    assert ends[name]["outcome"] == "cancelled"
    assert_survived(rig.run, STEPS)
    assert rig.sandboxes() == []


async def test_what_a_worker_cannot_start_without_is_said_as_it_is(tmp_path, monkeypatch):
    import driving

    monkeypatch.setattr(driving.Rooms, "problems", lambda self, *_: ["no room here"], raising=False)
    with pytest.raises(UsageError, match="environment rooms cannot run here: no room here"):
        await rig_of(tmp_path).drive()


async def test_a_driver_that_dies_leaves_a_run_that_goes_on(tmp_path):
    rig = rig_of(tmp_path)
    await asyncio.to_thread(rig.die, "sandbox.after_create", 5)
    await rig.drive()
    assert_survived(rig.run, STEPS)
    assert rig.sandboxes() == []


@pytest.mark.timeout(120)
async def test_a_worker_process_that_is_killed_is_replaced(tmp_path, monkeypatch):
    """The real thing: two Ray actors, and kill -9."""
    pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")
    from rollhook.cluster import Cluster

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    cluster = await Cluster.start(tmp_path / "scratch", cpus=2)
    try:
        rig, gate = gated(tmp_path)
        driving = asyncio.ensure_future(rig.drive(cluster=cluster))
        await until(lambda: len(list(gate.iterdir())) == 8, driving)
        pids = sorted({int(path.suffix[1:]) for path in gate.iterdir()})
        assert len(pids) == 2
        assert os.getpid() not in pids
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: len(list(gate.iterdir())) > 8, driving)  # some of its episodes have begun anew
        (gate / "open").touch()
        result = await driving
    finally:
        await cluster.stop()
    assert result.status == "succeeded"
    assert_survived(rig.run, STEPS)
    lost = [entry.data for entry in events(rig.run) if entry.event == "worker_lost"]
    assert [len(each["episodes"]) for each in lost] == [4]
    assert rig.sandboxes() == []
    assert "has its sessions at" in (rig.run.path / "attempts/1/logs/rollout-worker-1.log").read_text()


# -- parts


class SickEngine:
    """A double of the engine client: one engine, which is well from when it is started anew."""

    def __init__(self):
        self.starts = 0

    async def health(self, worker):
        return self.starts > 0

    async def weight_version(self, worker):
        return 7

    async def start(self, worker):
        await asyncio.sleep(0)
        self.starts += 1
        return True


async def test_an_engine_is_started_anew_once_for_all_workers_that_find_it_dead(tmp_path):
    recipe = Recipe.model_validate({"name": "r", "rollout": {"workers": 2}})
    parts, attempt = SimpleNamespace(recipe=recipe), SimpleNamespace()
    workers = rollout_workers.RolloutWorkers(parts, attempt, None, [], None, Live(), lambda: None)
    engine, worker = SickEngine(), Worker("http://a")
    workers._client, workers._engines, workers._revive = engine, ([worker], 7), engine.start
    assert await asyncio.gather(*(workers._revive_once(None, worker) for _ in range(3))) == [True] * 3
    assert engine.starts == 1
    workers._engines = ([worker], 8)  # it serves old weights
    assert await workers._revive_once(None, worker)
    assert engine.starts == 2


class Unpicklable:
    def __reduce__(self):
        raise TypeError("cannot be sent")


async def two_peers(handlers, tmp_path):
    """Return two ends, `handlers` at the far one, and the tasks that carry between them."""
    near, far = Peer("near", {}, tmp_path / "log"), Peer("far", handlers, tmp_path / "log")

    async def carry(one, other):
        while True:
            other.take(pickle.loads(pickle.dumps(await one.outgoing())))

    return near, far, [asyncio.ensure_future(carry(near, far)), asyncio.ensure_future(carry(far, near))]


async def test_asks_are_answered_in_any_order_and_failures_come_home(tmp_path, caplog):
    gate, ended = asyncio.Event(), asyncio.Event()

    async def slow():
        try:
            await gate.wait()
        finally:
            ended.set()
        return "slow"

    def fail(error):
        raise error

    def run_out():
        raise BudgetExceeded("out of time", node="agent")

    told = []
    handlers = {
        "slow": slow, "double": lambda n: 2 * n, "fail": fail, "run_out": run_out, "tell": told.append,
        "odd": Unpicklable,
    }  # fmt: skip
    near, _, carriers = await two_peers(handlers, tmp_path)
    waiting = asyncio.ensure_future(near.ask("slow"))
    assert await near.ask("double", 4) == 8
    for n in range(5):
        near.tell("tell", n)
    assert await near.ask("double", 1) == 2
    assert told == list(range(5))
    with pytest.raises(UsageError, match="no such key"):
        await near.ask("fail", UsageError("no such key"))
    with pytest.raises(RollhookError, match=r"far\.fail failed: KeyError: 'x'; the traceback is in .*log"):
        await near.ask("fail", KeyError("x"))
    with pytest.raises(RollhookError, match="out of time"):
        await near.ask("run_out")
    with pytest.raises(RollhookError, match="a message failed: TypeError"):
        await near.ask("double", BudgetExceeded("cannot be read", node="agent"))
    with pytest.raises(RollhookError, match="cannot be sent"):
        await near.ask("odd")
    with pytest.raises(RollhookError, match="nothing"):
        await near.ask("nothing")
    gate.set()
    assert await waiting == "slow"
    gate.clear()
    ended.clear()
    withdrawn = asyncio.ensure_future(near.ask("slow"))
    await near.ask("double", 1)
    withdrawn.cancel()
    await ended.wait()
    at_once = asyncio.ensure_future(near.ask("slow"))
    await asyncio.sleep(0)
    at_once.cancel()  # before the other end has heard of it
    last = asyncio.ensure_future(near.ask("slow"))
    await near.ask("double", 1)
    near.lose(RunError("it died"))
    with pytest.raises(RunError, match="it died"):
        await last
    with pytest.raises(RunError, match="it died"):
        await near.ask("double", 1)
    for carrier in carriers:
        carrier.cancel()


@pytest.mark.parametrize(("total", "count"), [(4, 1), (4, 4), (5, 3), (0, 2), (7, 4)])
def test_shares_sum_to_the_whole_and_differ_by_at_most_one(total, count):
    shares = [share_of(total, number, count) for number in range(1, count + 1)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_what_processes_see_of_the_engines_is_put_together():
    one, other = Worker("http://a", 0), Worker("http://a", 1)
    tables = [
        [Entry(one, 3, open_sessions=2, tokens_in_flight=10), Entry(other, 3)],
        [Entry(one, 3, healthy=False, open_sessions=1, tokens_in_flight=5, queue_seconds=2.0)],
    ]
    found = {entry.worker: entry for entry in merged(tables)}
    assert (found[one].open_sessions, found[one].tokens_in_flight) == (3, 15)
    assert (found[one].healthy, found[one].queue_seconds, found[other].healthy) == (False, 2.0, True)


def test_the_counts_of_several_pools_are_those_of_one():
    pools = [
        {"sandbox/creates": 3.0, "sandbox/create_seconds_mean": 1.0, "sandbox/live": 2.0},
        {"sandbox/creates": 1.0, "sandbox/create_seconds_mean": 5.0, "sandbox/live": 1.0},
        {},
    ]
    assert total_stats(pools) == {
        "sandbox/creates": 4.0, "sandbox/create_seconds_mean": 2.0, "sandbox/live": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(("unpriced", "cost"), [(0.0, 5.0), (1.0, None)])
def test_a_cost_that_one_pool_does_not_know_is_not_told(unpriced: float, cost: float | None):
    pools = [{"sandbox/cost": 2.0, "sandbox/unpriced": 0.0}, {"sandbox/unpriced": unpriced}]
    pools[1] |= {} if unpriced else {"sandbox/cost": 3.0}
    assert total_stats(pools).get("sandbox/cost") == cost
