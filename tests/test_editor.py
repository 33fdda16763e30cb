"""`rollhook schema` as the language server of YAML editors reads it: what it underlines and offers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollhook.cli.main import app

ROOT = Path(__file__).parents[1]
SERVER = shutil.which(
    "yaml-language-server", path=f"{ROOT / '.ci/node_modules/.bin'}{os.pathsep}{os.environ['PATH']}"
)
if SERVER is None:
    pytest.skip("needs yaml-language-server (.ci/packages, with npm)", allow_module_level=True)
SETTINGS = {"validate": True, "completion": True, "hover": True, "schemaStore": {"enable": False}}


class Editor:
    """As much of an editor as it takes: opens recipes that name the schema in their first line."""

    def __init__(self, argv: Sequence[str], schema: Path) -> None:
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.schema = schema
        self.opened = 0
        self.asked = 0
        self.diagnostics: dict[str, list[dict[str, Any]]] = {}
        markdown = {"contentFormat": ["markdown"]}
        capabilities = {"workspace": {"configuration": True}, "textDocument": {"hover": markdown}}
        self.ask("initialize", {"processId": None, "rootUri": None, "capabilities": capabilities})
        self.send(method="initialized", params={})

    def open(self, text: str) -> tuple[str, list[tuple[int, str]]]:
        """Open a recipe; return its address, and line and text of what is underlined."""
        self.opened += 1
        uri = f"file:///recipes/{self.opened}.yaml"
        text = f"# yaml-language-server: $schema={self.schema.as_uri()}\n{text}"
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": text}
        self.send(method="textDocument/didOpen", params={"textDocument": document})
        while uri not in self.diagnostics:
            self.take(self.receive())
        found = self.diagnostics[uri]
        return uri, [(each["range"]["start"]["line"] + 1, each["message"]) for each in found]

    def offered(self, uri: str, line: int, column: int) -> list[str]:
        """Return what may be typed there."""
        found = self.ask("textDocument/completion", position(uri, line, column))
        return [each["label"] for each in (found["items"] if isinstance(found, dict) else found)]

    def hover(self, uri: str, line: int, column: int) -> str:
        """Return what is shown when the pointer rests there."""
        return str(self.ask("textDocument/hover", position(uri, line, column))["contents"]["value"])

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        self.asked += 1
        self.send(id=self.asked, method=method, params=params)
        while True:
            message = self.receive()
            if "method" not in message and message.get("id") == self.asked:
                return message["result"]
            self.take(message)

    def take(self, message: dict[str, Any]) -> None:
        if message.get("method") == "textDocument/publishDiagnostics":
            self.diagnostics[message["params"]["uri"]] = message["params"]["diagnostics"]
        elif "id" in message and "method" in message:
            items = (message.get("params") or {}).get("items", ())
            sections = [SETTINGS if each.get("section") == "yaml" else {} for each in items]
            self.send(id=message["id"], result=sections or None)

    def send(self, **message: Any) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout
        length = 0
        while line := self.process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        assert length, "the language server has ended"
        message: dict[str, Any] = json.loads(self.process.stdout.read(length))
        return message


def position(uri: str, line: int, column: int) -> dict[str, Any]:
    return {"textDocument": {"uri": uri}, "position": {"line": line - 1, "character": column}}


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Editor]:
    schema = tmp_path_factory.mktemp("schema") / "recipe.schema.json"
    done = CliRunner().invoke(app, ["schema", "--output", str(schema)])
    assert done.exit_code == 0, done.output
    assert SERVER
    found = Editor([SERVER, "--stdio"], schema)
    yield found
    found.process.kill()
    found.process.communicate()


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_is_not_underlined(editor: Editor, recipe: Path) -> None:
    assert editor.open(recipe.read_text())[1] == []


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("name: x\nstpes: 3\n", 3, "Property stpes is not allowed."),
        ("name: x\nrollout:\n  group_sise: 4\n", 4, "Property group_sise is not allowed."),
        ("name: x\ntrainer:\n  use: torch\n  lrr: 1\n", 5, "Property lrr is not allowed."),
        ("extends: y\ntrainer:\n  lr: 1e-3\n  lrr: 1\n", 5, "Property lrr is not allowed."),
        ("name: x\nenvironment:\n- use: tbench2\n  splt: a\n", 5, "Property splt is not allowed."),
        ("name: x\nrouter:\n  use: sticky+min_load\n  ttl: 3\n", 5, "Property ttl is not allowed."),
        ("name: x\nsteps: many\n", 3, "wanted: integer, or text with ${...}"),
        ("name: x\noutcomes: {timeout: verfy}\n", 3, 'Valid values: "verify", "zero", "drop"'),
        ("name: x\nagent: shel\n", 3, 'Valid values: "chat", "command", "nop", "oracle", "shell", "tools"'),
        ("steps: 3\n", 2, 'Missing property "name".'),
    ],
)
def test_what_is_wrong_is_underlined_at_its_line(editor: Editor, text: str, line: int, message: str) -> None:
    ((at, said),) = editor.open(text)[1]
    assert at == line
    assert message in said


def test_names_and_keys_are_offered(editor: Editor) -> None:
    uri, _ = editor.open("name: x\nagent: \nengine: \ntrainer:\n  use: torch\n  \n\n")
    assert {"shell", "oracle", "nop"} <= set(editor.offered(uri, 3, 7))
    assert {"lr", "algorithm"} <= set(editor.offered(uri, 7, 2))
    assert {"rollout", "sandbox"} <= set(editor.offered(uri, 8, 0))


def test_keys_and_names_are_explained(editor: Editor) -> None:
    uri, _ = editor.open(
        "name: x\ntrainer:\n  use: torch\n  lr: 1e-3\nrollout: {group_size: 4}\nsandbox: local\n"
    )
    assert "peak learning rate" in editor.hover(uri, 5, 3)
    assert "episodes of one task" in editor.hover(uri, 6, 12)
    assert "`local`: bubblewrap or unshare on this machine" in editor.hover(uri, 7, 11)
