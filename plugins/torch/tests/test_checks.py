"""What `check` says of a recipe that generates with transformers and trains with torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollhook.recipe.schema import Recipe
from rollhook_torch import checks, rollhook_check


def problems(**keys: object) -> list[tuple[str, str, str]]:
    recipe = Recipe(name="r", **keys)  # type: ignore[arg-type]
    return [(each.key, each.scope, each.message) for each in rollhook_check(recipe)]


def test_a_gpu_that_is_not_here_is_a_matter_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    found = checks.no_gpu
    monkeypatch.setattr(checks, "no_gpu", lambda: found(tmp_path))
    engine, trainer = {"use": "transformers", "device": "cuda:1"}, {"use": "torch", "device": "cuda"}
    assert problems(engine=engine, trainer=trainer) == [
        ("engine.device", "site", "is cuda:1, but this machine has no GPU"),
        ("trainer.device", "site", "is cuda, but this machine has no GPU"),
    ]
    for device in ("auto", "cpu"):
        assert problems(engine={"use": "transformers", "device": device}) == []
    assert problems(engine={"use": "other", "device": "cuda"}) == []
    (tmp_path / "nvidiactl").touch()
    assert len(problems(engine=engine)) == 1
    (tmp_path / "nvidia0").touch()
    assert problems(engine=engine, trainer=trainer) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert [message for _, _, message in problems(engine=engine)] == [
        "is cuda:1, but CUDA_VISIBLE_DEVICES hides all GPUs here"
    ]


def test_transformers_has_no_ranks_to_route_to() -> None:
    engine, router = {"use": "transformers"}, {"use": "min_load", "dp_aware": "on"}
    assert problems(engine=engine, router=router) == [
        ("router.dp_aware", "composition", "is on, but engine transformers has no data-parallel ranks")
    ]
    assert problems(engine=engine) == problems(engine={"use": "sglang"}, router=router) == []


def test_what_is_trained_on_is_the_distribution_that_was_sampled_from() -> None:
    ((key, scope, _),) = problems(trainer={"use": "torch", "temperature": 0.5})
    assert (key, scope) == ("trainer.temperature", "composition")
    assert problems(trainer={"use": "torch"}) == []
