"""The examples are recipes that `check` has nothing against, and whose manifests KubeRay's CRDs take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kuberay_site import faults, job, launcher

from rollhook.recipe.load import load_recipe
from rollhook_kuberay import rollhook_check

EXAMPLES = Path(__file__).parents[1] / "examples"
PROFILES = sorted(path.name.split(".")[1] for path in EXAMPLES.glob("*.infra.yaml"))


def keys(profile: str, *overrides: str) -> tuple[Any, dict[str, Any]]:
    recipe = load_recipe(EXAMPLES / "agentic.yaml", [f"infra={profile}", *overrides]).recipe
    return recipe, {**recipe.launcher.keys, "user": "tester"}


@pytest.mark.parametrize("profile", PROFILES)
def test_it_is_a_recipe_and_its_manifests_are_ones_that_kuberay_takes(profile: str) -> None:
    recipe, given = keys(profile)
    assert rollhook_check(recipe) == []
    plan = launcher(**given).plan(job(directory=f"{recipe.storage.root}/demo/attempts/1"))
    manifests = [each for each in plan.requests.values() if each.get("kind") in ("RayJob", "RayCluster")]
    assert manifests
    for each in manifests:
        assert faults(each) == [], each["metadata"]["name"]


def test_the_pair_is_judged_together() -> None:
    recipe, _ = keys("standing", "launcher.gpus_per_node=4")
    assert rollhook_check(recipe) == []  # the spec refers to the key
    recipe, _ = keys("gb300", "storage.root=/elsewhere")
    (found,) = rollhook_check(recipe)
    assert found.key == "launcher.mounts"


def test_there_are_both_modes() -> None:
    assert {keys(profile)[1]["mode"] for profile in PROFILES} == {"rayjob", "raycluster"}
