"""What `check` says of how a program reaches its session."""

import pytest

from rollhook.recipe.check import check_recipe
from rollhook.testing.parts import needs_part

RECIPE = """\
extends: quickstart.yaml
name: outside
agent: {use: command, argv: [agent]}
gateway: {token: "env:THE_TOKEN"}
"""


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """Return a function that checks the recipe with overrides, in sandboxes that are on other machines."""
    for name in ("local", "tbench2", "torch", "routing", "trackers"):
        needs_part(f"rollhook_{name}")
    from rollhook_local.backend import LocalSandboxes

    monkeypatch.setattr(LocalSandboxes, "elsewhere", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside.yaml").write_text(RECIPE)

    def check(*overrides):
        found = check_recipe("outside.yaml", overrides, site="none").problems
        return {each.key: each.message for each in found}

    return check


def test_a_program_in_a_sandbox_elsewhere_needs_an_address(problems):
    assert "which are elsewhere" in problems()["gateway.public_url"]
    assert problems("+agent.where=host") == {}
    assert problems("+agent.reach=relay") == {}


def test_the_address_says_which_port(problems):
    url = "+gateway.public_url=http://gate.example.org"
    assert "does not say which port" in problems(url)["gateway.public_url"]
    assert problems(url, "+gateway.port=7000") == {}
    assert problems(url + ":{port}") == {}
    said = problems(url, "+gateway.port=7000", "+rollout.workers=2")
    assert "cannot be that of all 2" in said["gateway.port"]


def test_an_address_that_nothing_uses_has_no_effect(problems):
    said = problems("+agent.where=host", "+gateway.public_url=http://gate.example.org")
    assert "no agent asks the policy from within a sandbox" in said["gateway.public_url"]
