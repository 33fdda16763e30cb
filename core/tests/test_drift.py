"""Trained tokens against the text that they stand for."""

import dataclasses
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.records import DRIFT_CATEGORIES, EpisodeRecord, Outcome
from rollhook.runtime.generated import generated
from rollhook.runtime.session_metrics import session_metrics
from rollhook.session import Renderer
from rollhook.session.drift import drift
from rollhook.session.tree import Leaf
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer

USER = {"role": "user", "content": "go"}
END = 2


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), corpus=["ab ab ab"]))


def leaf_of(renderer, *replies, messages=None):
    """Return the leaf of a conversation whose replies have these ids, `go` said before each."""
    ids, places, said = renderer.first([USER]), [], [USER]
    for number, reply in enumerate(replies):
        if number:
            ids = ids + renderer.increment([USER], last_token=ids[-1])
        places.append((len(ids), len(ids) + len(reply)))
        ids = ids + reply
        said += [renderer.parse(reply), USER]
    size = len(ids)
    return Leaf(
        np.array(ids, np.int32),
        np.ones(size, np.uint8),
        np.zeros(size, np.float32),
        np.zeros((0, 4), np.int32),
        messages=tuple(messages or said[:-1]),
        replies=tuple(places),
    )


def test_what_renders_to_its_own_tokens_does_not_drift(renderer):
    reply = [*renderer.encode("ab ab"), END]
    assert drift(renderer, leaf_of(renderer, reply, reply, reply)) == ()


def test_other_tokens_of_the_same_text_do_not_count(renderer):
    odd = [*renderer.encode("a"), *renderer.encode("b"), END]
    assert renderer.encode("ab") != odd[:2]
    assert drift(renderer, leaf_of(renderer, odd, odd)) == ()


def test_assistant_text_that_is_written_otherwise_counts_as_such(renderer):
    reply = [*renderer.encode("ab"), END]
    messages = [USER, {"role": "assistant", "content": "ab "}, USER, {"role": "assistant", "content": "ab"}]
    assert drift(renderer, leaf_of(renderer, reply, reply, messages=messages)) == ("assistant_text",)


def test_a_template_without_control_tokens_is_compared(tmp_path):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    renderer = Renderer(write_tokenizer(tmp_path, template=template))
    reply = renderer.encode("ab")
    assert drift(renderer, leaf_of(renderer, reply, reply)) == ()


def test_other_text_of_others_counts_as_such(renderer):
    reply = [*renderer.encode("ab"), END]
    leaf = leaf_of(renderer, reply, reply)
    (first, *rest) = leaf.messages
    leaf = dataclasses.replace(leaf, messages=({**first, "content": "stop"}, *rest))
    assert drift(renderer, leaf) == ("non_assistant_text",)


def test_control_tokens_that_a_reply_holds_count_by_number_and_kind(renderer):
    inside = [*renderer.encode("a"), 1, *renderer.encode("b"), END]
    plain = [*renderer.encode("ab"), END]
    assert drift(renderer, leaf_of(renderer, inside, plain)) == ("special_token_count",)
    other_end = [*renderer.encode("ab"), 0]
    messages = leaf_of(renderer, plain, plain).messages
    leaf = leaf_of(renderer, plain, plain, messages=messages)
    ids = leaf.token_ids.copy()
    ids[leaf.replies[0][1] - 1] = other_end[-1]
    assert drift(renderer, dataclasses.replace(leaf, token_ids=ids)) == ("special_token_type",)


def test_what_the_template_refuses_is_not_known(tmp_path):
    template = "{{ raise_exception('no') if messages | length > 3 }}" + (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    renderer = Renderer(write_tokenizer(tmp_path, template=template))
    leaf = leaf_of(renderer, [5, END], [5, END], [5, END])
    assert drift(renderer, leaf) is None


def test_where_no_control_token_tells_them_apart_text_is_taken_for_that_of_others(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    renderer = Renderer(write_tokenizer(tmp_path, template=template))
    leaf = leaf_of(renderer, renderer.encode("ab\n"), renderer.encode("ab"))
    (first, *rest) = leaf.messages
    assert drift(renderer, dataclasses.replace(leaf, messages=({**first, "content": "stop"}, *rest))) == (
        "non_assistant_text",
    )


def test_a_leaf_without_a_reply_does_not_drift(renderer):
    assert drift(renderer, leaf_of(renderer)) == ()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 299), max_size=6), min_size=1, max_size=4))
def test_any_ids_are_compared(renderer, replies):
    found = drift(renderer, leaf_of(renderer, *replies))
    assert set(found) <= set(DRIFT_CATEGORIES)
    if len(replies) == 1:
        assert found == ()


def record(**keys):
    plain = dict.fromkeys(
        ("episode_id", "run_id", "group_id", "task_id", "task_digest", "environment", "family"), "x"
    )
    outcome = Outcome("scored", 1.0)
    return EpisodeRecord(
        **plain, attempt=1, purpose="train", seed=0, ended="done", outcome=outcome, reward=1.0, **keys
    )


def test_rates_are_shares_of_what_was_looked_at():
    records = [
        record(input_tokens=100, cached_tokens=50, drift=()),
        record(input_tokens=100, cached_tokens=100, drift=("assistant_text",)),
        record(input_tokens=100),
    ]
    assert session_metrics(records) == {
        "rollout/prefix_cache_hit_rate": 0.5,
        "rollout/drift/special_token_count": 0.0,
        "rollout/drift/special_token_type": 0.0,
        "rollout/drift/non_assistant_text": 0.0,
        "rollout/drift/assistant_text": 0.5,
    }
    assert session_metrics([record()]) == {}


async def spoken(policy):
    session = policy.open("s", max_seq_len=5000, reply_tokens=100, turns=20)
    first = await session.chat([USER])
    await session.chat([USER, first.message, USER])
    await session.close()
    return session


async def test_an_episodes_record_has_the_drift_of_one_in_eight(renderer):
    engine = FakeEngine(says(renderer, "ab", "b"))
    engine.mangle = lambda answer: {"meta_info": answer["meta_info"] | {"cached_tokens": 3}}
    async with serving(engine, directory=renderer.directory) as policy:
        session = await spoken(policy)
        prompts = [len(body["input_ids"]) for body in engine.requests]
    looked_at = [await generated(session, trains=True, seed=seed) for seed in range(8)]
    assert [each.drift for each in looked_at] == [()] + [None] * 7
    assert (await generated(session, trains=False, seed=0)).drift is None
    fields = looked_at[0].fields()
    assert (fields["input_tokens"], fields["cached_tokens"]) == (sum(prompts), 6)
    assert (fields["turns"], fields["versions"]) == (2, (1, 1))


async def test_a_record_that_cannot_be_read_back_is_said_to_be_lost(renderer):
    engine = FakeEngine(says(renderer, "x" * 70_000, "y"))
    async with serving(engine, directory=renderer.directory) as policy:
        segments = []
        write = policy.spill.write
        policy.spill.write = lambda data: segments.append(write(data)) or segments[-1]
        session = policy.open("s", max_seq_len=500_000, reply_tokens=100_000, turns=2)
        await session.chat([USER])
        assert segments
        os.truncate(f"/proc/self/fd/{segments[0].segment.file}", 0)
        await session.close()
    found = await generated(session, trains=True, seed=0)
    assert "cannot be read back" in found.lost
    assert not found.leaves
    assert found.fields()["turns"] == 1
