"""mini-swe-agent, unmodified, in a local sandbox: it asks, it works, and its turns are kept exactly."""

import json
import subprocess
from pathlib import Path

import pytest
from playing import assert_exact, playing

from rollhook.session import Renderer
from rollhook.testing.fake_engine import FakeEngine
from rollhook.testing.parts import needs_part
from rollhook.testing.policy import says
from rollhook.testing.tokenizer import write_tokenizer

RELEASE = "mini-swe-agent==2.4.6"
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
SETTINGS = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
}


@pytest.fixture(scope="module")
def program():
    """Return the path of mini-swe-agent in a virtual environment of its own, kept from run to run."""
    needs_part("root", "bubblewrap", "rollhook_local")
    venv = Path("/var/cache/rollhook-tests") / RELEASE.replace("==", "-")
    if not (venv / "ready").exists():
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--clear", venv], check=True)
        pip = [venv / "bin/pip", "install", "-q", RELEASE]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs pypi (it has no {RELEASE}: {done.stderr[-200:]})")
        (venv / "ready").touch()
    return venv


def called(thought, command):
    call = {"name": "bash", "arguments": {"command": command}}
    return f"{thought}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


@pytest.mark.nightly
@pytest.mark.timeout(900)
async def test_mini_swe_agent_works_in_a_sandbox_and_is_recorded_exactly(tmp_path, program):
    from rollhook.testing.boxes import started

    directory = write_tokenizer(tmp_path / "tokenizer", template=TEMPLATE)
    replies = [
        called("I write the file.", "echo 日本 > answer.txt && cat answer.txt"),
        called("That is all.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]
    engine = FakeEngine(says(Renderer(directory), *replies))
    argv = [
        f"{program}/bin/mini", "-t", "{task}", "-m", "openai/{model}", "-y", "--exit-immediately",
        "-o", "/tmp/trajectory.json", "-c", "mini.yaml", "-c", "agent.mode=yolo",
    ]  # fmt: skip
    keys = {"argv": argv, "task": "argv", "env": SETTINGS, "output_limit": 100_000}
    limits = {"turns": 6, "max_seq_len": 60_000, "reply_tokens": 1000, "agent": 120.0}
    async with (
        started("local", tmp_path / "sandboxes", read_only=[str(program)]) as backend,
        playing(directory, tmp_path, engine=engine, backend=backend, limits=limits, **keys) as played,
    ):
        result = await played.run()
    record = result.record
    assert (record.ended, record.outcome.kind, record.turns) == ("done", "scored", 2), record
    (heard,) = played.phase.heard
    assert "Say two things." in heard.messages[1]["content"]
    assert [m["role"] for m in heard.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert json.loads(heard.messages[3]["content"]) == {"returncode": 0, "output": "日本\n"}
    assert len(result.samples) == 1
    assert_exact(played, result)
