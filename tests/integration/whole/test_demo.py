"""`distdiag demo`: each fault is found by the command that it prints, the printed fix works, and nothing is left."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pexpect
import pytest
from support import PROGRAM, Running, wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 150
"""For imports of torch, which take a busy machine a minute."""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose temporary folder is empty again, and named by no process, after the test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield {"TMPDIR": str(folder)}
    wait_until(lambda: not processes_below(folder), 5, lambda: f"left: {processes_below(folder)}")
    assert not list(folder.iterdir())


def processes_below(folder: Path) -> list[int]:
    def words(entry: Path) -> bytes:
        try:
            return (entry / "cmdline").read_bytes()
        except OSError:
            return b""

    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if str(folder).encode() in words(entry)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash", r"rank 2 failed first: ValueError: sample 1207"),
        ("nan", r"128 nan in `output` of `0` \(Attention\)"),
    ],
)
def test_the_command_of_each_demo_finds_its_fault(fault: str, said: str, place: dict[str, str]) -> None:
    done = distdiag("demo", fault, "--auto", env=place)
    assert done.code == 0, done.out + done.err
    assert re.search(said, done.out + done.err), done.out + done.err


def test_the_printed_command_prints_a_fix_that_lets_the_job_finish(place: dict[str, str]) -> None:
    demo = pexpect.spawn(PROGRAM, ["demo", "hang"], env={**os.environ, **place}, encoding="utf-8", timeout=PATIENCE_S)
    demo.expect(r"second terminal:\s+(\S*distdiag hang \d+)\s")
    report = distdiag(*shlex.split(str(demo.match.group(1)))[1:])
    fix = re.search(r"rank 2: lock, (?s:.)*FAIL  hang.lock(?s:.)*load_batch(?s:.)*kill -CONT (\d+)", report.out)
    assert fix, report.out
    os.kill(int(fix[1]), signal.SIGCONT)
    demo.expect("The fix worked")
    demo.expect(pexpect.EOF)
    demo.close()
    assert demo.exitstatus == 0


def test_the_printed_command_finds_the_slow_rank_and_nothing_is_left_after_ctrl_c(place: dict[str, str]) -> None:
    demo = pexpect.spawn(PROGRAM, ["demo", "slow"], env={**os.environ, **place}, encoding="utf-8", timeout=PATIENCE_S)
    demo.expect(r"second terminal:\s+(\S*distdiag pyspy-all [^\r\n]*)")
    report = distdiag(*shlex.split(str(demo.match.group(1)))[1:])
    assert re.search(r"rank 2 (?s:.)*slower than the others, in `augment`", report.out), report.out
    demo.expect("Ctrl-C ends the demo")
    os.kill(demo.pid, signal.SIGINT)
    demo.expect(pexpect.EOF)
    demo.close()
    assert demo.exitstatus == 0


_TORCH = """
import sys, time
from types import SimpleNamespace as Has
Tensor, nn = object, Has(Module=object)
distributed = sys.modules["torch.distributed"] = Has(init_process_group=lambda _: time.sleep(600))
"""
"""All that ranks use of torch until they wait for each other."""


def all_started(place: dict[str, str], folder: Path) -> pexpect.spawn[str]:
    """Start a demo, and wait for the processes of all ranks and of the lock."""
    (folder / "torch.py").write_text(_TORCH)
    env = {**os.environ, **place, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    demo = pexpect.spawn(PROGRAM, ["demo", "hang"], env=env, encoding="utf-8", timeout=PATIENCE_S)
    wait_until(lambda: len(processes_below(Path(place["TMPDIR"]))) == 5, PATIENCE_S, lambda: "they do not start")
    return demo


def test_nothing_lives_on_after_sigkill(place: dict[str, str], tmp_path: Path) -> None:
    demo, folder = all_started(place, tmp_path), Path(place["TMPDIR"])
    os.kill(demo.pid, signal.SIGKILL)
    demo.expect(pexpect.EOF)
    demo.close()
    # No program can remove its folder then; its processes end all the same.
    wait_until(lambda: not processes_below(folder), 5, lambda: "a rank lives on")
    for path in [*folder.glob("*/*"), *folder.iterdir()]:
        path.rmdir() if path.is_dir() else path.unlink()


def test_nothing_is_left_when_the_terminal_is_closed(place: dict[str, str], tmp_path: Path) -> None:
    demo = all_started(place, tmp_path)
    demo.ptyproc.fileobj.close()
    wait_until(lambda: not demo.isalive(), 10, lambda: "the demo lives on")


def test_an_interrupt_while_the_ranks_start_leaves_nothing(place: dict[str, str]) -> None:
    running = Running("demo", "hang", env=place)
    running.wait_for("starting 4 ranks")
    wait_until(lambda: bool(running.left_behind()), 20, lambda: "no rank was started")
    running.process.send_signal(signal.SIGTERM)
    assert running.finish().code == 130


def test_without_torch_the_fix_is_named(tmp_path: Path, place: dict[str, str]) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    done = distdiag("demo", "crash", env={**place, "VIRTUAL_ENV": str(tmp_path)})
    assert done.code == 3
    assert done.err.splitlines()[-2:] == [
        f"distdiag demo: {python} has no torch",
        f"hint: {python} -m pip install torch",
    ]


def test_an_unknown_fault_is_wrong_usage() -> None:
    done = distdiag("demo", "explode")
    assert done.code == 2
    assert "'hang', 'crash', 'nan', 'slow'" in done.err
