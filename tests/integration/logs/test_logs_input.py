"""Logs as they lie around: packed, cut off, binary, endless lines, pipes, escapes; read on several hosts."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support_torch
from logs_cases import RECORDED, raised
from support import PROGRAM, need
from support_warm import WarmRunning, distdiag

from distdiag.facts.logs import collect
from distdiag.facts.logs.demux import Demux

RAISE = gzip.decompress((RECORDED / "torchrun-raise.log.gz").read_bytes())
ANSWER = "rank 2"


@pytest.mark.parametrize("packing", ["gzip", "xz", "zstd"])
def test_packed_files_are_read(packing: str, tmp_path: Path) -> None:
    need(packing)
    (tmp_path / "a.log").write_bytes(RAISE)
    subprocess.run([packing, "-q", str(tmp_path / "a.log")], check=True)
    (tmp_path / "a.log").unlink(missing_ok=True)
    assert distdiag("logs", str(tmp_path), "--json").report["findings"][0]["where"]["ranks"] == [2]


def test_what_cannot_be_read_has_a_row_and_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(RAISE)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(os.urandom(9999))[:5000])
    (tmp_path / "program").write_bytes(b"\x7fELF" + bytes(999))
    os.mkfifo(tmp_path / "pipe")
    report = distdiag("logs", str(tmp_path), "--json").report
    assert report["findings"][0]["where"]["ranks"] == [2]
    errors = {source["path"].rpartition("/")[2]: source["error"] for source in report["data"]["sources"]}
    assert errors["program"] == "binary, not a log"
    assert errors["pipe"] == "not a regular file"
    assert errors["cut.gz"]


def test_a_line_without_end_takes_no_memory_and_escapes_do_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        for _ in range(200):
            file.write(b"x" * 10**6)
        file.write(
            b"\n" + raised(1, "ValueError: \x1b[2J\x1b]0;title\x07bad \udcff").encode("utf-8", "surrogateescape")
        )
    # In a process of its own, whose only child it is.
    peak = "import resource, subprocess, sys; subprocess.run(sys.argv[1:]); "
    peak += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"
    argv = [sys.executable, "-c", peak, PROGRAM, "logs", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "rank 1" in done.stdout
    assert "\x1b" not in done.stdout
    assert "\x07" not in done.stdout
    assert int(done.stderr.split()[-1]) < 150 * 1024


def test_a_pipe_and_stdin(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    running = WarmRunning("logs", str(pipe))
    pipe.write_bytes(RAISE)
    assert ANSWER in running.finish().out
    done = subprocess.run([PROGRAM, "logs", "-"], input=RAISE, capture_output=True, check=False, timeout=30)
    assert ANSWER in done.stdout.decode()
    assert done.returncode == 1


TORN = Path(__file__).resolve().parents[2] / "programs" / "writes_torn_lines.py"
PREFIXERS = {
    "torchrun": (str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node=8", "--tee=3"),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "--tag-output", "-n", "8", sys.executable),
}


def by_rank(path: str) -> dict[int | None, bytes]:
    """Return what each rank wrote, without the launcher's prefixes."""
    demux, found = Demux(), dict[int | None, bytes]()

    def add(label: bytes, text: bytes) -> None:
        stream = demux.labels[label]
        rank = stream.local if stream.rank is None else stream.rank
        found[rank] = found.get(rank, b"") + text

    for block in collect.blocks(path, [0]):
        demux.detect(block)
        *lines, rest = block.split(b"\n")
        for line in lines:
            for label, text in demux.lines(line, True):
                add(label, text + b"\n")
        for label, text in demux.lines(rest, False) if rest else ():
            add(label, text)
    for label, text in demux.finish():
        add(label, text)
    return found


@pytest.mark.parametrize("launcher", PREFIXERS)
def test_torn_streams_of_eight_ranks_come_back_byte_for_byte(launcher: str, tmp_path: Path) -> None:
    need(PREFIXERS[launcher][0])
    # Else torchrun's threads share a buffer, and lose parts of lines.
    command, env = [*PREFIXERS[launcher], str(TORN)], {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (tmp_path / "job.log").open("wb") as log:
        forked = support_torch.start(command, env, output=log, errors=subprocess.DEVNULL)
        assert (forked or subprocess.Popen(command, stdout=log, env=env)).wait(120) == 0
    found = by_rank(str(tmp_path / "job.log"))
    for rank in range(8):
        env = {**os.environ, "RANK": str(rank), "PAUSE": "0"}
        written = subprocess.run([sys.executable, str(TORN)], stdout=subprocess.PIPE, env=env, check=True).stdout
        assert found[rank] == written


def test_logs_are_read_where_they_lie(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(RAISE)
    hosts = ("--hosts", "a,b", "--via", "env HOST={host}")
    report = distdiag("logs", str(tmp_path / "a.log"), *hosts, "--json").report
    assert report["findings"][0]["where"]["ranks"] == [2]


def test_no_log_is_wrong_usage() -> None:
    assert distdiag("logs").code == 2


@pytest.mark.parametrize("command", ["logs", "core-bt", "flight-recorder"])
def test_a_path_that_is_not_here_is_wrong_usage_and_on_a_node_is_not(command: str) -> None:
    done = distdiag(command, "/nowhere/job.log")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[0] == f"distdiag {command}: /nowhere/job.log: no such file or folder"
    assert distdiag(command, "/nowhere/job.log", "--hosts", "a", "--via", "env HOST={host}").code == 3


def test_the_cause_is_the_first_row_and_a_timeline_fits_the_width(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(RAISE)
    lines = distdiag("logs", str(path), "--timeline").out.splitlines()
    assert lines[1].split() == ["ranks", "role", "exit", "reports"]
    assert lines[2].startswith("2      cause")
    assert all(len(line) <= 80 for line in lines if not line.startswith("    /"))
    assert "This is typically caused by" not in "".join(lines)
    assert (
        "2 of 2 files read" in distdiag("logs", str(path), str(RECORDED / "tree" / ".." / "torchrun-kill.log.gz")).out
    )
