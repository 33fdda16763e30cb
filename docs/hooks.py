"""What mkdocs calls: it adds the pages that lie at the top of the repository, where its readers look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
#: file at the top -> page of the site; the front page stands for docs/README.md, the list of pages
TOP = {
    "docs/README.md": "index.md",
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE",
}


def on_files(files: Files, *, config: Any) -> None:
    """Add the files at the top, their links made relative to docs/."""
    for name, page in TOP.items():
        if "/" not in name:
            text = (ROOT / name).read_text()
            for other, target in TOP.items():
                text = text.replace(f"]({other})", f"]({target})")
            files.append(File.generated(config, page, content=text.replace("](docs/", "](")))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to files at the top into links to their pages."""
    for name, target in TOP.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}")
    return markdown
