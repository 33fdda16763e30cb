"""The tree of turns: where a request attaches, and what of it trains."""

from array import array

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollhook.engine.base import Generation
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
