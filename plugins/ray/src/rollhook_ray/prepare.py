"""What verl's workloads need on shared storage: the tree, a model, and data sets as parquet.

A directory is built beside its place, gets a completion marker with the sizes of its files, and is renamed.
What has its marker is left alone; what has none is half done, is moved aside and built again.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from rollhook.durable import cannot_write, fsync_tree, to_json
from rollhook.errors import RollhookError, UsageError

TREE = (
    *("datasets", "hf", "jobs", "outputs", "ray"),
    *("common/models", "common/datasets", "common/code", "user/code"),
)
MARKER = ".rollhook-complete.json"
#: verl's own instruction for gsm8k, whose reward looks for what follows the last ####
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_ANSWER = re.compile(r"####\s*(-?[0-9.,]+)")
_ROW_BYTES = 1 << 20
Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """A row of a gsm8k-like file: the question, the worked answer, and the number behind its ####."""

    question: str
    answer: str
    solution: str


def make_tree(root: str | Path, say: Say) -> None:
    """Make the directories of a shared root that are not there; RunError for what cannot be made."""
    root = Path(root)
    missing = [name for name in TREE if not (root / name).is_dir()]
    for name in missing:
        try:
            (root / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(root / name, error) from error
    say(f"made below {root}: {', '.join(missing)}" if missing else f"skip if exists: the tree below {root}")


def prepare_model(source: str, name: str, root: str | Path, say: Say) -> Path:
    """Bring a model to `<root>/common/models/<name>`: a directory is copied, a hub's id downloaded.

    Raises UsageError for a directory without config.json, RollhookError if the download fails.
    """
    place = Path(root) / "common" / "models" / name
    directory = Path(source).expanduser()
    made_of = str(directory.resolve()) if directory.is_dir() else source

    def fill(target: Path) -> None:
        if directory.is_dir():
            shutil.copytree(
                directory, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git", MARKER)
            )
        else:
            _download(source, target, Path(root) / "hf")
        if not (target / "config.json").is_file():
            raise UsageError(
                f"{source} has no config.json, so it is no model; give a directory or a hub's id"
            )

    if not directory.is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise UsageError(f"{source} is neither a directory nor the id of a model at a hub")
    build(place, made_of, fill, say)
    return place


def prepare_rl(train: Path, test: Path | None, name: str, root: str | Path, say: Say) -> Path:
    """Write `<root>/datasets/<name>/{train,test}.parquet` for ppo and grpo, of JSONL or of parquet files.

    Without `test` the first 64 rows of `train` are it. Raises UsageError for a file that does not fit.
    """
    place = Path(root) / "datasets" / name

    def fill(target: Path) -> None:
        for split, source in {"train": train, "test": test or train}.items():
            limit = 64 if split == "test" and test is None else None
            _write(source, target / f"{split}.parquet", partial(_rl_rows, name, split), rl_problem, limit)
        if test is None:
            say(f"{place}: no test file was given, so test.parquet is the first 64 rows of {train}")

    build(place, _sources(train, test), fill, say)
    return place


def prepare_sft(train: Path, val: Path | None, name: str, root: str | Path, say: Say) -> Path:
    """Write `<root>/datasets/<name>/train.parquet`, and val.parquet if given, with a column `messages`."""
    place = Path(root) / "datasets" / name

    def fill(target: Path) -> None:
        for split, source in {"train": train, "val": val}.items():
            if source is not None:
                _write(source, target / f"{split}.parquet", _sft_rows, sft_problem, None)

    build(place, _sources(train, val), fill, say)
    return place


def build(place: Path, source: str, fill: Callable[[Path], None], say: Say) -> bool:
    """Have `fill` write a directory, unless it is there and whole; return whether it was written.

    Atomic: it is built beside `place` and renamed. Raises RunError where it cannot be written.
    """
    found = read_marker(place)
    if found is not None:
        made_of = found.get("source")
        other = "" if made_of == source else f"; it was made of {made_of}: remove it to have it made anew"
        say(f"skip if exists: {place} is there{other}")
        return False
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        fill(temporary)
        sizes = {str(p.relative_to(temporary)): p.stat().st_size for p in _files(temporary)}
        (temporary / MARKER).write_bytes(
            to_json({"schema": 1, "source": source, "files": sizes}, indent=True)
        )
        fsync_tree(temporary)
        if place.exists():
            aside = place.with_name(f"{place.name}.incomplete-{secrets.token_hex(4)}")
            place.rename(aside)
            say(f"{place} had no completion marker, or lacked files: moved to {aside.name}, and built again")
        temporary.rename(place)
    except OSError as error:
        if read_marker(place) is not None:  # another process was faster
            say(f"skip if exists: {place} is there")
            return False
        raise cannot_write(place, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    say(f"{place} was made of {source}")
    return True


def read_marker(place: Path) -> dict[str, Any] | None:
    """Return the completion marker of a directory that is whole; None if it is absent or half done."""
    try:
        value = orjson.loads((place / MARKER).read_bytes())
        files = value["files"]
        whole = all((place / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return value if whole else None


def read_questions(path: Path) -> list[Question]:
    """Read a file of JSON lines with `question` and `answer`, as gsm8k has them.

    Raises UsageError with the line for one that is not, or whose answer has no `#### NUMBER`.
    """
    rows = []
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(_ROW_BYTES), b""), 1):
                if line.strip():
                    rows.append(_question(line, f"{path}:{number}"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not rows:
        raise UsageError(f"{path} has no rows")
    return rows


def _question(line: bytes, where: str) -> Question:
    try:
        row = orjson.loads(line)
    except ValueError:
        raise UsageError(f"{where} is not JSON; write one object with question and answer per line") from None
    question, answer = (row.get("question"), row.get("answer")) if isinstance(row, dict) else (None, None)
    if not isinstance(question, str) or not isinstance(answer, str):
        raise UsageError(f"{where} has no texts question and answer")
    found = _ANSWER.findall(answer)
    if not found:
        raise UsageError(f"{where}: the answer does not end with '#### NUMBER', so no reward can be told")
    return Question(question, answer, found[-1].replace(",", "").rstrip("."))


def _rl_rows(name: str, split: str, rows: Sequence[Question]) -> list[dict[str, Any]]:
    source = "openai/gsm8k" if name == "gsm8k" else name  # verl finds the reward by it
    return [
        {
            "data_source": source,
            "prompt": [_asked(row)],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row.solution},
            "extra_info": {"split": split, "index": index, "question": row.question, "answer": row.answer},
        }
        for index, row in enumerate(rows)
    ]


def _sft_rows(rows: Sequence[Question]) -> list[dict[str, Any]]:
    return [{"messages": [_asked(row), {"role": "assistant", "content": row.answer}]} for row in rows]


def _asked(row: Question) -> dict[str, str]:
    return {"role": "user", "content": f"{row.question} {INSTRUCTION}"}


def _write(
    source: Path,
    target: Path,
    rows: Callable[[Sequence[Question]], list[dict[str, Any]]],
    problem: Callable[[Path], str],
    limit: int | None,
) -> None:
    """Write a parquet file of the rows; a source that is parquet already is copied, if its schema fits."""
    arrow, parquet = _arrow()
    if source.suffix == ".parquet":
        if wrong := problem(source):
            raise UsageError(wrong)
        if limit is None:
            shutil.copyfile(source, target)
        else:
            parquet.write_table(parquet.read_table(source).slice(0, limit), target)
        return
    parquet.write_table(arrow.Table.from_pylist(rows(read_questions(source)[:limit])), target)


def sft_problem(path: Path) -> str:
    """Return why a parquet file is none for sft, in a sentence; empty if it is."""
    schema, wrong = _schema(path)
    if wrong:
        return wrong
    if "messages" not in schema:
        hint = " (it looks like one for ppo and grpo, which sft cannot read)" if "prompt" in schema else ""
        return f"{path} has no column messages, only {', '.join(schema)}{hint}"
    if not _is_conversation(schema["messages"]):
        return f"{path}: messages is {schema['messages']}, not a list of {{role, content}} texts"
    return ""


def rl_problem(path: Path) -> str:
    """Return why a parquet file is none for ppo and grpo, in a sentence; empty if it is."""
    schema, wrong = _schema(path)
    if wrong:
        return wrong
    missing = [each for each in ("data_source", "prompt", "reward_model") if each not in schema]
    if missing:
        hint = " (it looks like one for sft)" if "messages" in schema else ""
        return f"{path} has no column {', '.join(missing)}, only {', '.join(schema)}{hint}"
    if not _is_conversation(schema["prompt"]):
        return f"{path}: prompt is {schema['prompt']}, not a list of {{role, content}} texts"
    return ""


def _schema(path: Path) -> tuple[dict[str, Any], str]:
    arrow, parquet = _arrow()
    try:
        schema = parquet.read_schema(path)
    except (OSError, arrow.ArrowException) as error:
        return {}, f"{path} is no parquet file: {' '.join(str(error).split())}"
    return {field.name: field.type for field in schema}, ""


def _is_conversation(kind: Any) -> bool:
    arrow, _ = _arrow()
    if not (arrow.types.is_list(kind) or arrow.types.is_large_list(kind)):
        return False
    item = kind.value_type
    if not arrow.types.is_struct(item):
        return False
    fields = {item.field(i).name: item.field(i).type for i in range(item.num_fields)}
    texts = arrow.types.is_string, arrow.types.is_large_string
    return all(
        key in fields and any(is_text(fields[key]) for is_text in texts) for key in ("role", "content")
    )


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError("parquet files need pyarrow: pip install 'rollhook-ray[data]'") from None
    return pyarrow, pyarrow.parquet


def _download(name: str, target: Path, cache: Path) -> None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UsageError(
            f"{name} is no directory here, and a download needs huggingface-hub: "
            f"pip install 'rollhook-ray[data]'"
        ) from None
    try:
        snapshot_download(name, cache_dir=cache, local_dir=target)
    except Exception as error:
        raise RollhookError(
            f"the model {name} could not be downloaded: {' '.join(str(error).split())[:300]}; "
            f"give a directory that holds it"
        ) from error
    shutil.rmtree(target / ".cache", ignore_errors=True)


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _sources(first: Path, second: Path | None) -> str:
    return ", ".join(str(each.resolve()) for each in (first, second) if each is not None)
