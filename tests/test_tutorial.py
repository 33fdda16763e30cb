"""Pages executed from their own text: files are written, commands run, what they print is compared."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollhook.testing.parts import needs_part

ROOT = Path(__file__).parents[1]
#: page -> commands that are shown and not run here
PAGES = {
    "tutorial.md": ["$ python3 core run recipes/quickstart.yaml\n"],
    "how-to/write-an-environment.md": [],
    "how-to/write-a-sandbox-backend.md": [],
}
BLOCK = re.compile(
    r"(?:`(?P<file>[^`\n]+)`:\n\n|<!-- (?P<note>[^>]*) -->\n)?^```(?P<language>\w*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)
pytest.importorskip("torch", reason="needs torch: `python3 core test` installs it")
pytest.importorskip("ray", reason="needs ray: `python3 core test` installs it")


def commands(body: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a block with what it must print."""
    for part in body.removeprefix("$ ").split("\n$ "):
        command, _, output = part.partition("\n")
        yield command, output


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_a_file_or_commands(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("\n```") / 2
    for block in blocks:
        assert block["file"] or (block["language"] == "console" and block["body"].startswith("$ ")), block[0]
    assert [b["body"] for b in blocks if b["note"]] == PAGES[page]


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """Make a directory like a clone, whose .venv has all packages of this one and takes others.

    In the end a service that a page started, and wrote the pid of, is stopped.
    """
    for name in ("core", "recipes"):
        (tmp_path / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (packages,) = tmp_path.glob(".venv/lib/python*/site-packages")
    (packages / "all.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    python = tmp_path / ".venv/bin/python"
    for name, module in (("rollhook", "rollhook.cli.main"), ("pip", "pip._internal.cli.main")):
        script = python.with_name(name)
        script.write_text(f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(0o755)
    yield tmp_path
    for file in tmp_path.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, clone: Path) -> None:
    needs_part("unshare")
    env = os.environ | {
        "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    for block in BLOCK.finditer((ROOT / "docs" / page).read_text()):
        if block["file"]:
            file = clone / block["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block["body"])
        elif not block["note"]:
            for command, wanted in commands(block["body"]):
                execute(command, wanted, clone, env)


def execute(command: str, wanted: str, cwd: Path, env: dict[str, str]) -> None:
    """Run a command and compare what it prints."""
    if not os.environ.get("ROLLHOOK_CI"):  # `python3 core` would install what has changed in the checkout
        command = command.replace("python3 core", "rollhook")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    assert matches(wanted, done.stdout), f"$ {command}\n{done.stdout}\n-- wanted --\n{wanted}"


def matches(wanted: str, printed: str) -> bool:
    """Compare, however wide the gaps: `...` stands for the rest of a line, alone for any number of lines."""
    lines = [" ".join(line.split()) for line in wanted.splitlines()]
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n"
        for line in lines
    )
    return bool(
        re.fullmatch(pattern, "".join(" ".join(line.split()) + "\n" for line in printed.splitlines()))
    )


@pytest.mark.parametrize(
    ("wanted", "same"),
    [
        ("a  b\nc", True),
        ("a ...\nc", True),
        ("...\na b\n...\nc\n...", True),
        ("a b", False),
        ("a...c", False),
        ("a b\nc\nd", False),
    ],
)
def test_what_is_printed_is_compared(wanted: str, same: bool) -> None:
    assert matches(wanted, "a b\nc\n") is same
