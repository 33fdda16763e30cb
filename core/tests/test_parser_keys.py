"""What `check` says of the names of parsers, and that a run's renderer has them."""

from __future__ import annotations

from pathlib import Path

from families import FAMILIES, write_family

from rollhook.recipe.check import check_recipe
from rollhook.recipe.schema import Model
from rollhook.runtime.model import renderer
from rollhook.testing.tokenizer import CHATML, write_tokenizer


def problems(model: Path, *overrides: str) -> list[str]:
    checked = check_recipe("base.yaml", [f"model.path={model}", *overrides], site="here")
    return [f"{problem.key}: {problem.message}" for problem in checked.problems]


def test_names_are_compared_with_the_template_that_is_here(toys: Path) -> None:
    write_family("glm", toys)
    assert problems(toys, "model.tool_parser=glm47", "model.reasoning_parser=glm45") == []
    assert problems(toys, "model.tool_parser=hermes", "model.reasoning_parser=mistral") == [
        "model.tool_parser: hermes is not what the chat template shows: glm",
        "model.reasoning_parser: mistral is not what the chat template shows: no [/THINK]",
    ]
    (toys / "other.jinja").write_text(FAMILIES["qwen3"].template)
    assert problems(toys, "model.tool_parser=hermes", f"model.chat_template={toys / 'other.jinja'}") == []


def test_an_agent_that_gives_tools_needs_a_template_that_shows_them(toys: Path) -> None:
    write_tokenizer(toys, template=CHATML)
    assert problems(toys, "agent=caller") == []
    write_tokenizer(toys, template=CHATML.replace("{% if tools %}", "{% if false %}"))
    assert problems(toys) == []
    assert problems(toys, "agent=caller") == [
        f"model.chat_template: the chat template of {toys} leaves out the tools that agent caller gives the"
        " policy"
    ]


def test_a_template_that_is_elsewhere_is_not_compared(toys: Path) -> None:
    assert problems(toys, "model.tool_parser=glm") == []


def test_the_renderer_of_a_run_has_the_parsers_and_variables_of_its_recipe(tmp_path: Path) -> None:
    write_family("glm", tmp_path)
    model = Model(path=str(tmp_path), reasoning_parser="none", tool_parser="hermes")
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = renderer(model, tmp_path)
    ids = made.encode('</think><tool_call>{"name": "f"}</tool_call>')
    message = made.parse(ids, tools)
    assert (message["content"], len(message["tool_calls"])) == ("</think>", 1)
    cleared = Model(path=str(tmp_path), chat_template_kwargs={"clear_thinking": True})
    said = [
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "user", "content": "u"},
    ]
    for each, shown in ((model, True), (cleared, False)):
        rendering = renderer(each, tmp_path)
        assert ("hm" in rendering.decode(rendering.first(said))) is shown  # type: ignore[arg-type]
