"""The site builds without a warning and asks no other host; a page that is wrong stops it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build(configuration: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", configuration, "-d", site],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds_and_asks_no_other_host(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        assert re.findall(r"(?:src=|<link[^>]*href=)[\"']?https?:[^ >]*", text) == [], page
    front = (tmp_path / "index.html").read_text()
    assert "python3 core run recipes/quickstart.yaml" in front
    assert 'href="contributing/"' in front


def test_wrong_links_and_pages_that_the_navigation_leaves_out_stop_it(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("[1](gone.md) [2](#nowhere) [3](/absolute.md)")
    (tmp_path / "docs/lost.md").touch()
    other = f"INHERIT: {ROOT}/mkdocs.yml\nhooks: []\nnav: [index.md]\ntheme: {{name: mkdocs}}\n"
    (tmp_path / "mkdocs.yml").write_text(other)
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1
    for name in ("gone.md", "#nowhere", "/absolute.md", "lost.md"):
        assert name in done.stderr, done.stderr
    assert done.stderr.count("WARNING") == 4
