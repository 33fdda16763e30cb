"""The recipe `mixed`: two environments in one run, by weight."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from rollhook.testing.parts import needs_part

pytest.importorskip("torch", reason="needs torch: `python3 core test` installs it")
pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")

#: a model that knows nothing, so that nothing needs to be run before
SMALL = [
    "~needs",
    "~model.path",
    "+model.init={architecture: llama, sizes: {hidden_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 2, num_key_value_heads: 2, intermediate_size: 64, max_position_embeddings: 256}}",
    "+model.tokenizer={train: 'pack:pocket/demos.jsonl', vocab_size: 400}",
    "budgets.reply_tokens=8",
    "sandbox.warm=0",
    "rollout.batch_groups=4",
    "rollout.group_size=2",
    "rollout.max_concurrent=8",
    "outcomes.truncated=verify",
    "steps=2",
    "+rollout.drop_zero_variance=false",
    "evaluation.every=2",
    "evaluation.first=false",
    "evaluation.episodes=2",
    "evaluation.greedy=false",
]
#: episodes of a step
SHARES = {"tbench2": 6, "arithmetic": 2}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_mixes_two_environments_by_weight(tmp_path):
    for part in ("unshare", "rollhook_local", "rollhook_tbench2", "rollhook_agents", "rollhook_torch"):
        needs_part(part)
    run = tmp_path / "runs" / "m"
    argv = [sys.executable, "-m", "rollhook.cli.main", "run", "mixed", *SMALL, "--run-id", "m"]
    argv.append(f"storage.root={run.parent}")
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [record for part in sorted((run / "episodes").glob("*.jsonl")) for record in lines(part)]
    trained = Counter(r["environment"] for r in records if r["purpose"] == "train")
    assert trained == {name: 2 * count for name, count in SHARES.items()}
    assert all(r["messages"][-1]["role"] == "assistant" for r in records if r["environment"] == "arithmetic")
    rows = lines(run / "metrics.jsonl")
    steps = [row for row in rows if "rollout/episodes" in row]
    (evaluation,) = [row for row in rows if any(name.startswith("eval/") for name in row)]
    assert len(steps) == 2
    for name, count in SHARES.items():
        assert [row[f"rollout/{name}/episodes"] for row in steps] == [count, count]
        assert evaluation[f"eval/{name}/episodes"] == 2


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
