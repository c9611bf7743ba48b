"""One TAB in each shell, with the files of completions/ put where that shell looks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from support import need

ROOT = Path(__file__).parents[3]


@pytest.fixture
def shell_home(tmp_path: Path) -> dict[str, str]:
    """An environment with an empty home and this distdiag on PATH."""
    return {
        "HOME": str(tmp_path),
        "ZDOTDIR": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TERM": "dumb",
        "PYTHONPATH": str(ROOT),
    }


def press_tab(command: list[str], environment: dict[str, str], prepare: str, typed: str, expected: str) -> None:
    """Start a shell, type, press TAB once, and wait for the text to be inserted."""
    shell = pexpect.spawn(command[0], command[1:], env=environment, encoding="utf-8", timeout=20)
    try:
        shell.sendline(prepare + "; echo RE''ADY")
        shell.expect("READY")
        shell.send(typed + "\t")
        shell.expect_exact(expected)
    finally:
        shell.close(force=True)


def test_bash(shell_home: dict[str, str]) -> None:
    need("bash")
    prepare = f"source {ROOT}/completions/distdiag.bash"
    press_tab(["bash", "--norc", "--noprofile", "-i"], shell_home, prepare, "distdiag gpu", "distdiag gpu-test")


def test_zsh_completes_on_the_first_tab_of_an_autoloaded_file(shell_home: dict[str, str]) -> None:
    need("zsh")
    prepare = f"fpath=({ROOT}/completions $fpath); autoload -Uz compinit; compinit -u -D"
    press_tab(["zsh", "-f", "-i"], shell_home, prepare, "distdiag gpu", "-test")


def test_fish(shell_home: dict[str, str]) -> None:
    need("fish")
    folder = Path(shell_home["XDG_CONFIG_HOME"]) / "fish" / "completions"
    folder.mkdir(parents=True)
    (folder / "distdiag.fish").symlink_to(ROOT / "completions" / "distdiag.fish")
    # complete -C gives what TAB would, in fish's own words.
    done = subprocess.run(
        ["fish", "-c", "complete -C 'distdiag gpu'; complete -C 'distdiag gpu-test --back'"],
        env=shell_home,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    words = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert words == ["gpu-test", "--backend"]


def documented(shell: str) -> str:
    """Return the line for the start file of a shell, from the page."""
    page = (ROOT / "docs" / "reference" / "completion.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {shell} |") and "_DISTDIAG_COMPLETE" in line)
    return row.split("`")[-2].replace("\\|", "|")


def test_the_documented_line_completes_in_bash(shell_home: dict[str, str]) -> None:
    need("bash")
    command = ["bash", "--norc", "--noprofile", "-i"]
    press_tab(command, shell_home, documented("bash"), "distdiag gpu", "distdiag gpu-test")


def test_the_documented_line_completes_in_zsh(shell_home: dict[str, str]) -> None:
    need("zsh")
    prepare = f"autoload -Uz compinit; compinit -u -D; {documented('zsh')}"
    press_tab(["zsh", "-f", "-i"], shell_home, prepare, "distdiag gpu", "-test")


def test_the_documented_line_completes_in_fish(shell_home: dict[str, str]) -> None:
    need("fish")
    done = subprocess.run(
        ["fish", "-c", f"{documented('fish')}; complete -C 'distdiag gpu'"],
        env=shell_home,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["gpu-test"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_install_completion_completes_in_an_environment_activated_later(shell_home: dict[str, str], shell: str) -> None:
    need(shell)
    (Path(shell_home["HOME"]) / ".zshrc").write_text("")  # or zsh asks its questions for new users
    environment = {**shell_home, "XDG_CONFIG_HOME": shell_home["HOME"] + "/.config"}
    install = [shell, "-c", "distdiag --install-completion; true"]
    subprocess.run(install, env=environment, check=True, capture_output=True, timeout=30)
    folder = Path(sys.executable).parent
    activate = f"set PATH {folder} $PATH" if shell == "fish" else f"PATH={folder}:$PATH"
    inserted = "distdiag gpu-test" if shell == "bash" else "-test"
    press_tab([shell, "-i"], environment | {"PATH": "/usr/bin:/bin"}, activate, "distdiag gpu", inserted)


def test_the_files_are_what_the_program_generates(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "make_completions.py", tmp_path], check=True, timeout=60)
    for path in (ROOT / "completions").iterdir():
        assert path.read_text() == (tmp_path / path.name).read_text(), "run: make completions"
