from __future__ import annotations

import json
import logging
import sys
import tomllib
from pathlib import Path

import pytest

from rollhook import installed as metadata
from rollhook.component import BuildContext
from rollhook.plugins import LoadError, installed, load
from rollhook.recipe.problem import RecipeError
from rollhook.testing.distributions import write_distribution

AGENTS = """
from rollhook import Component, Config, hookimpl

IMPORTS = []

class Keys(Config):
    size: int = 1

class Ant:
    def __init__(self, config, context):
        self.config, self.context = config, context

@hookimpl
def rollhook_agents():
    return [Component(name, Keys, f"{__name__}:Ant", f"a {name}") for name in ("ant", "bee")]
"""


def agents(site: Path, name: str = "rollhook-zoo", module: str = "rollhook_zoo", **extra: object) -> None:
    points = {"agent.ant": module, "agent.bee": module}
    options = {"entry_points": points, "modules": {module: AGENTS}, **extra}
    write_distribution(site, name, **options)  # type: ignore[arg-type]


def message(names: list[tuple[str, str]], *, observers: list[str] | None = None) -> str:
    with pytest.raises(LoadError) as caught:
        load(names, observers or [])
    return str(caught.value)


def context(tmp_path: Path) -> BuildContext:
    return BuildContext(logging.getLogger("test"), scratch=tmp_path, cache=tmp_path)


def test_two_components_of_one_distribution_share_one_module_registered_once(site: Path) -> None:
    agents(site)
    plugins = load([("agent", "ant"), ("agent", "bee")])
    assert plugins.component("agent", "ant").summary == "a ant"
    assert plugins.component("agent", "bee").summary == "a bee"
    assert [name for name, _ in plugins.manager.list_name_plugin()] == ["rollhook_zoo"]
    assert plugins.distribution("agent", "bee") == ("rollhook-zoo", "1.0")


def test_a_name_claimed_by_two_distributions_is_an_error_that_names_both(site: Path) -> None:
    agents(site)
    write_distribution(
        site, "rollhook-hive", entry_points={"agent.bee": "rollhook_hive"}, modules={}, version="2.1"
    )
    assert message([("agent", "bee")]) == (
        "agent 'bee' is claimed by rollhook-hive 2.1 and rollhook-zoo 1.0\n"
        "  uninstall one: pip uninstall rollhook-zoo"
    )
    assert "rollhook_zoo" not in sys.modules


def test_a_name_claimed_twice_does_not_hurt_recipes_that_do_not_use_it(site: Path) -> None:
    agents(site)
    write_distribution(site, "rollhook-hive", entry_points={"agent.bee": "rollhook_hive"}, modules={})
    assert load([("agent", "ant")]).component("agent", "ant").name == "ant"


def test_a_module_that_fails_to_import_breaks_only_recipes_that_name_it(site: Path) -> None:
    agents(site)
    write_distribution(
        site,
        "rollhook-wasp",
        entry_points={"agent.wasp": "rollhook_wasp"},
        modules={"rollhook_wasp": "import no_such_sdk"},
    )
    assert load([("agent", "ant")]).loaded() == [("agent", "ant")]
    assert message([("agent", "wasp")]) == (
        "rollhook-wasp 1.0 cannot be imported: rollhook_wasp fails with ModuleNotFoundError: "
        "No module named 'no_such_sdk' (rollhook_wasp.py, line 1)\n"
        "  mend, reinstall or remove it: pip install --force-reinstall rollhook-wasp"
    )


def test_what_fails_in_a_plugin_installed_for_editing_says_where_and_how_to_install_it_again(
    site: Path,
) -> None:
    broken = (
        "from rollhook import hookimpl\n\n\n@hookimpl\ndef rollhook_agents():\n    return [Component()]\n"
    )
    write_distribution(
        site, "rollhook-wasp", entry_points={"agent.wasp": "wasp"}, modules={"wasp": "x = 1\ny = z\n"}
    )
    write_distribution(site, "rollhook-gnat", entry_points={"agent.gnat": "gnat"}, modules={"gnat": broken})
    origin = {"url": "file:///home/me/my%20wasp", "dir_info": {"editable": True}}
    (site / "rollhook_wasp-1.0.dist-info/direct_url.json").write_text(json.dumps(origin))
    assert message([("agent", "wasp")]) == (
        "rollhook-wasp 1.0 cannot be imported: wasp fails with NameError: name 'z' is not defined "
        "(wasp.py, line 2)\n"
        "  mend, reinstall or remove it: pip install -e '/home/me/my wasp'"
    )
    assert message([("agent", "gnat")]).endswith("name 'Component' is not defined (gnat.py, line 6)")


def test_failures_can_be_collected_instead(site: Path) -> None:
    agents(site)
    plugins = load([("agent", "wsp"), ("agent", "ant"), ("agent", "be")], strict=False)
    assert plugins.loaded() == [("agent", "ant")]
    assert {name for _, name in plugins.failures} == {"wsp", "be"}
    with pytest.raises(LoadError, match="'wsp' is not an agent"):
        plugins.component("agent", "wsp")


def test_a_module_that_exits_at_import_does_not_end_the_program(site: Path) -> None:
    write_distribution(
        site, "rollhook-wasp", entry_points={"agent.wasp": "wasp"}, modules={"wasp": "raise SystemExit(3)"}
    )
    assert "wasp fails with SystemExit: 3" in message([("agent", "wasp")])


def test_a_misspelt_hook_is_an_error_with_the_nearest_hook(site: Path) -> None:
    misspelt = AGENTS.replace("def rollhook_agents", "def rollhook_agnets")
    agents(site, modules={"rollhook_zoo": misspelt})
    text = message([("agent", "ant")])
    assert "rollhook-zoo 1.0 is broken: unknown hook 'rollhook_agnets' in plugin" in text
    assert "did you mean 'rollhook_agents'?" in text


def test_a_hook_with_a_misspelt_argument_is_an_error(site: Path) -> None:
    source = "from rollhook import hookimpl\n@hookimpl\ndef rollhook_accept_group(gruop):\n    return None\n"
    write_distribution(site, "rollhook-spy", entry_points={"plugin.spy": "spy"}, modules={"spy": source})
    assert "gruop" in message([], observers=["spy"])


def test_a_misspelt_hook_does_not_spoil_the_other_plugins_of_a_recipe(site: Path) -> None:
    agents(site)
    source = "from rollhook import hookimpl\n@hookimpl\ndef rollhook_agnets():\n    return []\n"
    write_distribution(site, "rollhook-spy", entry_points={"plugin.spy": "spy"}, modules={"spy": source})
    plugins = load([("agent", "ant")], ["spy"], strict=False)
    assert plugins.loaded() == [("agent", "ant")]
    plugins.manager.check_pending()


@pytest.mark.parametrize("requirement", ["rollhook>=1.0", "rollhook[ray]<0.1", "Rollhook==9.*"])
def test_an_api_range_that_does_not_fit_is_found_before_the_import(site: Path, requirement: str) -> None:
    agents(site, modules={"rollhook_zoo": "raise RuntimeError('imported')"}, requires=[requirement])
    wanted = requirement.removeprefix("rollhook").removeprefix("Rollhook").removeprefix("[ray]")
    assert message([("agent", "ant")]) == (
        f"rollhook-zoo 1.0 needs rollhook{wanted}, this is 0.1.0\n"
        "  get one that fits: pip install --upgrade rollhook rollhook-zoo"
    )


@pytest.mark.parametrize(
    "requires", [[], ["rollhook>=0.1,<0.2"], ["rollhook>=9; extra == 'new'"], ["pluggy>99"]]
)
def test_an_api_range_that_fits_loads(site: Path, requires: list[str]) -> None:
    agents(site, requires=requires)
    assert load([("agent", "ant")]).loaded() == [("agent", "ant")]


def test_an_unknown_name_is_answered_with_those_here_and_the_nearest(site: Path, only: None) -> None:
    agents(site)
    assert message([("agent", "bea")]) == (
        "'bea' is not an agent that is installed\n  agents here: ant, bee\n  did you mean 'bee'?"
    )


def test_a_known_plugin_is_answered_with_its_pip_command(site: Path, only: None) -> None:
    text = message([("trainer", "torch")])
    assert "trainers here: none" in text
    assert "install it: pip install" in text
    assert text.endswith(("rollhook-torch", "plugins/torch"))


def test_an_unknown_kind_is_answered_with_the_nearest(site: Path) -> None:
    text = message([("agnet", "ant")])
    assert text.startswith("'agnet' is not a kind of plugin (in agnet.ant)\n  kinds: sandbox, environment, ")
    assert text.endswith("did you mean 'agent'?")


def test_a_kind_that_the_distribution_misspelt_is_named(site: Path, only: None) -> None:
    agents(site, entry_points={"agnet.ant": "rollhook_zoo"})
    assert message([("agent", "ant")]).endswith(
        "rollhook-zoo registers 'agnet.ant', whose kind is misspelt: it should be agent.ant"
    )


def test_a_component_that_the_hook_does_not_supply_is_an_error(site: Path) -> None:
    agents(site, entry_points={"agent.anteater": "rollhook_zoo"})
    assert message([("agent", "anteater")]) == (
        "rollhook-zoo 1.0 registers 'agent.anteater', but rollhook_agents of rollhook_zoo "
        "does not supply it\n"
        "  it supplies: ant, bee"
    )


def test_a_hook_that_fails_is_an_error_of_its_distribution(site: Path) -> None:
    source = AGENTS.replace("return [C", "return no_such_name + [C")
    agents(site, modules={"rollhook_zoo": source})
    assert "rollhook-zoo 1.0 is broken: rollhook_agents of rollhook_zoo fails with NameError" in message(
        [("agent", "ant")]
    )


def test_listing_and_loading_import_nothing_else(site: Path) -> None:
    agents(site)
    write_distribution(
        site, "rollhook-far", entry_points={"engine.far": "rollhook_far"}, modules={"rollhook_far": ""}
    )
    assert "agent.ant" in {entry.full_name for entry in installed()}
    assert "rollhook_zoo" not in sys.modules
    load([("agent", "ant")])
    assert "rollhook_far" not in sys.modules


def test_every_load_has_a_manager_of_its_own(site: Path) -> None:
    agents(site)
    first, second = load([("agent", "ant")]), load([])
    assert first.manager is not second.manager
    assert second.manager.list_name_plugin() == []


def test_a_component_is_built_with_its_validated_keys(site: Path, tmp_path: Path) -> None:
    agents(site)
    plugins = load([("agent", "ant")])
    built = plugins.build("agent", "ant", {"size": 3}, context(tmp_path))
    assert built.config.size == 3
    with pytest.raises(RecipeError, match=r"agent\.siz: 'siz' is not a key"):
        plugins.build("agent", "ant", {"siz": 3}, context(tmp_path), "agent")


def test_a_component_that_another_one_names_is_loaded_and_built(toys: Path, tmp_path: Path) -> None:
    plugins = load([("sandbox", "wrapper")])
    outer = plugins.build("sandbox", "wrapper", {"inner": "box"}, context(tmp_path))
    inner = outer.context.build("sandbox", outer.config.inner)
    assert type(inner).__name__ == "Box"
    assert ("sandbox", "box") in plugins.loaded()


def test_the_known_plugins_are_those_of_this_checkout() -> None:
    root = Path(__file__).resolve().parents[2]
    found: dict[str, dict[str, str]] = {}
    for path in [*root.glob("plugins/*/pyproject.toml"), *root.glob("envs/*/pyproject.toml")]:
        project = tomllib.loads(path.read_text())["project"]
        for name in project.get("entry-points", {}).get("rollhook", {}):
            kind, _, rest = name.partition(".")
            found.setdefault(kind, {})[rest] = project["name"]
    assert metadata.known_plugins() == found


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what is really installed."""
    monkeypatch.setattr(
        "rollhook.plugins.installed", lambda: [e for e in installed() if e.distribution == "rollhook-zoo"]
    )
