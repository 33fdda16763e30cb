"""The documentation is complete, up to date, and its code runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from click.testing import CliRunner
from typer.main import get_command

from rollhook import hookspecs
from rollhook.cli.main import VERBS, app
from rollhook.installed import installed
from rollhook.recipe.check import check_recipe
from rollhook.recipe.schema import Recipe
from rollhook.reply.forms import FORM_NAMES, THINKING_NAMES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("*/*/README.md"), ROOT / "core/README.md"]
)
BY_HAND = [page for page in PAGES if "reference" not in page.parts]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text()) if language in languages]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_up_to_date(generate: ModuleType) -> None:
    pages = generate.pages()
    stale = [name_of(p) for p, text in pages.items() if not p.exists() or p.read_text() != text]
    assert stale == [], "run `python docs/generate.py`"
    assert set((DOCS / "reference").glob("*.md")) == set(pages)


def test_everything_is_mentioned() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    wanted = [*(name for name in vars(hookspecs) if name.startswith("rollhook_"))]
    wanted += [f"rollhook {verb}" for verb in VERBS]
    wanted += [f"`{key}`" for key in Recipe.model_fields]
    wanted += [f"`{name}`" for name in (*FORM_NAMES, *THINKING_NAMES)]
    wanted += [recipe.stem for recipe in (ROOT / "recipes").glob("*.yaml")]
    here = {f"rollhook-{p.parent.name}" for p in ROOT.glob("*/*/pyproject.toml")}
    wanted += [f"{e.kind}.{e.name}" for e in installed() if e.distribution in here]
    assert [each for each in wanted if each not in text] == []


def events_written() -> Iterator[tuple[str, set[str]]]:
    """Yield the events that the core writes into journals, with the names of their fields."""
    for path in (ROOT / "core/src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            call = ast.unparse(node.func) if isinstance(node, ast.Call) and node.args else ""
            if re.search(r"(journal\.append|journal\.append_durable|record\.append|\._note)$", call):
                assert isinstance(node, ast.Call)
                if isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                    yield node.args[0].value, {keyword.arg for keyword in node.keywords if keyword.arg}


def test_every_event_of_the_journal_is_described() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", (DOCS / "run-directory.md").read_text(), re.MULTILINE)
    described = {event: set(re.findall(r"`(\w+)`", fields)) for event, fields in rows}
    written = list(events_written())
    assert {event for event, _ in written} == described.keys() - {"journal"}
    assert [(event, fields) for event, fields in written if not fields <= described[event]] == []


def test_every_environment_variable_is_described() -> None:
    said = (DOCS / "reference/commands.md").read_text()
    sources = [*ROOT.glob("core/*.py"), *ROOT.glob("core/src/**/*.py"), *ROOT.glob("*/*/src/**/*.py")]
    used = {name for path in sources for name in re.findall(r"\bROLLHOOK_\w+", path.read_text())}
    assert {name for name in used if f"`{name}`" not in said} == set()


def test_the_verbs_in_help_are_those_in_the_reference(generate: ModuleType) -> None:
    reference = (DOCS / "reference/commands.md").read_text()
    documented = re.findall(r"^## rollhook (\w+)$", reference, re.MULTILINE)
    shown = CliRunner().invoke(get_command(app), ["--help"]).output
    listed = re.findall(r"^  (\w+) ", shown.partition("Commands:")[2], re.MULTILINE)
    assert documented == [*VERBS, *generate.ADDED] == listed


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        other = page.parent / target if target else page
        headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert anchor in anchors, f"{target}#{anchor}"


@pytest.mark.parametrize("page", BY_HAND, ids=name_of)
def test_examples_in_python_parse_and_import_what_is_there(page: Path) -> None:
    for body in fences(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rollhook":
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("page", BY_HAND, ids=name_of)
def test_modules_and_classes_of_the_test_kit_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for name, module in re.findall(r"`(\w+Contract)` from\s+`(rollhook\.testing\.\w+)`", text):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@pytest.mark.parametrize("page", BY_HAND, ids=name_of)
def test_examples_in_yaml_use_keys_that_exist(page: Path) -> None:
    for body in fences(page, "yaml"):
        keys = set(yaml.safe_load(body))
        assert keys <= {*Recipe.model_fields, "extends"}, body


def test_the_recipe_of_the_front_page_has_no_problem(tmp_path: Path) -> None:
    (body,) = fences(ROOT / "README.md", "yaml")
    (tmp_path / "mine.yaml").write_text(body)
    checked = check_recipe(str(tmp_path / "mine.yaml"), [], site="none")
    assert [str(problem) for problem in checked.composition] == []


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_has_no_problem(recipe: Path) -> None:
    """Also without what it takes from the environment: that is a matter of the machine."""
    assert [str(problem) for problem in check_recipe(str(recipe), [], site="none").problems] == []
