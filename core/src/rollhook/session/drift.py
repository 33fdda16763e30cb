"""How the tokens of a conversation differ from those that its text would be rendered to.

What trains are the engine's own tokens; were the conversation rendered as a whole, as for a client of an
ordinary endpoint, the ids could be others. Where they are, something between model, template and parser does
not fit; only `assistant_text` may differ without harm, for a model may write what no tokenizer would.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollhook.records import DRIFT_CATEGORIES
from rollhook.session.render import Renderer, RenderError
from rollhook.session.tree import Leaf

# what control tokens part: the token, the ids behind it, and whether these end with what the engine generated
_Part = tuple[int, list[int], bool]


def drift(renderer: Renderer, leaf: Leaf) -> tuple[str, ...] | None:
    """Return the categories by which a leaf differs from its conversation, rendered; None: it cannot be.

    The last reply, which nothing follows, is left out. Texts are compared, not their ids, and only where the
    control tokens are the same.
    """
    if not leaf.replies:
        return ()
    end = leaf.replies[-1][0]
    try:
        rendered = renderer.first(leaf.messages[:-1], leaf.tools or None)
    except RenderError:
        return None
    ids = leaf.token_ids[:end].tolist()
    if ids == rendered:
        return ()
    ours = _parts(ids, renderer.control_ids, leaf.replies)
    theirs = _parts(rendered, renderer.control_ids, ())
    if len(ours) != len(theirs):
        return ("special_token_count",)
    if [part[0] for part in ours] != [part[0] for part in theirs]:
        return ("special_token_type",)
    found = {
        "assistant_text" if generated else "non_assistant_text"
        for (_, mine, generated), (_, other, _) in zip(ours, theirs, strict=True)
        if mine != other and renderer.decode(mine) != renderer.decode(other)
    }
    return tuple(category for category in DRIFT_CATEGORIES if category in found)


def _parts(ids: Sequence[int], control: frozenset[int], replies: Sequence[tuple[int, int]]) -> list[_Part]:
    generated = bytearray(len(ids))
    for start, end in replies:
        generated[start:end] = b"\1" * (min(end, len(ids)) - min(start, len(ids)))
    cuts = [-1, *(place for place, index in enumerate(ids) if index in control)]
    return [
        (
            ids[start] if start >= 0 else -1,
            list(ids[start + 1 : end]),
            end > start + 1 and bool(generated[end - 1]),
        )
        for start, end in zip(cuts, [*cuts[1:], len(ids)], strict=True)
    ]
