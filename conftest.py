"""What every test here gets: a home of its own, no use of the network, and in CI no silent skips."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

SETTINGS_OF_TESTS = (
    "ROLLHOOK_CI",
    "ROLLHOOK_CI_WITHOUT",
    "ROLLHOOK_NIGHTLY",
    "ROLLHOOK_TEST_IMAGE",
    "ROLLHOOK_UPDATE_PLANS",
)
#: libraries that would ask a server; here they must do without
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DO_NOT_TRACK": "1",
}
HOME = pytest.StashKey[Path]()
# strangers are tested as such: installed, see tests/test_wheels.py; the tests of tasks run in sandboxes
collect_ignore = ["tests/strangers", "tests/tb2"]


def pytest_configure(config: pytest.Config) -> None:
    """Move home and the XDG directories into a temporary directory, also for child processes."""
    home = Path(tempfile.mkdtemp(prefix="rollhook-tests-"))
    config.stash[HOME] = home
    for name in [n for n in os.environ if n.startswith("ROLLHOOK_") and n not in SETTINGS_OF_TESTS]:
        del os.environ[name]
    os.environ |= OFFLINE | {"HOME": str(home)}
    for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
        os.environ[f"XDG_{kind}_HOME"] = str(home / kind.lower())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove that directory."""
    shutil.rmtree(config.stash[HOME], ignore_errors=True)


@pytest.fixture(autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own index of runs; the cache is shared, its content is addressed by hash."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave nightly tests to `.ci/nightly`."""
    if os.environ.get("ROLLHOOK_NIGHTLY"):
        return
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="nightly: set ROLLHOOK_NIGHTLY=1"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip that CI does not expect into a failure."""
    report = yield
    refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a file that skips as a whole."""
    report = yield
    refuse_skip(report)
    return report


def refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fail a skipped test in CI, unless it is for the night or for a part that CI says it lacks.

    A case of a contract may skip as well: it is for something that the implementation does not have.
    """
    if not os.environ.get("ROLLHOOK_CI") or report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    where, reason = "", str(report.longrepr)
    if isinstance(report.longrepr, tuple):
        where, reason = str(report.longrepr[0]), report.longrepr[2].removeprefix("Skipped: ")
    part = re.match(r"needs ([\w.-]+)(?: \(|:)", reason)
    if part and part[1] in os.environ.get("ROLLHOOK_CI_WITHOUT", "").split():
        return
    contract_does_not_apply = "rollhook/testing/" in where and not part
    if reason.startswith("nightly") or contract_does_not_apply:
        return
    report.outcome = "failed"
    report.longrepr = (
        f"skipped in CI, which has what it needs or must say so in ROLLHOOK_CI_WITHOUT: {reason}"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests measured: each gives its figures with `record_property("figure", text)`."""
    figures = [
        f"{report.nodeid.split('::')[-1]}: {text}"
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, text in getattr(report, "user_properties", ())
        if name == "figure" and report.when == "call"
    ]
    if figures:
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.line(line)
