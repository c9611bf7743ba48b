"""Stacks read from memory equal py-spy's, or are omitted."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobs import wait_for_state
from loops import each
from support import need, wait_until

from distdiag.facts import elf
from distdiag.facts.stacks import stack_types, waiting_stacks

if TYPE_CHECKING:
    import re
    from collections.abc import Iterator

_PROGRAM = str(Path(__file__).parents[3] / "programs" / "waits_deep.py")
_SELECTS = ("23", "270", "72")
"""select and pselect6 of x86-64, pselect6 of aarch64."""
_KNOWN = ("3.11", "3.12", "3.13")


def _pythons() -> list[str]:
    """List the interpreters of this machine, each once; the tests' own is first."""
    places = ["/usr/bin/python3.*", "/usr/local/bin/python3.*", os.path.expanduser("~/.pyenv/versions/3.*/bin/python3")]
    found = [os.path.realpath(path) for place in places for path in sorted(glob.glob(place)) if path[-1].isdigit()]
    return list(dict.fromkeys([os.path.realpath(sys.executable), *found]))


def _version(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def _running(how: str, python: str = sys.executable) -> Iterator[tuple[int, str]]:
    """Start the program; gives its pid and the first line that it prints."""
    process = subprocess.Popen([python, "-u", _PROGRAM, how], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if how == "sleeps" and line:  # "ready" comes first, and taking the GIL again may block
            call = Path(f"/proc/{process.pid}/syscall")
            wait_until(lambda: call.read_text().split()[0] in _SELECTS, 30, lambda: call.read_text())
        yield process.pid, line
    finally:
        process.kill()
        process.communicate()


def _read(pid: int, seconds: float = 10, wanted: re.Pattern[str] | None = stack_types.COUNTERS) -> waiting_stacks.Main:
    """Read a process as soon as it rests."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return waiting_stacks.main_thread(pid, wanted)
        except waiting_stacks.Unclear:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _by_py_spy(pid: int) -> stack_types.Thread:
    tool = str(Path(sys.executable).with_name("py-spy"))
    command = [tool, "dump", "--nonblocking", "--json", "--locals", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return stack_types.read_threads(json.loads(done.stdout), {})[0]


IN_A_MODULE = """
import time
names, late, flag, size = {}, None, True, 2 ** 70
exec("\\n".join(f"unused_{n} = {n}" for n in range(300)))
del unused_7
for epoch in range(3):
    for step in range(100000 + epoch):
        pass
print("ready", flush=True)
time.sleep(600)
"""


@each("python", _pythons())
def test_counters_of_a_module_are_read(python: str) -> None:
    process = subprocess.Popen([python, "-u", "-c", IN_A_MODULE], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        if _version(python) in ("3.11", "3.12", "3.13"):
            (frame,) = _read(process.pid).frames
            assert (frame.function, dict(frame.whole_numbers)) == ("<module>", {"epoch": 2, "step": 100001})
    finally:
        process.kill()
        process.communicate()


@each("python", _pythons())
def test_it_is_what_py_spy_reads(python: str) -> None:
    with _running("sleeps", python) as (pid, _):
        if _version(python) not in _KNOWN:
            with pytest.raises(waiting_stacks.Unclear):
                waiting_stacks.main_thread(pid)
            return
        main = _read(pid)
        theirs = _by_py_spy(pid)
        assert [(one.function, one.file, one.line) for one in main.frames] == [
            (one.function, one.file, one.line) for one in theirs.frames
        ]
        assert main.frames[0].function == "last.<locals>.é_ü日本"
        numbers = [(one.function, *pair) for one in main.frames for pair in one.whole_numbers]
        # More than 12 digits are no count.
        reported = [(one.function, one.name, one.value) for one in reversed(theirs.counters)]
        assert sorted(one for one in numbers if one[2] < 10**12) == sorted(reported)
        assert {
            ("within", "batch", -5),
            ("within", "it", 7),
            ("last", "batch_idx", 2**30 - 1),
            ("last", "local_step", 2**30),
        } <= {*numbers}
        assert main.gil_holder is None


def test_only_what_is_asked_for_is_read_of_the_locals() -> None:
    with _running("sleeps") as (pid, _):
        assert not any(one.whole_numbers for one in _read(pid, wanted=None).frames)
        names = {name for one in _read(pid).frames for name, _ in one.whole_numbers}
        assert names == {"step", "epoch", "batch", "it", "idx", "i", "micro", "batch_idx", "local_step"}


def test_a_stopped_process_is_read_and_stays_stopped() -> None:
    with _running("sleeps") as (pid, _):
        frames = _read(pid).frames
        os.kill(pid, signal.SIGSTOP)
        wait_for_state(pid, "T")
        assert _read(pid).frames == frames
        wait_for_state(pid, "T")


def test_of_one_that_runs_only_what_two_readings_agree_on_is_told() -> None:
    with _running("runs") as (pid, _):
        for _ in range(20):
            frames = _read(pid).frames
            assert [one.function for one in frames] == ["run", "<module>"]


def test_one_that_goes_on_is_read_whole_or_not_at_all() -> None:
    """Its frames and the numbers in them belong together, whenever it is looked at."""
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    unclear = 0
    with _running("alternates") as (pid, _):
        deadline = time.monotonic() + 60
        while sum(map(len, seen.values())) < 4 or unclear < 20:
            assert time.monotonic() < deadline, (seen, unclear)
            try:
                main = waiting_stacks.main_thread(pid, stack_types.COUNTERS)
            except waiting_stacks.Unclear:
                unclear += 1
                continue
            numbers = {value for one in main.frames for _, value in one.whole_numbers}
            names = [one.function for one in main.frames][-5:]
            assert names[-2:] == ["alternate", "<module>"], main
            inner = names[:-2][::-1]
            if not inner:  # it runs, between two calls or before the first step
                continue
            assert len(numbers) == 1, main
            first = "one" if numbers.pop() % 2 else "other"
            assert inner in ([first], [first, f"{first}_within"]), main
            seen[first == "one"].update(inner)


def test_more_frames_than_anybody_reads_are_left_to_others() -> None:
    with _running("recurses") as (pid, _):
        for _ in range(10):
            with pytest.raises(waiting_stacks.Unclear):
                waiting_stacks.main_thread(pid, stack_types.COUNTERS)


def test_who_holds_the_interpreter() -> None:
    with _running("behind") as (pid, holder):
        deadline = time.monotonic() + 10
        while (main := _read(pid)).gil_holder is None:
            assert time.monotonic() < deadline
        assert main.gil_holder == int(holder) != pid
        assert [one.function for one in main.frames][-2:] == ["behind", "<module>"]


def test_what_is_no_python_or_in_another_pid_namespace_is_left_to_others() -> None:
    need("unshare", "sleep")
    with subprocess.Popen(["sleep", "600"]) as process:
        with pytest.raises(waiting_stacks.Unclear):
            waiting_stacks.main_thread(process.pid)
        process.kill()
    with pytest.raises(waiting_stacks.Unclear):
        waiting_stacks.main_thread(2**22 + 1)
    # Its threads have other numbers in there; unshare waits outside of it.
    inside = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-u", _PROGRAM, "sleeps"]
    with subprocess.Popen(inside, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        wait_for_state(child, "S")
        with pytest.raises(waiting_stacks.Unclear):
            waiting_stacks.main_thread(child)
        process.kill()


def test_a_file_that_exports_nothing_or_is_cut_off(tmp_path: Path) -> None:
    whole = waiting_stacks.exported_symbols(sys.executable, ["no_such_symbol"])
    assert whole == {}
    with open(os.path.realpath(sys.executable), "rb") as file:
        head = file.read(3000)
    broken = tmp_path / "broken"
    for size in (0, 10, 64, 200, 3000):
        broken.write_bytes(head[:size])
        with pytest.raises((ValueError, elf.Malformed, struct.error)):
            waiting_stacks.exported_symbols(str(broken), ["_PyRuntime"])


def test_exported_symbols_are_where_readelf_sees_them() -> None:
    need("readelf")
    library = next(
        (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libpython3" in line),
        os.path.realpath(sys.executable),
    )
    names = ["_PyRuntime", "Py_Version", "PyCode_Type", "PyUnicode_Type"]
    listed = subprocess.run(["readelf", "-Ws", "--dyn-syms", library], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    theirs = {row[7]: int(row[1], 16) for row in rows if len(row) == 8 and row[7] in names}
    headers = subprocess.run(["readelf", "-Wl", library], capture_output=True, text=True, check=True).stdout
    first = next(int(line.split()[2], 16) for line in headers.splitlines() if line.split()[:1] == ["LOAD"])
    assert waiting_stacks.exported_symbols(library, names) == {name: value - first for name, value in theirs.items()}
    assert len(theirs) == len(names)
