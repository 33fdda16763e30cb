"""The engine contract passes for a fake that keeps it, and each broken one fails just its cases."""

import asyncio
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollhook.errors import EngineError
from rollhook.testing.contract import failing_cases
from rollhook.testing.engine import EngineContract
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine, FakeEngines, drawn

LONG = 300


def reply(ids, params):
    return drawn(200, length=max(params["max_new_tokens"], 1))(ids, params)


def config():
    return SimpleNamespace(reply=reply, count=1)


class EngineThread:
    """A running engine on a loop of its own, so that every case, on whatever loop, can talk to it."""

    def __init__(self, make=lambda: FakeEngine(reply, token_seconds=0.001, queue_seconds=0.0)):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.engine = make()
        self.call(self.engine.start())

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def close(self):
        self.call(self.engine.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def served():
    thread = EngineThread()
    yield thread
    thread.close()


class TestFakeEngines(EngineContract):
    long_reply = LONG

    @pytest.fixture
    def engine(self, tmp_path):
        return FakeEngines(config(), build_context(tmp_path))

    @pytest.fixture
    def model_dir(self, tmp_path):
        return tmp_path

    @pytest.fixture
    def worker(self, served):
        return served.engine.worker

    @pytest.fixture
    def next_weights(self, tmp_path):
        return weights_in(tmp_path)


versions = itertools.count(100)


def weights_in(directory):
    return lambda: (next(versions), directory)


class Lossy(FakeEngine):
    """Answers with one log-probability too few."""

    def __init__(self, *args, **keys):
        super().__init__(*args, **keys)

        def mangle(answer):
            del answer["meta_info"]["output_token_logprobs"][-1:]
            return answer

        self.mangle = mangle


class Seedless(FakeEngine):
    """Ignores the seed."""

    async def _answer(self, body, running, stream):
        body["sampling_params"].pop("sampling_seed", None)
        return await super()._answer(body, running, stream)


class Trimming(FakeEngine):
    """Leaves the stop token out."""

    async def _answer(self, body, running, stream):
        answer = await super()._answer(body, running, stream)
        meta = answer["meta_info"]
        if "matched" in meta["finish_reason"]:
            for values in (answer["output_ids"], meta["output_token_logprobs"], meta["weight_versions"]):
                values.pop()
            meta["completion_tokens"] -= 1
        return answer


class Deaf(FakeEngine):
    """Says yes to an abort and does nothing."""

    def _abort(self, body):
        return


class Restless(FakeEngine):
    """Says yes to a pause and goes on."""

    def _pause(self, mode):
        return


class Forgetful(FakeEngine):
    """Says yes to an update and keeps its version."""

    async def _control(self, request):
        version = self.version
        answer = await super()._control(request)
        self.version = version
        return answer


class Vague(FakeEngine):
    """Gives all tokens of a reply the version at its end."""

    async def _answer(self, body, running, stream):
        answer = await super()._answer(body, running, stream)
        meta = answer["meta_info"]
        meta["weight_versions"] = [0] * len(meta["weight_versions"])
        return answer


class Nameless(FakeEngine):
    """Lets the name of the cache change what is said."""

    async def _answer(self, body, running, stream):
        if body.get("extra_key"):
            body["input_ids"] = [ord(c) for c in body["extra_key"][-3:]]
        return await super()._answer(body, running, stream)


class Rambling(FakeEngine):
    """Says something else where it streams."""

    async def _answer(self, body, running, stream):
        if stream is not None:
            body["input_ids"] = [1]
        return await super()._answer(body, running, stream)


class Mixing(FakeEngine):
    """Mixes up what runs at once."""

    async def _answer(self, body, running, stream):
        if self.running > 1:
            body["input_ids"] = [1]
        return await super()._answer(body, running, stream)


class Immortal(FakeEngines):
    """Does not stop."""

    kept: list = []

    async def start(self, placement, model_dir, weight_version):
        if not model_dir.is_dir():
            raise EngineError("no weights")
        self.kept.append(EngineThread(lambda: FakeEngine(reply, version=weight_version)))
        return self.kept[-1].engine.workers


class Careless(FakeEngines):
    """Starts without weights."""

    async def start(self, placement, model_dir, weight_version):
        return await super().start(placement, Path.cwd(), weight_version)


ABORTS = {"test_an_abort_ends_one_request_and_no_other", "test_abort_all_ends_every_request"}
PAUSES = {
    "test_a_pause_in_place_freezes_and_continue_goes_on",
    "test_a_pause_by_abort_ends_what_runs",
    "test_an_update_goes_through_in_every_mode_with_a_request_under_way",
    "test_it_says_whether_it_generates",
}


@pytest.mark.parametrize(
    ("broken", "cases"),
    [
        (Seedless, {"test_a_seed_decides_what_is_drawn"}),
        (Trimming, {"test_a_stop_token_ends_the_reply_and_is_part_of_it"}),
        (Deaf, ABORTS),
        (Restless, PAUSES),
        (
            Forgetful,
            {
                "test_an_update_changes_the_version",
                "test_an_update_goes_through_in_every_mode_with_a_request_under_way",
                "test_an_update_in_the_middle_of_a_reply_is_told_by_the_versions_of_its_tokens",
            },
        ),
        (Vague, {"test_an_update_in_the_middle_of_a_reply_is_told_by_the_versions_of_its_tokens"}),
        (Nameless, {"test_a_cache_of_another_name_gives_the_same_reply"}),
        (Rambling, {"test_a_stream_gives_what_one_answer_gives"}),
        (Mixing, {"test_requests_at_once_get_what_they_get_alone"}),
        (Immortal, {"test_it_starts_healthy_and_is_gone_after_stop"}),
        (Careless, {"test_a_start_without_weights_fails_in_words"}),
    ],
)
def test_a_broken_engine_fails_just_its_cases(tmp_path, broken, cases):
    assert failures(tmp_path, broken) == cases


def test_an_engine_that_loses_logprobs_generates_nothing_that_counts(tmp_path):
    failed = failures(tmp_path, Lossy)
    assert "test_each_token_has_an_id_and_a_logprob" in failed
    assert "test_an_update_from_nowhere_fails_and_the_old_weights_serve" in failed
    assert not failed & {"test_it_starts_healthy_and_is_gone_after_stop", "test_it_describes_itself"}


def failures(directory, broken):
    served = broken if issubclass(broken, FakeEngine) else FakeEngine
    component = broken if issubclass(broken, FakeEngines) else FakeEngines
    thread = EngineThread(lambda: served(reply, token_seconds=0.001, queue_seconds=0.0))

    class Fast(TestFakeEngines):
        patience = 5.0

    try:
        return failing_cases(
            Fast,
            {
                "engine": lambda: component(config(), build_context(directory)),
                "placement": lambda: EngineContract.placement,
                "model_dir": lambda: directory,
                "worker": lambda: thread.engine.worker,
                "next_weights": lambda: weights_in(directory),
                "prompts": lambda: [[5, 6, 7], [9, 8], [11, 12, 13, 14, 15], [7]],
                "tmp_path": lambda: directory,
            },
        )
    finally:
        for running in [thread, *Immortal.kept]:
            running.close()
        Immortal.kept.clear()
