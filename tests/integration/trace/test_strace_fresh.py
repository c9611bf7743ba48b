"""What the strace of this machine writes, as it is today, is read in full: of a program that waits and misses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import need, wait_until

from distdiag.commands.trace.sys.collect import OPTIONS
from distdiag.facts.strace.log import read_logs

PROGRAM = Path(__file__).parents[2] / "programs" / "strace_waits.py"


@pytest.mark.parametrize(
    "options",
    [[*OPTIONS], ["-f", "-ff", "-ttt", "-T", "-yy"]],
    ids=" ".join,
)
def test_a_program_that_waits_and_spins(options: list[str], tmp_path: Path) -> None:
    need("strace")
    data = tmp_path / "shard.bin"
    data.write_bytes(b"x" * 16)
    folder = tmp_path / "logs"
    folder.mkdir()
    command = ["strace", *options, "-o", str(folder / "F"), sys.executable, "-S", "-E", str(PROGRAM), str(data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as strace:
        try:
            assert strace.stdout is not None
            assert strace.stdout.readline() == b"ready\n"
            # Long enough that a busy machine leaves the loop alone for a tenth of a second.
            wait_until(lambda: _size(folder) > 2_000_000, 30, lambda: str(_size(folder)))
        finally:
            os.killpg(strace.pid, signal.SIGKILL)
    logs = read_logs([str(folder)])
    assert logs.errors == ()
    assert sum(one.n_unread for one in logs.threads) <= 1, "a line that is cut"
    main, asking = sorted(logs.threads, key=lambda one: one.tid or 0)
    assert main.pid == asking.pid == main.tid
    missed = next(one for one in main.errors if one.weight >= 6 and "distdiag" in one.target)
    assert (missed.error, missed.target, missed.count) == ("ENOENT", "/nowhere/libdistdiag_missing.so.1", 1)
    assert main.last is not None
    assert (main.last.name, main.state in ("blocked", "killed SIGKILL")) == ("recvfrom", True)
    assert main.last.target.startswith("TCP")
    assert any(str(data).startswith(one.name) for one in main.places)
    assert max(asking.calls, key=lambda one: one.count).name == "poll"
    assert [one.name for one in asking.spins] == ["poll"]
    assert (asking.spins[0].per_s or 0) > 1000


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
