import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollhook_torch.microbatch import TokenRow, pack, score
from rollhook_torch.weights import load_model


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 200))
def test_portions_hold_every_sequence_once_and_fit(lengths: list[int], max_tokens: int) -> None:
    portions = pack(lengths, max_tokens)
    assert sorted(i for portion in portions for i in portion) == [i for i, n in enumerate(lengths) if n]
    for portion in portions:
        assert len(portion) == 1 or len(portion) * max(lengths[i] for i in portion) <= max_tokens


def row(ids: list[int], mask: list[int]) -> TokenRow:
    return TokenRow(np.array(ids, np.int32), np.array(mask, np.uint8))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_each_sequence_alone_in_loops(model_dir, temperature: float) -> None:  # type: ignore[no-untyped-def]
    model = load_model(model_dir, "float64", torch.device("cpu"))
    rows = [
        row([5, 6, 7, 8, 9, 10], [0, 0, 1, 1, 0, 1]),
        row([11, 12, 13], [0, 0, 1]),
        row([20, 21, 22, 23], [0, 1, 0, 0]),
    ]
    wanted, entropies = [], []
    with torch.no_grad():
        for item in rows:
            logits = model(input_ids=torch.tensor([item.token_ids.tolist()])).logits[0]
            for position in np.flatnonzero(item.mask):
                scaled = [value / temperature for value in logits[position - 1].tolist()]
                top = max(scaled)
                total = sum(np.exp(value - top) for value in scaled)
                logs = [value - top - np.log(total) for value in scaled]
                wanted.append(logs[item.token_ids[position]])
                entropies.append(-sum(np.exp(value) * value for value in logs))
    scored = score(model, rows, temperature)
    assert scored.logprobs.tolist() == pytest.approx(wanted, abs=1e-5)
    assert scored.entropy.tolist() == pytest.approx(entropies, abs=1e-5)
    assert scored.logprobs.requires_grad
    assert not scored.entropy.requires_grad
