"""Conversations over every family's template: a turn's tokens stay, and what was generated is trained."""

import json

import pytest
from conversing import QUIET, TOOLS, plans, session_of, text
from families import FAMILIES, write_family, write_pieces
from hypothesis import given, settings

from rollhook.session import Renderer, RenderError
from rollhook.testing.tokenizer import CHATML, write_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {name: Renderer(write_family(name, tmp_path_factory.mktemp(name))) for name in FAMILIES}


def written(family, directory):
    """Write a family's tokenizer: of a name that ends in `-pieces`, one of pieces."""
    if family == "chatml":
        return write_tokenizer(directory)
    name, _, pieces = family.partition("-")
    return write_pieces(name, directory) if pieces else write_family(name, directory)


@pytest.mark.parametrize("family", [*FAMILIES, "chatml", "llama3-pieces", "mistral-pieces"])
def test_tokens_of_a_turn_stay_and_every_generated_token_trains_once(family, tmp_path):
    made = FAMILIES.get(family.partition("-")[0])
    with session_of(written(family, tmp_path)) as run:

        @settings(QUIET, max_examples=30)
        @given(plan=plans(made.thinks, made.call) if made else plans())
        def hold(plan):
            run(plan)

        hold()


@pytest.mark.parametrize("family", FAMILIES)
def test_control_tokens_in_any_text_are_text(family, tmp_path):
    renderer = Renderer(write_family(family, tmp_path))

    def control(ids):
        return [index for index in ids if index in renderer._special]

    def said(content):
        call = {"id": "c00000000", "type": "function", "function": {"name": "run", "arguments": content}}
        return [
            {"role": "user", "content": content},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": content, "tool_call_id": "c00000000"},
        ]

    hostile = " ".join(renderer._special.values())
    for key in ("x", hostile):
        arguments = json.dumps({key: hostile})
        plain, tried = said("x"), said(hostile)
        plain[1]["tool_calls"][0]["function"]["arguments"] = '{"x": "x"}'
        tried[1]["tool_calls"][0]["function"]["arguments"] = arguments
        assert control(renderer.first(tried, TOOLS)) == control(renderer.first(plain, TOOLS))
    for appended, harmless in zip(said(hostile)[::2], said("x")[::2], strict=True):
        ids = renderer.increment([appended], last_token=None, tools=TOOLS)
        assert control(ids) == control(renderer.increment([harmless], last_token=None, tools=TOOLS))
        assert "<|endoftext|>" in renderer.decode(ids)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mistral"])
@settings(QUIET, max_examples=15)
@given(said=text, next_said=text)
def test_what_follows_a_reply_is_what_the_template_renders_after_it(made, family, said, next_said):
    renderer, stop = made[family], made[family].stop_token_ids[0]
    user = {"role": "user", "content": "u"}
    said = "so " + said.replace("</think>", "") + " it is"
    appended = [{"role": "user", "content": next_said}]
    closing = renderer.increment(appended, last_token=None)
    whole = renderer.decode(renderer.first([user, {"role": "assistant", "content": said}, *appended]))
    assert whole.endswith(said + renderer.decode(closing))
    ended = renderer.increment(appended, last_token=stop)
    assert ended == closing if renderer._closing is None and closing[0] != stop else ended == closing[1:]


def test_what_the_engine_stopped_at_stands_for_what_closes_or_opens_a_turn(made):
    question = {"role": "user", "content": "a"}
    result = {"role": "tool", "content": "a", "tool_call_id": "c00000000"}

    def after(family, appended, stop):
        renderer = made[family]
        return renderer.decode(renderer.increment([appended], last_token=renderer._index_of(stop)))

    assert after("qwen3", question, "<|endoftext|>").startswith("\n<|im_start|>user")
    assert after("llama3", result, "<|eom_id|>").startswith("<|start_header_id|>ipython")
    assert after("glm", question, "<|user|>").startswith("\na")
    assert after("glm", result, "<|observation|>").startswith("\n<tool_response>")
    # what was emitted is never taken back: the right opening comes after it
    assert after("glm", result, "<|user|>").startswith("<|observation|>")
    assert after("glm", question, "<|endoftext|>").startswith("<|user|>")


def test_earlier_reasoning_stays_though_the_template_drops_it(made):
    renderer, user = made["qwen3"], {"role": "user", "content": "u"}
    reply = [*renderer.encode("<think>\nhm\n</think>\n\nyes"), renderer.stop_token_ids[-1]]
    message = renderer.parse(reply)
    assert message["reasoning_content"] == "hm"
    ids = renderer.first([user]) + reply + renderer.increment([user], last_token=reply[-1])
    assert "hm" in renderer.decode(ids)
    assert "hm" not in renderer.decode(renderer.first([user, message, user]))


def test_a_message_that_the_template_leaves_out_is_refused(tmp_path):
    write_tokenizer(tmp_path)
    loop = "{% for message in messages %}"
    no_results = CHATML.replace(loop, "{% for message in messages if message.role != 'tool' %}")
    no_system = CHATML.replace(loop, "{% for message in messages if message.role != 'system' %}")
    for template, appended in (
        (no_results, {"role": "tool", "content": "a", "tool_call_id": "c00000000"}),
        (no_system, {"role": "system", "content": "a"}),
    ):
        with pytest.raises(RenderError, match=f"leaves out a {appended['role']} message"):
            Renderer(tmp_path, template).increment([appended], last_token=None)


def test_tools_need_a_form_of_calls(tmp_path):
    write_tokenizer(tmp_path, template=CHATML.replace("<tool_call>", ""))
    user = {"role": "user", "content": "u"}
    assert Renderer(tmp_path).first([user])
    with pytest.raises(RenderError, match=r"no known form of calls; say which it is with model\.tool_parser"):
        Renderer(tmp_path).first([user], TOOLS)
    assert Renderer(tmp_path, tool_parser="hermes").first([user], TOOLS)


def test_variables_reach_the_template(tmp_path):
    write_tokenizer(tmp_path, template=CHATML + "{{ mood }}")
    renderer = Renderer(tmp_path, template_variables={"mood": "calm"})
    assert renderer.decode(renderer.first([{"role": "user", "content": "u"}])).endswith("calm")


def test_a_template_that_wants_arguments_as_text_gets_them(tmp_path):
    call = "{% for call in message.tool_calls or [] %}{{ '|' + call.function.arguments }}{% endfor %}"
    write_tokenizer(tmp_path, template=CHATML.replace("{% endfor %}", call + "{% endfor %}"))
    renderer = Renderer(tmp_path)
    function = {"name": "f", "arguments": '{"a":  1}'}
    said = {"role": "assistant", "content": "x", "tool_calls": [{"id": "c", "function": function}]}
    ids = renderer.first([{"role": "user", "content": "u"}, said])
    assert '|{"a":  1}' in renderer.decode(ids)


def test_reasoning_is_opened_by_the_prompt_of_the_turn(tmp_path):
    """After a result this template goes on without the mark that it puts after a question."""
    write_tokenizer(tmp_path, template=CHATML + "{% if messages[-1].role == 'user' %}<think>\n{% endif %}")
    renderer = Renderer(tmp_path)
    reply = [*renderer.encode("yes"), renderer.stop_token_ids[0]]
    asked = renderer.first([{"role": "user", "content": "u"}])
    assert renderer.parse(reply, prompt=asked)["reasoning_content"] == "yes"
    result = {"role": "tool", "content": "a", "tool_call_id": "c00000000"}
    going_on = asked + reply + renderer.increment([result], last_token=reply[-1])
    assert renderer.parse(reply, prompt=going_on) == {"role": "assistant", "content": "yes"}


def test_tools_that_the_template_leaves_out_are_refused(tmp_path):
    write_tokenizer(tmp_path / "plain", template=CHATML.replace("{% if tools %}", "{% if false %}"))
    user = {"role": "user", "content": "run"}
    with pytest.raises(RenderError, match=r"^the chat_template\.jinja of plain leaves tools out"):
        Renderer(tmp_path / "plain").first([user], TOOLS)
    with pytest.raises(RenderError, match=r"^the template of model\.chat_template leaves tools out"):
        Renderer(
            tmp_path / "plain",
            "{% for m in messages %}{{ m.role + (m.content or '') }}{% endfor %}",
            tool_parser="hermes",
        ).first([user], TOOLS)
    assert "run" in (shown := Renderer(tmp_path / "plain", CHATML)).decode(shown.first([user], TOOLS))
