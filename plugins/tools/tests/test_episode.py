"""The tools agent in whole episodes: a real session, a template with tools, a FastMCP server of the phase."""

import json
import logging

import numpy as np
from fastmcp import FastMCP

from rollhook.component import BuildContext
from rollhook.engine import SamplingParams
from rollhook.environment import Environment, Episode, Observation, Phase, Task, Verdict
from rollhook.messages import message
from rollhook.recipe.schema import Budgets, Outcomes
from rollhook.runtime.episode import EpisodeRequest, EpisodeRunner
from rollhook.session import Renderer
from rollhook.testing.environment import build_context
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.policy import says, serving
from rollhook.testing.tokenizer import write_tokenizer
from rollhook_tools import ToolsConfig
from rollhook_tools.agent import ToolCalling

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Counting(Phase):
    """Asks for a count of three, by a server of its own."""

    def __init__(self):
        self.total = 0
        self.observation = Observation([message("user", "Count to three.")])
        self.tools = FastMCP("counter")
        self.tools.tool(self.add)

    def add(self, amount: int) -> int:
        """Add."""
        self.total += amount
        return self.total

    async def verify(self, transcript):
        return Verdict(float(self.total == 3))


class OneCount(Episode):
    async def phases(self):
        yield Counting()


class Counts(Environment):
    verifies_apart = False

    def tasks(self, split=None):
        return [Task("t", "d", "train", limits={"agent": 30.0, "verify": 10.0})]

    def episode(self, task, ctx):
        return OneCount()


def called(*amounts):
    calls = [json.dumps({"name": "add", "arguments": {"amount": amount}}) for amount in amounts]
    return "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


async def test_an_episode_with_calls_is_exact_and_counted(tmp_path):
    """Invariant 2."""
    directory = write_tokenizer(tmp_path / "tokenizer", template=TEMPLATE)
    engine, answers = FakeEngine(says(Renderer(directory), called(1, "x"), called(2), "Three.")), []
    engine.mangle = lambda answer: answers.append(answer) or answer
    context = BuildContext(logging.getLogger("t"), tmp_path, tmp_path)
    async with serving(engine, directory=directory) as policy:
        runner = EpisodeRunner(
            name="counts",
            environment=Counts(None, build_context()),
            agent=ToolCalling(ToolsConfig(), context),
            pool=None,
            policy=policy,
            limits=Budgets(turns=5, max_seq_len=4096, reply_tokens=200),
            outcome_policy=Outcomes(),
            context=context,
        )
        task = runner.environment.tasks()[0]
        result = await runner.run(EpisodeRequest("e", "g", task, 1, SamplingParams()))
    record = result.record
    assert (record.ended, record.outcome.kind, record.reward, record.turns) == ("done", "scored", 1.0, 3)
    assert record.detail["agent"] == {"calls": {"done": 2, "failed": 1}}
    told = [m["content"] for m in record.messages if m["role"] == "tool"]
    assert (told[0], told[1][:7], told[2]) == ("1", "error: ", "3")
    emitted = [row[:2] for answer in answers for row in answer["meta_info"]["output_token_logprobs"]]
    (sample,) = result.samples
    assert sample.token_ids[sample.mask == 1].tolist() == [token for _, token in emitted]
    assert np.array_equal(sample.logprobs[sample.mask == 1], np.array([p for p, _ in emitted], np.float32))
