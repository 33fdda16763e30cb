import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollhook.errors import TrainerError
from rollhook.messages import Message, message
from rollhook.session.render import Renderer
from rollhook_torch.rows import Rows, read_rows, render

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture(scope="module")
def renderer(model_dir: Path) -> Renderer:
    return Renderer(model_dir)


def chat(*turns: tuple[Any, str]) -> list[Message]:
    return [message(role, content) for role, content in turns]


def trained(messages: Sequence[Message], renderer: Renderer) -> tuple[str, list[str]]:
    """Return the text of a rendered conversation, and the stretches of it that are trained."""
    made = render(messages, renderer)
    stretches, current = [], []
    for token, flag in zip(made.token_ids.tolist(), made.mask.tolist(), strict=True):
        if flag:
            current.append(token)
        elif current:
            stretches.append(current)
            current = []
    stretches += [current] if current else []
    return renderer.decode(made.token_ids.tolist()), [renderer.decode(part) for part in stretches]


def test_only_the_assistant_is_trained_and_the_newline_after_it_is_not(renderer: Renderer) -> None:
    messages = chat(
        ("system", "Answer."),
        ("user", "Delete it."),
        ("assistant", "rm it"),
        ("user", "exit code 0"),
        ("assistant", "DONE"),
    )
    text, parts = trained(messages, renderer)
    assert parts == ["rm it<|im_end|>", "DONE<|im_end|>"]
    assert text == (
        "<|im_start|>system\nAnswer.<|im_end|>\n<|im_start|>user\nDelete it.<|im_end|>\n"
        "<|im_start|>assistant\nrm it<|im_end|>\n<|im_start|>user\nexit code 0<|im_end|>\n"
        "<|im_start|>assistant\nDONE<|im_end|>"
    )


def test_a_row_has_the_very_tokens_of_a_session(renderer: Renderer) -> None:
    """Prompt and reply are tokenised apart, as they are when the engine generates the reply."""
    messages = chat(
        ("user", "Delete it."), ("assistant", "rm it"), ("user", "exit code 0"), ("assistant", "DONE")
    )
    ids = renderer.first(messages[:1]) + renderer.encode("rm it<|im_end|>")
    ids += renderer.increment(messages[2:3], last_token=ids[-1]) + renderer.encode("DONE<|im_end|>")
    assert render(messages, renderer).token_ids.tolist() == ids


def test_what_follows_the_last_reply_is_left_out(renderer: Renderer) -> None:
    messages = chat(("user", "a"), ("assistant", "b"), ("user", "c"))
    assert trained(messages, renderer)[0].endswith("b<|im_end|>")


def test_several_messages_may_precede_a_reply(renderer: Renderer) -> None:
    text, parts = trained(chat(("user", "a"), ("user", "b"), ("assistant", "c")), renderer)
    assert text.count("<|im_start|>user") == 2
    assert parts == ["c<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (chat(("user", "a")), "no assistant message"),
        (chat(("assistant", "a")), "must follow"),
        (chat(("user", "a"), ("assistant", "b"), ("assistant", "c")), "must follow"),
        (chat(("user", "a"), ("assistant", "b<|im_end|>c")), "ends a reply, as text"),
    ],
)
def test_rows_that_no_session_could_have_recorded_are_refused(
    renderer: Renderer, messages: list[Message], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        render(messages, renderer)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{not json", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1, 2]", "must be a JSON object"),
        ("{}", "`messages` must be a list of at least one message"),
        ('{"messages": []}', "`messages` must be a list of at least one message"),
        ('{"messages": ["hello"]}', r"messages\[0\] must be an object"),
        (
            '{"messages": [{"role": "robot", "content": "x"}]}',
            r"messages\[0\]\.role is 'robot', not one of system",
        ),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\]\.content must be a string"),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}',
            r"messages\[0\]\.tool_calls: .* not supported",
        ),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_reason(
    tmp_path: Path, renderer: Renderer, line: str, reason: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(TrainerError, match=rf"rows\.jsonl, line 3: {reason}") as caught:
        Rows(path, renderer, seed=0)
    assert caught.value.kind == "user"


def test_a_row_that_cannot_be_rendered_is_named_when_it_is_taken(tmp_path: Path, renderer: Renderer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    with pytest.raises(TrainerError, match=r"rows\.jsonl, line 1: there is no assistant message"):
        Rows(path, renderer, seed=0).take(1)


def test_a_row_beyond_the_context_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    with pytest.raises(TrainerError, match=r"line 1: has \d+ tokens, the context of the model 5"):
        Rows(path, renderer, seed=0, max_tokens=5).take(1)


@pytest.mark.parametrize(
    ("name", "reason"), [("absent.jsonl", "no such file"), ("rows.csv", "jsonl or .parquet")]
)
def test_other_files_are_refused(tmp_path: Path, renderer: Renderer, name: str, reason: str) -> None:
    if name != "absent.jsonl":
        (tmp_path / name).write_text("a,b\n")
    with pytest.raises(TrainerError, match=reason):
        Rows(tmp_path / name, renderer, seed=0)


def test_a_file_without_rows_is_refused(tmp_path: Path, renderer: Renderer) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(TrainerError, match="there are no rows"):
        Rows(tmp_path / "rows.jsonl", renderer, seed=0)


def test_parquet_rows_are_the_same(tmp_path: Path, rows_file: Path, renderer: Renderer) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    plain = list(read_rows(rows_file))
    pq.write_table(pa.Table.from_pylist([dict(row.value) for row in plain]), tmp_path / "rows.parquet")
    again = list(read_rows(tmp_path / "rows.parquet"))
    assert [row.messages() for row in again] == [row.messages() for row in plain]
    assert again[1].where.endswith("rows.parquet, row 2")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(TrainerError, match="no parquet file"):
        list(read_rows(tmp_path / "broken.parquet"))


def drawn(path: Path, renderer: Renderer, seed: int, counts: Sequence[int]) -> list[tuple[int, ...]]:
    rows = Rows(path, renderer, seed=seed)
    return [tuple(row.token_ids.tolist()) for count in counts for row in rows.take(count)]


def test_every_pass_takes_every_row_once_in_another_order(rows_file: Path, renderer: Renderer) -> None:
    taken = drawn(rows_file, renderer, 0, [4, 4, 4, 2])
    first, second = taken[:7], taken[7:]
    assert sorted(first) == sorted(second)
    assert first != second
    assert taken == drawn(rows_file, renderer, 0, [14])
    assert taken != drawn(rows_file, renderer, 1, [14])


def test_the_position_restores_the_order(rows_file: Path, renderer: Renderer) -> None:
    rows = Rows(rows_file, renderer, seed=3)
    rows.take(9)
    rest = [row.token_ids.tolist() for row in rows.take(6)]
    again = Rows(rows_file, renderer, seed=3)
    again.position = 9
    assert [row.token_ids.tolist() for row in again.take(6)] == rest
    assert isinstance(rows.take(1)[0].mask, np.ndarray)
