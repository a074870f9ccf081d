"""Gives mkdocs the documents as they lie in the repository: a link leads to the same place on the site and in a clone,
and nothing is there twice."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
SHOWN = (
    "*.md", "LICENSE", "docs/*.md", "docs/*.svg", "docs/*.png", "benchmarks/results/*.md", "docker/*", "examples/*.py",
    "benchmarks/results/*.json", "examples/**/*.md", "policies/*.py",
)  # fmt: skip
"""Pages, and what they link to."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in sorted({path for pattern in SHOWN for path in ROOT.glob(pattern) if path.is_file()}):
        name = str(path.relative_to(ROOT))
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
