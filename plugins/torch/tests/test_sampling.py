import math

import pytest
import torch

from rollhook_torch.sampling import Draw, sample

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
GREEDY = Draw(0.0, 1.0, -1, 0.99)


def draw(uniform: float, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> Draw:
    return Draw(temperature, top_p, top_k, uniform)


def softmax(values: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(value / temperature) for value in values]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_come_as_often_as_they_are_likely(temperature: float) -> None:
    count = 4000
    draws = [draw((i + 0.5) / count, temperature) for i in range(count)]
    ids, logprobs = sample(LOGITS.repeat(count, 1), draws)
    wanted = softmax(LOGITS[0].tolist(), temperature)
    shares = torch.bincount(ids, minlength=4).double() / count
    assert shares.tolist() == pytest.approx(wanted, abs=2 / count)
    assert logprobs.tolist() == pytest.approx([math.log(wanted[i]) for i in ids.tolist()], abs=1e-5)


def test_greedy_takes_the_likeliest_and_reports_the_models_own_probability() -> None:
    ids, logprobs = sample(LOGITS, [GREEDY])
    assert ids.tolist() == [0]
    assert logprobs.tolist() == pytest.approx([math.log(softmax(LOGITS[0].tolist())[0])], abs=1e-6)


def test_top_k_and_top_p_exclude_and_renormalise() -> None:
    first, second, *_ = softmax(LOGITS[0].tolist())
    for item in (draw(0.999, top_k=2), draw(0.999, top_p=first + second / 2)):
        ids, logprobs = sample(LOGITS, [item])
        assert ids.tolist() == [1]
        assert logprobs.tolist() == pytest.approx([math.log(second / (first + second))], abs=1e-6)
    ids, logprobs = sample(LOGITS, [draw(0.999, top_p=first / 2)])
    assert ids.tolist() == [0]
    assert logprobs.tolist() == pytest.approx([0.0], abs=1e-6)


def test_every_row_has_its_own_parameters() -> None:
    rows = [GREEDY, draw(0.999), draw(0.999, top_k=1), draw(0.0), draw(0.999, 0.01)]
    ids, logprobs = sample(LOGITS.repeat(5, 1), rows)
    assert ids.tolist() == [0, 3, 0, 0, 0]
    alone = [sample(LOGITS, [row]) for row in rows]
    assert [int(i) for i, _ in alone] == ids.tolist()
    assert [float(p) for _, p in alone] == pytest.approx(logprobs.tolist())


def test_a_token_that_cannot_be_is_never_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]])
    for uniform in (0.0, 0.4999999, 0.5, 0.9999999999):
        ids, logprobs = sample(logits, [draw(uniform)])
        assert ids.tolist()[0] in (1, 3)
        assert logprobs.tolist() == pytest.approx([math.log(0.5)])
