"""Preparation: the tree, a model, data sets; skipped when whole, built again when half done."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollhook.errors import RollhookError, UsageError
from rollhook_ray.prepare import (
    INSTRUCTION,
    MARKER,
    TREE,
    build,
    make_tree,
    prepare_model,
    prepare_rl,
    prepare_sft,
    read_marker,
    read_questions,
    rl_problem,
    sft_problem,
)

WHY = "needs pyarrow: pip install 'rollhook-ray[data]'"
pa = pytest.importorskip("pyarrow", reason=WHY)
pq = pytest.importorskip("pyarrow.parquet", reason=WHY)
ROWS = [{"question": f"What is {n}+1000?", "answer": f"It is.\n#### {n + 1000:,}"} for n in range(70)]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    (path / ".git").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "weights.bin").write_bytes(b"w" * 1000)
    return path


def times(root: Path) -> dict[Path, int]:
    return {path: path.lstat().st_mtime_ns for path in root.rglob("*")}


def test_the_tree_is_made_once(tmp_path: Path, said: list[str]) -> None:
    root = tmp_path / "private"
    make_tree(root, said.append)
    assert sorted(str(p.relative_to(root)) for p in root.rglob("*") if not any(p.iterdir())) == sorted(TREE)
    before = times(root)
    make_tree(root, said.append)
    assert times(root) == before
    assert said == [f"made below {root}: {', '.join(TREE)}", f"skip if exists: the tree below {root}"]


def test_data_is_as_verl_reads_it(tmp_path: Path, questions: Path, said: list[str]) -> None:
    rl = prepare_rl(questions, None, "gsm8k", tmp_path, said.append)
    sft = prepare_sft(questions, None, "gsm8k_sft", tmp_path, said.append)
    rows = pq.read_table(rl / "train.parquet").to_pylist()
    asked = {"role": "user", "content": f"What is 7+1000? {INSTRUCTION}"}
    assert rows[7] == {
        "data_source": "openai/gsm8k",
        "prompt": [asked],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1007"},
        "extra_info": {"split": "train", "index": 7, **ROWS[7]},
    }
    assert pq.read_table(rl / "test.parquet").num_rows == 64
    rows = pq.read_table(sft / "train.parquet").to_pylist()
    assert rows[7] == {"messages": [asked, {"role": "assistant", "content": ROWS[7]["answer"]}]}
    assert not (sft / "val.parquet").exists()
    assert [rl_problem(rl / "train.parquet"), sft_problem(sft / "train.parquet")] == ["", ""]
    assert any("test.parquet is the first 64 rows" in line for line in said)


def test_a_test_set_is_used_if_it_is_given(tmp_path: Path, questions: Path, said: list[str]) -> None:
    other = tmp_path / "test.jsonl"
    other.write_text(json.dumps({"question": "1?", "answer": "#### -1.5"}))
    rl = prepare_rl(questions, other, "mine", tmp_path, said.append)
    sft = prepare_sft(questions, other, "mine_sft", tmp_path, said.append)
    row = pq.read_table(rl / "test.parquet").to_pylist()[0]
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("mine", "-1.5")
    assert pq.read_table(sft / "val.parquet").num_rows == 1


Prepare = Callable[[Path, list[str]], Path]
WAYS: dict[str, Prepare] = {
    "model": lambda base, said: prepare_model(str(base / "tiny"), "tiny", base, said.append),
    "rl": lambda base, said: prepare_rl(base / "train.jsonl", None, "gsm8k", base, said.append),
    "sft": lambda base, said: prepare_sft(base / "train.jsonl", None, "gsm8k_sft", base, said.append),
}


@pytest.mark.usefixtures("model", "questions")
@pytest.mark.parametrize("way", [*WAYS])
def test_what_is_whole_is_left_alone_and_said(tmp_path: Path, said: list[str], way: str) -> None:
    place = WAYS[way](tmp_path, said)
    before = times(place)
    said.clear()
    assert WAYS[way](tmp_path, said) == place
    assert times(place) == before
    assert said == [f"skip if exists: {place} is there"]


@pytest.mark.usefixtures("model", "questions")
@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("harm", ["no marker", "short file", "lost file", "broken marker"])
def test_what_is_half_done_is_built_again_and_kept_aside(
    tmp_path: Path, said: list[str], way: str, harm: str
) -> None:
    place = WAYS[way](tmp_path, said)
    whole = {p.name: p.stat().st_size for p in place.iterdir()}
    file = next(p for p in sorted(place.iterdir()) if p.name != MARKER and p.stat().st_size)
    if harm == "no marker":
        (place / MARKER).unlink()
    elif harm == "short file":
        file.write_bytes(file.read_bytes()[:-1])
    elif harm == "lost file":
        file.unlink()
    else:
        (place / MARKER).write_text("{")
    assert read_marker(place) is None
    WAYS[way](tmp_path, said)
    assert read_marker(place) is not None
    assert {p.name: p.stat().st_size for p in place.iterdir()} == whole
    assert len(list(place.parent.glob(f"{place.name}.incomplete-*"))) == 1
    assert not list(place.parent.glob(".*.tmp"))


def test_what_was_made_of_something_else_is_left_alone_and_said(
    tmp_path: Path, questions: Path, said: list[str]
) -> None:
    place = prepare_sft(questions, None, "d", tmp_path, said.append)
    other = tmp_path / "other.jsonl"
    other.write_text(questions.read_text())
    prepare_sft(other, None, "d", tmp_path, said.append)
    assert said[-1] == (
        f"skip if exists: {place} is there; it was made of {questions}: remove it to have it made anew"
    )


def test_what_fails_leaves_nothing(tmp_path: Path, said: list[str]) -> None:
    def fill(target: Path) -> None:
        (target / "x").write_text("x")
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        build(tmp_path / "d/place", "source", fill, said.append)
    assert list((tmp_path / "d").iterdir()) == []


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_parquet_file_is_taken_if_its_schema_fits(tmp_path: Path, questions: Path, said: list[str]) -> None:
    rl = prepare_rl(questions, None, "a", tmp_path, said.append) / "train.parquet"
    sft = prepare_sft(questions, None, "b", tmp_path, said.append) / "train.parquet"
    assert prepare_rl(rl, None, "c", tmp_path, said.append).joinpath("train.parquet").read_bytes() == (
        rl.read_bytes()
    )
    assert pq.read_table(tmp_path / "datasets/c/test.parquet").num_rows == 64
    assert prepare_sft(sft, None, "d", tmp_path, said.append).joinpath("train.parquet").is_file()
    with pytest.raises(UsageError, match=r"has no column messages, .* looks like one for ppo and grpo"):
        prepare_sft(rl, None, "e", tmp_path, said.append)
    with pytest.raises(UsageError, match=r"has no column data_source, prompt, .* looks like one for sft"):
        prepare_rl(sft, None, "f", tmp_path, said.append)


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": "text"}],
        [{"messages": ["text"]}],
        [{"messages": [{"role": "user"}]}],
        [{"messages": [{"role": "user", "content": 1}]}],
    ],
)
def test_messages_of_another_form_are_told(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert "not a list of {role, content} texts" in sft_problem(parquet(tmp_path / "x.parquet", rows))


def test_what_is_no_parquet_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("no")
    assert sft_problem(path).startswith(f"{path} is no parquet file")
    assert rl_problem(tmp_path / "y.parquet").startswith(f"{tmp_path}/y.parquet is no parquet file")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"q.jsonl:2 is not JSON"),
        ("[1]", r"q.jsonl:2 has no texts question and answer"),
        ('{"question": "a", "answer": 1}', r"q.jsonl:2 has no texts"),
        ('{"question": "a", "answer": "5"}', r"q.jsonl:2: the answer does not end with '#### NUMBER'"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line)
    with pytest.raises(UsageError, match=message):
        read_questions(path)


def test_a_file_without_rows_and_one_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="has no rows"):
        read_questions(tmp_path / "q.jsonl")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_questions(tmp_path / "r.jsonl")


@given(
    st.integers(-(10**9), 10**9),
    st.text(st.characters(blacklist_characters="#", blacklist_categories=["Cs"])),
)
def test_the_solution_is_the_number_behind_the_hashes(number: int, before: str) -> None:
    from rollhook_ray.prepare import _question

    row = {"question": "q", "answer": f"{before}\n#### {number:,}"}
    assert _question(json.dumps(row).encode(), "x:1").solution == str(number)


def test_a_model_needs_a_config(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="has no config"):
        prepare_model(str(tmp_path / "empty"), "x", tmp_path, said.append)
    with pytest.raises(UsageError, match="is neither a directory nor the id of a model"):
        prepare_model("/no/such/directory", "x", tmp_path, said.append)
    pytest.importorskip("huggingface_hub", reason="needs huggingface-hub: pip install 'rollhook-ray[data]'")
    with pytest.raises(RollhookError, match="the model nobody/nothing could not be downloaded"):
        prepare_model("nobody/nothing", "x", tmp_path, said.append)
    assert list((tmp_path / "common/models").iterdir()) == []


FILES = {
    "config.json": b'{"model_type": "tiny"}',
    "model.safetensors": b"w" * 1000,
    "sub/vocab.txt": b"a\nb\n",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """A double of a model hub: the two requests by which its client learns of a model and gets its files."""

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, *, body: bool) -> None:
        base = f"/tiny/model/resolve/{COMMIT}/"
        headers = {"X-Repo-Commit": COMMIT}
        if self.path.startswith("/api/models/tiny/model"):
            siblings = [{"rfilename": name} for name in FILES]
            found: Any = {"id": "tiny/model", "sha": COMMIT, "siblings": siblings}
            if "/tree/" in self.path:
                found = [{"type": "file", "path": p, "size": len(c), "oid": COMMIT} for p, c in FILES.items()]
            content = json.dumps(found).encode()
            headers["Content-Type"] = "application/json"
        elif (content := FILES.get(self.path.removeprefix(base), b"")) == b"":
            self.send_error(404)
            return
        else:
            headers["ETag"] = f'"{hashlib.sha1(content).hexdigest()}"'
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_a_model_is_downloaded_once(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs huggingface-hub: pip install 'rollhook-ray[data]'")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        program = "import sys; from rollhook.cli.main import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", program, "workload", "prepare", "--model", "tiny/model"]
        command += ["--model-name", "tiny", "--root", str(tmp_path)]
        done = [
            subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            for _ in range(2)
        ]
        server.shutdown()
    assert [each.returncode for each in done] == [0, 0], done[0].stderr
    said = [each.stderr for each in done]
    place = tmp_path / "common/models/tiny"
    assert f"{place} was made of tiny/model" in said[0]
    assert f"skip if exists: {place} is there" in said[1]
    found = {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}
    assert {name: content for name, content in found.items() if name != MARKER} == FILES
