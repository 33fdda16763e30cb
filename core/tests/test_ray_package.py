"""Code as the zip that Ray unpacks on every node."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from rollhook.errors import LauncherError
from rollhook.ray_package import pack


def tree(root: Path) -> Path:
    for name, text in {
        "pkg/__init__.py": "",
        "pkg/ignored.txt": "git ignores it",
        ".gitignore": "ignored.txt\n",
        ".git/HEAD": "ref",
        "pkg/__pycache__/x.pyc": "x",
        "data/big.bin": "b" * 3000,
        "run.sh": "true\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "run.sh").chmod(0o755)
    return root


def unpack(package: bytes) -> dict[str, tuple[str, int]]:
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        return {
            entry.filename: (archive.read(entry).decode(), entry.external_attr >> 16 & 0o777)
            for entry in archive.infolist()
        }


def test_everything_goes_but_what_no_job_needs_also_what_git_ignores(tmp_path: Path) -> None:
    package, name = pack(tree(tmp_path), {".rollhook/job/job.sh": "echo\n"})
    found = unpack(package)
    assert sorted(found) == [
        ".gitignore", ".rollhook/job/job.sh", "data/big.bin", "pkg/__init__.py", "pkg/ignored.txt", "run.sh"
    ]  # fmt: skip
    assert found["run.sh"] == ("true\n", 0o755)
    assert found["pkg/ignored.txt"] == ("git ignores it", 0o644)
    assert name.startswith("_ray_pkg_")
    assert name.endswith(".zip")


def test_the_same_content_is_the_same_package_wherever_and_whenever_it_is_packed(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    assert pack(one, {}) == pack(two, {})
    (two / "run.sh").write_text("false\n")
    assert pack(one, {})[1] != pack(two, {})[1]


def test_patterns_are_of_names_and_of_paths(tmp_path: Path) -> None:
    package, _ = pack(tree(tmp_path), {}, exclude=["data", "pkg/*.txt", ".git*", "__pycache__"])
    assert sorted(unpack(package)) == ["pkg/__init__.py", "run.sh"]


@pytest.mark.parametrize("limit", [1, 200])
def test_what_is_too_large_is_said_with_the_largest_files(tmp_path: Path, limit: int) -> None:
    with pytest.raises(LauncherError, match=r"the largest files are data/big.bin \(0\.0 MiB\), ") as error:
        pack(tree(tmp_path), {}, limit=limit)
    assert "code: path" in str(error.value)


def test_what_no_zip_can_carry_is_named(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="is no directory here"):
        pack(tmp_path / "none", {})
    root = tree(tmp_path / "code")
    (root / "pkg/inside.py").symlink_to("__init__.py")
    assert unpack(pack(root, {})[0])["pkg/inside.py"] == ("", 0o644)
    (root / "pkg/passwd").symlink_to("/etc/passwd")
    with pytest.raises(LauncherError, match=r"pkg/passwd is a link to /etc/passwd, which no upload carries"):
        pack(root, {})
    assert "pkg/passwd" not in unpack(pack(root, {}, exclude=["passwd"])[0])
