"""README and docs: every command line parses, generated parts are fresh, and no link is dead."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import make_docs
import make_samples
import pytest
from loops import each

from distdiag.cli import _SUBCOMMANDS, GROUPS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!\[)`(distdiag\s[^`]+)`(?!\])")
"""Commands in a sentence; not one that is the name of a link, as where it needs options."""
HOMES = {sub.name: sub.home for sub in _SUBCOMMANDS} | {
    f"{sub.name} {below.name}": below.home for sub in _SUBCOMMANDS for below in sub.below
}
_TYPED = re.compile(r"(?:(?:srun|mpirun|torchrun|uvx|eval)\S*.*?[ (])?distdiag (?P<words>[a-z-].*)")


def blocks(page: Path, *languages: str) -> Iterator[str]:
    return (text for language, text in BLOCK.findall(page.read_text()) if language in languages)


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """List the words after `distdiag` of every command line in the pages that people write, with its page."""
    for page in PAGES:
        lines = [
            line.strip()
            for text in blocks(page, "", "text", "sh")
            for line in text.replace("\\\n", " ").splitlines()
            if "`" not in line
        ]
        if page.name != "architecture.md":  # its example of a new command is not there
            lines += [" ".join(text.split()) for text in INLINE.findall(BLOCK.sub("", page.read_text()))]
        lines += [text.partition("\n")[0].removeprefix("$ ") for text in blocks(page, "console")]
        for line in lines:
            if found := _TYPED.match(line):
                words = found["words"].removesuffix(')"') if line.startswith("eval") else found["words"]
                yield f"{page.name}: {line}", shlex.split(words.split(')"')[0], comments=True)


_command = cache(make_docs.parsed_command)


def parse(words: list[str]) -> None:
    """Parse a command line like distdiag. Raises Typer's error for an invalid line."""
    if words[0].startswith("-"):
        return
    if words[0] == "help":
        assert words[1] in {sub.name for group in GROUPS.values() for sub in group}
        return
    name = " ".join(words[:2]) if " ".join(words[:2]) in HOMES else words[0]
    _command(HOMES[name]).make_context(name, words[len(name.split()) :])


@each("where, words", command_lines())
def test_every_command_line_is_understood(where: str, words: list[str]) -> None:
    parse(words)


def test_a_command_line_with_a_wrong_option_is_not_understood() -> None:
    with pytest.raises(Exception, match="no-such-option"):
        parse(["pyspy-all", "--no-such-option"])


def test_there_are_command_lines_of_every_command() -> None:
    typed = {" ".join(words[: len(name.split())]) for _, words in command_lines() for name in HOMES}
    assert {name for name, home in HOMES.items() if home} <= typed


@each("page", PAGES)
def test_python_blocks_compile(page: Path) -> None:
    for text in blocks(page, "python"):
        compile(text, str(page), "exec")


def test_names_of_the_python_api_are_there() -> None:
    import distdiag

    listed = re.findall(r"`(\w+)", (ROOT / "docs/reference/python-api.md").read_text())
    assert set(distdiag.__all__) <= set(listed)


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(re.findall(r"^\| .* \| `distdiag", text, re.MULTILINE)) <= 10


def test_every_sample_can_be_made_again_and_every_maker_is_used() -> None:
    marked = {match["name"] for page in PAGES for match in make_samples._BLOCK.finditer(page.read_text())}
    assert marked == set(make_samples.SAMPLES)


def test_generated_pages_are_those_of_the_code() -> None:
    stale = [name for name, make in make_docs.PAGES.items() if (ROOT / "docs" / name).read_text() != make()]
    assert not stale, "run `make generated`"


def test_a_new_finding_id_makes_the_page_stale(tmp_path: Path) -> None:
    page = "docs/reference/finding-ids.md"
    (tmp_path / "distdiag").mkdir()
    for part in (ROOT / "distdiag").iterdir():
        (tmp_path / "distdiag" / part.name).symlink_to(part)
    (tmp_path / "distdiag/ids.py").unlink()
    for name in (page, "tools/make_docs.py", "distdiag/ids.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    ids = tmp_path / "distdiag/ids.py"
    new = '    PORTS_NEW = "ports.new", "fail", "new"\n'
    ids.write_text(ids.read_text().replace('    USAGE = "usage"', f'{new}    USAGE = "usage"'))
    only_it = "import make_docs; made = make_docs.PAGES; "
    only_it += "[made.pop(name) for name in [*made] if 'finding-ids' not in name]; make_docs.main()"
    done = subprocess.run(
        [sys.executable, "-c", only_it, "--check"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{tmp_path / 'tools'}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert f"stale: {page};" in done.stderr
    # The page was fresh before: test_generated_pages_are_those_of_the_code.


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        ("CUDA out of memory", ["CUDA out of memory"]),
        (r"a (?P<x>\d+) of b|no c", ["a … of b", "no c"]),
        (r"\[rank(?P<r>\d+)\]: lost", ["[rank…]: lost"]),
        (r"^(?:error|warn): nvcc(?:\.exe)? failed", ["error: nvcc.exe failed"]),
    ],
)
def test_a_pattern_is_shown_as_the_line_that_people_paste(pattern: str, lines: list[str]) -> None:
    assert make_docs.pasted_lines(pattern) == lines


def test_every_page_of_a_command_is_in_the_navigation_and_linked_from_the_readme() -> None:
    navigation = (ROOT / "docs/mkdocs.yml").read_text()
    readme = (ROOT / "README.md").read_text()
    pages = {f"commands/{page.name}" for page in (ROOT / "docs/commands").glob("*.md")}
    assert not [page for page in sorted(pages) if f": {page}\n" not in navigation]
    assert not [page for page in sorted(pages) if f"(docs/{page})" not in readme]
    documented = {page.removeprefix("commands/").removesuffix(".md") for page in pages}
    assert {sub.name for sub in _SUBCOMMANDS} <= documented
