"""Twice the input takes about twice the time for any content: no log may keep a reader busy for ever."""

from __future__ import annotations

import contextlib
import gzip
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loops import each

from distdiag.cluster import hostfile
from distdiag.cluster.targets import Cluster
from distdiag.commands.trace.ranks import Wanted
from distdiag.commands.trace.sys import logs
from distdiag.commands.trace.sys.diagnose import diagnose_logs
from distdiag.commands.trace.sys.types import Request
from distdiag.errors import DistdiagError
from distdiag.facts.strace import lines
from distdiag.facts.strace.log import read_logs
from distdiag.files import log_text
from distdiag.knowledge.logs import read_log

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDED = Path(__file__).parents[3] / "recorded" / "strace"
AT = "17000000%02d.%06d"


def grows_at_most(factor: float, few: Callable[[], object], many: Callable[[], object]) -> None:
    """Assert that `many` takes this factor of the processor time of `few`, in one of three attempts."""
    tried = []
    for _ in range(3):  # what else runs here may make one of both slower
        tried.append((processor_time(few), processor_time(many)))
        if tried[-1][1] < factor * tried[-1][0] + 0.2:
            return
    raise AssertionError(tried)


def processor_time(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def at(number: int) -> str:
    return AT % (number // 1_000_000, number % 1_000_000)


def net(number: int) -> str:
    return f"TCP:[10.0.0.1:{number % 60000 + 1}->10.0.0.2:{number % 60000 + 1}]"


ONE_FILE = {
    "a file each": lambda n: f'{at(n)} read(3</data/{n}>, "", 1) = 0 <0.{n:06}>\n',
    "paths that are not there": lambda n: f'{at(n)} openat(AT_FDCWD, "/d/{n}", 0) = -1 ENOENT (No) <0.{n:06}>\n',
    "threads": lambda n: f'{n + 1} {at(n)} read(3</data/x>, "", 1) = 0 <0.000010>\n',
    "threads that start each other": lambda n: (
        f"{n + 1} {at(n)} clone(flags=CLONE_FILES|CLONE_THREAD) = {n + 2} <0.1>\n"
    ),
    "processes": lambda n: f'1 {at(n)} openat(AT_FDCWD, "/f{n}", 0) = {n} <0.1>\n1 {at(n)} fork() = {n + 2} <0.1>\n',
    "blocked": lambda n: f"{n + 1} {at(n)} getpid() = 3 <0.1>\n{n + 1} {at(n)} read(3<{net(n)}>,  <unfinished ...>\n",
}
MANY_FILES = {
    "blocked in a file each": lambda n: f"{at(n)} getpid() = 3 <0.1>\n{at(n)} read(3<{net(n)}>, ",
    "blocked on the same pipe": lambda n: f"{at(n)} getpid() = 3 <0.1>\n{at(n)} read(3<pipe:[1]>, ",
}


def judge(paths: list[str]) -> None:
    diagnose_logs(Request(program="distdiag", cluster=Cluster(), wanted=Wanted()), *logs.read(paths))


@pytest.mark.parametrize("line", ONE_FILE.values(), ids=ONE_FILE.keys())
def test_logs_of_many_lines(line: Callable[[int], str], tmp_path: Path) -> None:
    for count in (2000, 8000):
        (tmp_path / str(count)).write_text("".join(map(line, range(count))))
    # 4 times if linear, 16 if quadratic; a busy processor's caches give 8.
    grows_at_most(10, lambda: judge([str(tmp_path / "2000")]), lambda: judge([str(tmp_path / "8000")]))


@pytest.mark.parametrize("text", MANY_FILES.values(), ids=MANY_FILES.keys())
def test_many_logs(text: Callable[[int], str], tmp_path: Path) -> None:
    paths = [tmp_path / f"r.{number + 1}" for number in range(1000)]
    for number, path in enumerate(paths):
        path.write_text(text(number))
    grows_at_most(7, lambda: judge([str(path) for path in paths[:250]]), lambda: judge([str(tmp_path)]))


LINES = (
    '1700000000.100000 openat(AT_FDCWD, "/data/@", O_RDONLY) = -1 ENOENT (No such file) <0.000010>\n',
    '1700000000.100000 read(3</data/@>, "@"..., 100) = @\n',
    "1700000000.100000 connect(3<TCP:[@]>, {sa_family=AF_INET, sin_port=htons(1), @}, 16) = -1 EPIPE (x) <0.1>\n",
    "12@ 1700000000.100000 poll([{fd=3@\n",
    "@\n",
)
FILLS = (
    "a",
    "1",
    " ",
    "/",
    "<",
    ">",
    '"',
    "\\",
    "(",
    ")",
    ") = 0 ",
    " <1.1>",
    "../",
    ".so",
    "sin_port=htons(1)",
    "\\1",
)


def test_logs_of_strace_with_long_lines(tmp_path: Path) -> None:
    """A quarter of a megabyte in lines just short enough not to be cut; square work would take minutes each."""
    path, head = tmp_path / "x.log", (RECORDED / "6.13_files.txt").read_text(errors="replace")
    for line in LINES:
        for fill in FILLS:
            long = line.replace("@", fill * ((lines.LINE_BYTES // 2 - 500) // len(fill)))
            path.write_text(head + long * 8)
            began = time.process_time()
            read_logs([str(path)])
            assert time.process_time() - began < 5, (line, fill)


def test_a_line_of_strace_that_is_far_too_long_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    long = '1700000001.0 write(3</x>, "' + "a" * 9_000_000 + '", 9000000) = 9000000 <0.5>\n'
    path.write_text("1700000000.0 getpid() = 7 <0.1>\n" + long)
    (thread,) = read_logs([str(path)]).threads
    assert [(row.name, row.count, row.time_s) for row in thread.calls] == [("write", 1, 0.5), ("getpid", 1, 0.1)]
    assert thread.n_unread == 0


@each("fill", ["a", " ", "/", "error ", "supports ", "FlashAttention only supports" + " " * 40000])
def test_logs_of_builds_with_long_lines(fill: str) -> None:
    text = (fill * (lines.LINE_BYTES // len(fill) + 1))[: lines.LINE_BYTES] + "\n"
    began = time.process_time()
    read_log("FlashAttention only supports " + text * 16)
    assert time.process_time() - began < 10


def test_of_a_log_that_is_too_long_it_is_said_what_was_not_read(tmp_path: Path) -> None:
    path = tmp_path / "build.log"
    with open(path, "wb") as file:
        file.write(b"begin\n")
        for _ in range(90):
            file.write(b"nvcc -c kernel.cu -o kernel.o\n" * (2**20 // 30))
        file.write(b"last\n")
    text, unread = log_text(str(path))
    assert len(text) < 70 * 2**20
    assert (text[:6], text[-5:]) == ("begin\n", "last\n")
    assert "first 16 and the last 48 MiB" in unread
    path.write_bytes(b"x" * 2_000_000 + b"\nlast\n")
    text, unread = log_text(str(path))
    assert unread == "lines longer than 256 KiB were cut"
    assert text.endswith("\nlast\n")
    path.write_bytes(gzip.compress(b"short\n"))
    path = path.rename(f"{path}.gz")
    assert log_text(str(path)) == ("short\n", "")


@pytest.mark.parametrize("text", ["a" + " " * 300_000 + "b", " a" * 150_000, "a=" * 150_000])
def test_hostfiles_with_long_lines(text: str) -> None:
    began = time.process_time()
    with contextlib.suppress(DistdiagError):
        hostfile.read_hostfile(text, "hosts")
    assert time.process_time() - began < 10
