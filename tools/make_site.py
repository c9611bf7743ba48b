"""Builds the documentation's site from README.md and docs/ into a folder: `python tools/make_site.py FOLDER`.

mkdocs takes no pages from beside its own folder, so they are copied first; links of the README into docs/ follow.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build(site: Path) -> None:
    """Build the site; a page, link or anchor that is missing is an error. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="distdiag-site-") as folder:
        pages = Path(folder) / "pages"
        shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("mkdocs.yml"))
        (pages / "index.md").write_text((ROOT / "README.md").read_text().replace("](docs/", "]("))
        config = shutil.copy(ROOT / "docs" / "mkdocs.yml", folder)
        command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", config]
        subprocess.run([*command, "--site-dir", str(site.resolve())], check=True, timeout=110)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
