"""For mkdocs: README.md and BUILD_NOTES.md of the repository are pages of the site, and README.md is the first one.

They link to `docs/PAGE`, and pages link to `../README.md`; on the site all pages are in one folder.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "BUILD_NOTES.md")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the two pages."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **rest: Any) -> str:
    """Rewrite links to the two pages, which are in the parent folder of `docs` on disk."""
    return re.sub(r"\]\((\.\./)(?=(?:README|BUILD_NOTES)\.md)", "](", markdown)
