"""The tree of turns: where a request attaches, and what of it trains."""

import os
import tracemalloc
from array import array

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.engine.base import Generation
from rollhook.session.spill import Spill, Spilled
from rollhook.session.tree import Node, Tree, message_key
from rollhook.session.turn import version_spans

A, B, C = ({"role": "user", "content": text} for text in "abc")
X, Y = ({"role": "assistant", "content": text} for text in "xy")


def grow(tree, parent, *messages, tokens=2, finish="stop", tools="", asked=None):
    """Commit a turn whose last message is the reply, asked for just before unless said otherwise."""
    node = Node(
        parent=parent,
        text=orjson.dumps(messages),
        keys=tuple(map(message_key, messages)),
        bare=message_key(messages[-1], bare=True),
        prompt=array("i", [tree.count] * len(messages)),
        completion=array("i", range(100 + tree.count, 100 + tree.count + tokens)),
        logprobs=array("f", [-0.5] * tokens),
        spans=((0, tokens, 1, 1),) if tokens else (),
        finish_reason=finish,
        seq=tree.count + 1,
        asked=tree.count if asked is None else asked,
        tools=tools,
    )
    tree.commit(node)
    return node


def found(tree, *messages, tools="", thin=False):
    return tree.attach([message_key(m) for m in messages], tools, thin=thin)


def test_a_request_attaches_to_the_deepest_turn_that_it_extends():
    tree = Tree()
    root = grow(tree, None, A, X)
    child = grow(tree, root, B, Y)
    assert found(tree, A, X, B, Y, C) is child
    assert found(tree, A, X, C) is root
    assert found(tree, A, X, B) is root
    assert found(tree, A, X) is root


@pytest.mark.parametrize(
    "messages",
    [(A,), (B, X, C), (X,), (A, Y, B), (A, B), ({"role": "system", "content": "a"}, X)],
    ids=["retry of the first turn", "other start", "reply only", "other reply", "no reply", "other role"],
)
def test_an_unknown_prefix_is_a_new_root(messages):
    tree = Tree()
    grow(tree, None, A, X)
    assert found(tree, *messages) is None


def test_of_equal_paths_the_latest_is_taken():
    tree = Tree()
    grow(tree, None, A, X)
    later = grow(tree, None, A, X)
    assert found(tree, A, X, B) is later


def test_other_tools_are_another_conversation():
    tree = Tree()
    with_tools = grow(tree, None, A, X, tools="t")
    assert found(tree, A, X, B) is None
    assert found(tree, A, X, B, tools="t") is with_tools


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"content": None}, {"content": ""}, True),
        ({"content": "a", "tool_calls": []}, {"content": "a"}, True),
        ({"content": "a", "reasoning_content": ""}, {"content": "a"}, True),
        ({"content": "a", "reasoning_content": "r"}, {"content": "a"}, False),
        ({"content": "a", "index": 3}, {"content": "a"}, True),
        (
            {
                "content": "",
                "tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            True,
        ),
        (
            {"content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            {"content": "", "tool_calls": [{"id": "1", "function": {"name": "g", "arguments": "{}"}}]},
            False,
        ),
    ],
)
def test_messages_are_the_same_when_nothing_that_matters_differs(one, other, same):
    role = {"role": "assistant"}
    assert (message_key(role | one) == message_key(role | other)) is same


def test_a_completion_that_branches_share_trains_in_the_first_only():
    tree = Tree()
    root = grow(tree, None, A, X)
    grow(tree, root, B, X)
    grow(tree, root, C, Y)
    first, second = tree.leaves()
    assert first.mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert second.mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert second.spans.tolist() == [[6, 8, 1, 1]]
    assert second.logprobs.tolist() == [0, 0, 0, 0, 0, 0, -0.5, -0.5]
    assert second.token_ids[:4].tolist() == first.token_ids[:4].tolist()


def test_leaves_have_the_types_of_a_sample():
    tree = Tree()
    grow(tree, None, A, X, tokens=0)
    (leaf,) = tree.leaves()
    assert (leaf.token_ids.dtype, leaf.mask.dtype, leaf.logprobs.dtype, leaf.spans.dtype) == (
        np.int32,
        np.uint8,
        np.float32,
        np.int32,
    )
    assert leaf.spans.shape == (0, 4)


def test_a_leaf_knows_its_conversation_and_its_end():
    tree = Tree()
    root = grow(tree, None, A, X)
    grow(tree, root, B, Y, finish="length")
    (leaf,) = tree.leaves()
    assert list(leaf.messages) == [A, X, B, Y]
    assert leaf.finish_reason == "length"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 12), st.integers(0, 4)), min_size=1, max_size=12))
def test_every_generated_token_trains_exactly_once(shape):
    """Invariant 2: tokens are exact."""
    tree = Tree()
    nodes = []
    for number, (parent, tokens) in enumerate(shape):
        above = nodes[parent % len(nodes)] if nodes and parent >= 0 else None
        nodes.append(grow(tree, above, {"role": "user", "content": str(number)}, X, tokens=tokens))
    leaves = tree.leaves()
    assert sum(int(leaf.mask.sum()) for leaf in leaves) == sum(tokens for _, tokens in shape)
    for leaf in leaves:
        inside = np.zeros(len(leaf.mask), np.uint8)
        for start, end, *_ in leaf.spans:
            assert not inside[start:end].any()
            inside[start:end] = 1
        assert (inside == leaf.mask).all()
        assert (leaf.logprobs[leaf.mask == 0] == 0).all()


def generation(count, **keys):
    return Generation([1] * count, [-0.1] * count, "stop", **keys)


def test_versions_are_exact_where_the_engine_reports_them():
    spans = version_spans(generation(5, versions=[3, 3, 4, 4, 4], weight_version=4), 3, 4)
    assert spans == ((0, 2, 3, 3), (2, 5, 4, 4))


@pytest.mark.parametrize(
    ("reported", "before", "after", "span"),
    [(None, 3, 3, (3, 3)), (None, 3, 5, (3, 5)), (4, 3, 5, (3, 4)), (3, 3, 5, (3, 3))],
)
def test_versions_are_bracketed_where_it_does_not(reported, before, after, span):
    assert version_spans(generation(2, weight_version=reported), before, after) == ((0, 2, *span),)


def test_nothing_generated_has_no_span():
    assert version_spans(generation(0), 1, 1) == ()


# -- retries


def test_a_retried_leaf_gives_way_to_the_later_one():
    tree = Tree()
    root = grow(tree, None, A, X)
    grow(tree, root, B, X)
    later = grow(tree, root, B, Y)
    (leaf,) = tree.leaves()
    assert list(leaf.messages) == [A, X, B, Y]
    grow(tree, later, C, X)
    (leaf,) = tree.leaves()
    assert list(leaf.messages) == [A, X, B, Y, C, X]


def test_what_was_gone_on_from_is_no_retry():
    tree = Tree()
    root = grow(tree, None, A, X)
    first = grow(tree, root, B, X)
    grow(tree, first, C, Y)
    grow(tree, root, B, Y)
    assert len(tree.leaves()) == 2


def test_calls_that_overlap_are_parallel_samples():
    tree = Tree()
    root = grow(tree, None, A, X)
    grow(tree, root, B, X, asked=1)
    grow(tree, root, B, Y, asked=1)
    assert len(tree.leaves()) == 2


def test_another_request_and_another_set_of_tools_are_no_retry():
    tree = Tree()
    root = grow(tree, None, A, X)
    grow(tree, root, B, X)
    grow(tree, root, C, X)
    grow(tree, root, C, Y, tools="[]")
    assert len(tree.leaves()) == 3


def test_equal_roots_are_kept():
    tree = Tree()
    grow(tree, None, A, X)
    grow(tree, None, A, Y)
    assert len(tree.leaves()) == 2


# -- replies that come back without their reasoning

THOUGHT = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
OTHER = {"role": "assistant", "content": "x", "reasoning_content": "so"}


def test_reasoning_may_be_missing_only_where_thin_is_said():
    tree = Tree()
    root = grow(tree, None, A, THOUGHT)
    assert found(tree, A, THOUGHT, B) is root
    assert found(tree, A, X, B) is None
    assert found(tree, A, X, B, thin=True) is root
    assert found(tree, A, OTHER, B, thin=True) is None
    assert found(tree, A, Y, B, thin=True) is None


def test_a_reply_that_comes_back_whole_goes_before_one_that_would_be_thin():
    tree = Tree()
    plain = grow(tree, None, A, X)
    grow(tree, None, A, THOUGHT)
    assert found(tree, A, X, B, thin=True) is plain


def test_thin_replies_match_all_along_a_path():
    tree = Tree()
    root = grow(tree, None, A, THOUGHT)
    child = grow(tree, root, B, OTHER)
    assert found(tree, A, X, B, X, C, thin=True) is child
    assert found(tree, A, X, B, OTHER, C, thin=True) is child


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ("{}", "", True),
        ('{"a": [1.0, 2.5]}', '{"a": [1, 2.5]}', True),
        ('{"a": 1}', '{"a": 2}', False),
        ("{broken", "{broken", True),
        ("{broken", "{other", False),
        ('{"a": 1}', {"a": 1}, True),
    ],
)
def test_arguments_are_the_same_as_json(mine, theirs, same):
    def key(arguments):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        return message_key({"role": "assistant", "content": "", "tool_calls": [call]})

    assert (key(mine) == key(theirs)) is same


texts = st.text(max_size=4)


@given(st.lists(texts, min_size=5, max_size=5), st.lists(texts, min_size=5, max_size=5))
def test_messages_have_one_key_only_if_they_are_equal(one, other):
    names = ("content", "reasoning_content", "tool_call_id", "name", "role")
    keys = [message_key(dict(zip(names, values, strict=True))) for values in (one, other)]
    assert (keys[0] == keys[1]) is (one == other)


# -- memory


def long_conversation(tree, turns, tokens, characters):
    """Grow a branch whose messages and tokens are objects of their own, as requests bring them."""
    node = None
    for number in range(turns):
        said = {"role": "user", "content": str(number) * characters}
        reply = {"role": "assistant", "content": str(number) * characters}
        node = grow(tree, node, said, reply, tokens=tokens, tools="[" + " " * characters + "]")
    return node


def test_text_beyond_the_bound_is_on_disk_and_read_back(tmp_path):
    spill = Spill(tmp_path / "spill")
    tree, plain = Tree(spill, text_bytes=3000), Tree()
    for each in (tree, plain):
        long_conversation(each, 30, tokens=2, characters=500)
    node = tree.last
    spilled = [isinstance(each.text, Spilled) for each in node.path()]
    assert sum(spilled) >= 28
    (leaf,), (expected,) = tree.leaves(), plain.leaves()
    assert leaf.messages == expected.messages
    assert not list((tmp_path / "spill").iterdir())


def test_a_segment_of_the_spill_lives_as_long_as_what_is_in_it():
    spill = Spill(segment_bytes=10)
    first = spill.write(b"0123456789")
    second = spill.write(b"abc")
    assert (first.read(), second.read()) == (b"0123456789", b"abc")
    file = first.segment.file
    assert os.fstat(file).st_nlink == 0
    del first
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_what_cannot_be_spilled_stays_in_memory_and_is_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    tree = Tree(Spill(tmp_path / "file"), text_bytes=100)
    long_conversation(tree, 3, tokens=1, characters=200)
    assert len(tree.leaves()[0].messages) == 6
    assert caplog.text.count("cannot be spilled") == 1


def test_a_session_of_thirty_turns_holds_little_beyond_its_tokens():
    """256 KiB, architecture 13; the text of this one is ten times that."""
    spill = Spill()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tree = Tree(spill)
        end = long_conversation(tree, 30, tokens=1000, characters=20_000)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    tokens = sum(8 * len(node.completion) + 4 * len(node.prompt) for node in end.path())
    assert held - tokens < 256 << 10
