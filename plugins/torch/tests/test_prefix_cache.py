"""The tree of prefixes against a plain list of all that was put in."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollhook_torch.prefix_cache import PrefixCache

Ids = tuple[int, ...]
SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
ENTRIES = st.lists(st.tuples(st.sampled_from("ab"), SEQUENCES), max_size=20)
#: bytes of one token below: two tensors, two heads, one float32
TOKEN = 16


def tensors(namespace: str, ids: Ids) -> Callable[[int, int], list[Tensor]]:
    """Numbers that depend on all tokens before, as keys and values do."""
    numbers = [float(hash((namespace, ids[: n + 1])) % 10007) for n in range(len(ids))]
    column = torch.tensor([numbers, numbers])[:, :, None]
    return lambda start, stop: [column[:, start:stop], -column[:, start:stop]]


def common(one: Ids, other: Ids) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def matched(cache: PrefixCache, namespace: str, ids: Ids) -> int:
    """Return how much is held of `ids`, after a look at its tensors."""
    count, stretches = cache.match(namespace, ids)
    if count:
        found = [torch.cat(parts, 1) for parts in zip(*stretches, strict=True)]
        wanted = tensors(namespace, ids)(0, count)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return count


@settings(deadline=None)
@given(ENTRIES, st.tuples(st.sampled_from("ab"), SEQUENCES))
def test_the_longest_common_prefix_is_found(entries: list[tuple[str, Ids]], asked: tuple[str, Ids]) -> None:
    cache = PrefixCache(1 << 20)
    for namespace, ids in entries:
        cache.insert(namespace, ids, tensors(namespace, ids))
    namespace, ids = asked
    assert matched(cache, namespace, ids) == max(
        (common(held, ids) for space, held in entries if space == namespace), default=0
    )
    every = {(space, held[: n + 1]) for space, held in entries for n in range(len(held))}
    assert cache.size == len(every) * TOKEN
    cache.clear()
    assert (cache.size, matched(cache, namespace, ids)) == (0, 0)


@settings(deadline=None)
@given(ENTRIES, st.integers(0, 12))
def test_no_more_is_held_than_allowed_and_the_newest_stays(
    entries: list[tuple[str, Ids]], tokens: int
) -> None:
    cache = PrefixCache(tokens * TOKEN)
    for namespace, ids in entries:
        cache.insert(namespace, ids, tensors(namespace, ids))
        assert cache.size <= cache.capacity
        assert matched(cache, namespace, ids) == len(ids) or len(ids) > tokens
        for space, other in entries:
            matched(cache, space, other)
    assert cache.size == sum(node.size for node in cache._used)


def test_what_was_used_longest_ago_goes_first() -> None:
    cache = PrefixCache(6 * TOKEN)
    for ids in [(1, 1), (2, 2), (3, 3)]:
        cache.insert("a", ids, tensors("a", ids))
    matched(cache, "a", (1, 1))
    cache.insert("a", (3, 4), tensors("a", (3, 4)))
    assert [matched(cache, "a", ids) for ids in [(1, 1), (2, 2), (3, 3), (3, 4)]] == [2, 0, 2, 2]
