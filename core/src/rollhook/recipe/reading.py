"""Recipe files as plain data with a line number per key; what is wrong with the YAML becomes problems."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollhook.recipe import paths
from rollhook.recipe.problem import Problem

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_NODES = 100_000


class _Loader(yaml.SafeLoader):
    """YAML as PyYAML reads it, but 1e-3 is a number, and `on`, dates, 1:30 and 010 are text."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if not tag.endswith((":int", ":float", ":timestamp", ":bool"))
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


_PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null")}


@dataclass
class Document:
    """What a file holds: plain data, the line of each key path, and what is wrong with it."""

    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[paths.Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    text: str = ""


def read_file(path: Path, name: str) -> Document:
    """Read a recipe file; `name` is how messages call it."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return Document(problems=[Problem("", f"is larger than {MAX_BYTES} bytes", name)])
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        return Document(problems=[Problem("", f"is not UTF-8 text (byte {error.start})", name)])
    except OSError as error:
        return Document(problems=[Problem("", f"cannot be read: {error.strerror}", name)])
    return read_text(text, name)


def read_text(text: str, name: str) -> Document:
    """Parse a recipe; every duplicate key and every odd key is reported, not just the first."""
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        return Document(problems=[_syntax(error, name, text)])
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(problems=[Problem("", "is empty", name, hint="a recipe is a mapping of keys")])
        if not isinstance(node, yaml.MappingNode):
            return Document(problems=[Problem("", f"is {_a(node)}, not a mapping of keys", name)])
        reader = _Reader(loader, name)
        data = reader.mapping(node, ())
        return Document(data, reader.lines, reader.problems, text)
    except RecursionError:
        return Document(problems=[Problem("", f"is nested deeper than {MAX_DEPTH} levels", name)])
    except yaml.YAMLError as error:
        return Document(problems=[_syntax(error, name, text)])
    finally:
        loader.dispose()


def read_value(text: str) -> Any:
    """Return the value of an override, read as YAML. Raises ValueError with the reason."""
    document = read_text(f"value: {text}" if text.strip() else "value:", "")
    if document.problems or list(document.data) != ["value"]:
        reason = document.problems[0].message if document.problems else "is more than one value"
        raise ValueError(reason)
    return document.data["value"]


class _Reader:
    def __init__(self, loader: _Loader, name: str) -> None:
        self.loader = loader
        self.name = name
        self.lines: dict[paths.Path, int] = {}
        self.problems: list[Problem] = []
        self.count = 0

    def value(self, node: yaml.Node, path: paths.Path) -> Any:
        self.count += 1
        if self.count > MAX_NODES:
            raise yaml.YAMLError(f"has more than {MAX_NODES} values")
        if len(path) > MAX_DEPTH:
            raise RecursionError
        self.lines.setdefault(path, node.start_mark.line + 1)
        if node.tag not in _PLAIN:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.problem(path, f"has the tag {tag}, and recipes take plain values only", node)
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        return self.loader.construct_object(node) if node.tag in _PLAIN else node.value

    def mapping(self, node: yaml.MappingNode, path: paths.Path) -> dict[str, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                self.problem((*path, key), f"is given twice, in lines {seen[key]} and {line}", key_node)
            elif key is not None:
                seen[key] = line
        self.loader.flatten_mapping(node)
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(path, f"has {_a(key_node)} for a key", key_node)
                continue
            key = str(key_node.value)
            if key in data:
                self.forget((*path, key))
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            data[key] = self.value(value_node, (*path, key))
        return data

    def forget(self, path: paths.Path) -> None:
        self.lines = {key: line for key, line in self.lines.items() if not paths.below(key, path)}

    def problem(self, path: paths.Path, message: str, node: yaml.Node) -> None:
        self.problems.append(Problem(paths.text(path), message, f"{self.name}:{node.start_mark.line + 1}"))


def _syntax(error: yaml.YAMLError, name: str, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or " ".join(str(error).split())
    if mark is None:
        return Problem("", reason if reason.startswith("has ") else f"is not YAML: {reason}", name)
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    hint = "indent with spaces: YAML allows no tabs" if "\t" in line[: mark.column + 1] else ""
    return Problem("", f"is not YAML: {reason}", f"{name}:{mark.line + 1}:{mark.column + 1}", hint=hint)


def _a(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
