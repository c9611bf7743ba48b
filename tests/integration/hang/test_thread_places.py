"""Where a thread is: really spinning, yielding and sleeping threads in libraries named as the vendors' are."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jobs import wait_for_state
from support import need, wait_until
from support_warm import run_script

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAMS = Path(__file__).parents[2] / "programs"
NO_PERF, NOTHING = "perf_event_open", "perf_event_open,ptrace"
WAITS = r"""
#define _GNU_SOURCE
#include <sched.h>
#include <poll.h>
#include <unistd.h>
static volatile long n;
static __attribute__((noinline)) void inner(int how) {
    for (;;) {
        n++;
        if (how == 1) sched_yield();
        if (how == 2) usleep(1000);
        if (how == 3) poll(0, 0, 10);
        if (how == 4) poll(0, 0, -1);
    }
}
int NAME(int how) { inner(how); return n; }
int quick(void) { return ++n; }
"""
CALLER = r"""
extern int quick(void);
static volatile double sum;
int busy(int how) { for (;;) { quick(); for (int i = 0; i < 1000000; i++) sum += i; } }
"""
UNHARMED = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
static volatile int over, interrupted;
static volatile long signals, chunks, wrong;
static void count(int number) { signals++; }
static void *sleeps(void *unused) {
    struct timespec ten_ms = {0, 10000000};
    while (!over) if (nanosleep(&ten_ms, 0)) interrupted++;
    return 0;
}
static void *reads(void *unused) {
    char byte;
    while (read(0, &byte, 1) != 1) interrupted++;
    over = 1;
    return 0;
}
static __attribute__((noinline)) double sum(void) {
    double found = 0;
    for (int i = 1; i < 200000; i++) found += 1.0 / i;
    return found;
}
int cuStreamSynchronize(int how) {
    pthread_t threads[2];
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = count;
    sigset_t only;
    sigemptyset(&only);
    sigaddset(&only, SIGRTMIN);
    sigaction(SIGRTMIN, &action, 0);
    pthread_sigmask(SIG_BLOCK, &only, 0); /* signals are for the spinning thread alone */
    pthread_create(&threads[0], 0, sleeps, 0);
    pthread_create(&threads[1], 0, reads, 0);
    pthread_sigmask(SIG_UNBLOCK, &only, 0);
    double first = sum();
    puts("spinning");
    fflush(stdout);
    for (; !over; chunks++) { double again = sum(); if (memcmp(&again, &first, sizeof first)) wrong++; }
    for (int i = 0; i < 2; i++) pthread_join(threads[i], 0);
    printf("{\"wrong\": %ld, \"interrupted\": %d, ", wrong, interrupted);
    printf("\"signals\": %ld, \"chunks\": %ld}\n", signals, chunks);
    fflush(stdout);
    return 0;
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("gcc")
    folder = tmp_path_factory.mktemp("lib")
    _compile(folder / "libcuda.so.1", WAITS, "-DNAME=cuStreamSynchronize", "-Wl,-soname,libcuda.so.1")
    _compile(folder / "libnccl.so.2", WAITS, "-DNAME=ncclCommInitRank")
    # A library without any table of its frames, as hand-written code has none.
    bare = ("-DNAME=cuCtxSynchronize", "-fno-asynchronous-unwind-tables", "-fomit-frame-pointer")
    _compile(folder / "libcuda.so.2", WAITS, *bare)
    _compile(folder / "libbusy.so", CALLER, str(folder / "libcuda.so.1"), "-Wl,-rpath,$ORIGIN")
    (folder / "unharmed").mkdir()
    _compile(folder / "unharmed" / "libcuda.so.1", UNHARMED, "-pthread")
    return folder


def _compile(path: Path, source: str, *options: str) -> None:
    code = path.with_name(path.name + ".c")
    code.write_text(source)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(path), str(code), *options], check=True, timeout=60)


@contextlib.contextmanager
def _waiting(*words: str) -> Iterator[int]:
    command = [sys.executable, str(PROGRAMS / "waits_in_library.py"), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def _reader(forbidden: str, times: int, *pids: int) -> list[str]:
    return [sys.executable, str(PROGRAMS / "reads_places.py"), forbidden, str(times), *map(str, pids)]


def _read(pid: int, forbidden: str = "", times: int = 1) -> list[dict[str, Any]]:
    """Read one process; gives its threads as of the last of the readings."""
    done = run_script(_reader(forbidden, times, pid), os.environ, 110)
    assert done.returncode == 0, done.stderr
    threads: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])[0]["threads"]
    return threads


def _settled(pid: int, library: str, forbidden: str = "", thread: int = 0) -> dict[str, Any]:
    """Read until the thread is in this library in all samples: it said "ready" just before the call."""
    last: list[dict[str, Any]] = []

    def is_there() -> bool:
        last[:] = _read(pid, forbidden)
        return thread < len(last) and [name for name, _ in last[thread]["inner"]] == [library]

    wait_until(is_there, 60, lambda: f"not in {library}: {last}")
    return last[thread]


@pytest.mark.parametrize("how", ["0", "1"], ids=["spins", "yields"])
@pytest.mark.parametrize(("forbidden", "method"), [("", "perf"), (NO_PERF, "ptrace")])
def test_a_running_thread_is_in_the_library_that_spins(libraries: Path, how: str, forbidden: str, method: str) -> None:
    with _waiting(str(libraries / "libcuda.so.1"), "cuStreamSynchronize", how) as pid:
        found = _settled(pid, "libcuda.so.1", forbidden)
        assert (found["tid"], found["state"], found["method"]) == (pid, "R", method)
        assert found["calls"] == ["cuStreamSynchronize"]
        assert "libcuda.so.1" in found["libraries"][:2]
        assert not found["why"]


@pytest.mark.parametrize("how", ["2", "3", "4"], ids=["usleep", "short poll", "endless poll"])
def test_a_sleeping_thread_is_in_the_library_that_called_libc(libraries: Path, how: str) -> None:
    with _waiting(str(libraries / "libnccl.so.2"), "ncclCommInitRank", how) as pid:
        found = _settled(pid, "libnccl.so.2", NOTHING)
        assert (found["method"], found["calls"]) == ("syscall", ["ncclCommInitRank"])
        assert found["libraries"][:2] == ["libc.so.6", "libnccl.so.2"]


@pytest.mark.parametrize("how", ["0", "1", "2"])
def test_a_library_without_tables_of_its_frames_is_scanned(libraries: Path, how: str) -> None:
    with _waiting(str(libraries / "libcuda.so.2"), "cuCtxSynchronize", how) as pid:
        assert _settled(pid, "libcuda.so.2")["calls"] == ["cuCtxSynchronize"]


def test_the_backward_thread_is_read_beside_the_main_thread(libraries: Path) -> None:
    with _waiting(str(libraries / "libcuda.so.1"), "cuStreamSynchronize", "0", "pt_autograd_0") as pid:
        found = _settled(pid, "libcuda.so.1", thread=1)
        assert (found["comm"], found["method"]) == ("pt_autograd_0", "perf")
        main = _read(pid)[0]
        assert (main["tid"], main["state"], main["method"]) == (pid, "S", "syscall")
        assert "libcuda.so.1" not in main["libraries"]


def test_a_loop_in_python_is_in_the_interpreter() -> None:
    with _waiting("python", "", "0") as pid:
        threads: list[dict[str, Any]] = []

        def is_read() -> bool:
            threads[:] = _read(pid)
            return bool(threads[0]["method"] == "perf")

        wait_until(is_read, 60, lambda: str(threads))
        assert threads[0]["inner"][0][0].startswith(("libpython3", "python3"))
        assert threads[0]["calls"] == []


def test_a_caller_that_is_busy_itself_is_not_in_the_library_it_called(libraries: Path) -> None:
    with _waiting(str(libraries / "libbusy.so"), "busy", "0") as pid:
        found = _settled(pid, "libbusy.so")
        assert "libcuda.so.1" not in found["libraries"]
        assert found["calls"] == []


def test_where_nothing_is_permitted_it_is_said_why(libraries: Path) -> None:
    with _waiting(str(libraries / "libcuda.so.1"), "cuStreamSynchronize", "0") as pid:
        last: list[dict[str, Any]] = []

        def is_refused() -> bool:
            last[:] = _read(pid, NOTHING)
            return bool(last[0]["why"] == "perf_event_open and ptrace are forbidden (seccomp)")

        wait_until(is_refused, 60, lambda: str(last))
        assert (last[0]["method"], last[0]["samples"]) == ("", 0)
        assert "PERFMON" in last[0]["hint"]


def test_a_process_that_is_gone_has_no_threads() -> None:
    assert _read(2**22 + 1) == []


@contextlib.contextmanager
def _unharmed(libraries: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a program that spins, sleeps and reads, and counts what disturbs it."""
    words = [str(libraries / "unharmed" / "libcuda.so.1"), "cuStreamSynchronize", "0"]
    command = [sys.executable, str(PROGRAMS / "waits_in_library.py"), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "spinning\n"]
            yield process
        finally:
            process.kill()


def _end(process: subprocess.Popen[str]) -> dict[str, int]:
    out, _ = process.communicate("x", timeout=60)
    counts: dict[str, int] = json.loads(out)
    assert process.returncode == 0
    assert counts["chunks"] > 0
    return counts


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("forbidden", ["", NO_PERF, NOTHING], ids=["perf", "ptrace", "syscall"])
def test_twenty_readings_leave_a_program_as_it_was(libraries: Path, forbidden: str) -> None:
    with _unharmed(libraries) as process:
        pid = process.pid
        before = _status(pid)
        read = _read(pid, forbidden, 20)
        assert read[0]["state"] == "R"
        wait_until(lambda: _status(pid)["TracerPid"] == "0", 10, lambda: str(_status(pid)))
        after = _status(pid)
        for name in ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "Threads"):
            assert after[name] == before[name]
        assert after["State"].startswith("R")
        counts = _end(process)
        assert (counts["wrong"], counts["interrupted"], counts["signals"]) == (0, 0, 0)


def test_signals_that_arrive_during_a_stop_are_all_delivered(libraries: Path) -> None:
    with (
        _unharmed(libraries) as process,
        subprocess.Popen(_reader(NO_PERF, 15, process.pid), stdout=subprocess.PIPE, text=True) as reader,
    ):
        sent = 0
        while reader.poll() is None and sent < 20_000:
            os.kill(process.pid, signal.SIGRTMIN)  # these queue up: each counts
            sent += 1
            with contextlib.suppress(subprocess.TimeoutExpired):
                reader.wait(0.0002)
        out, _ = reader.communicate(timeout=60)
        assert '"method": "ptrace"' in out
        wait_until(lambda: int(_status(process.pid)["SigPnd"], 16) == 0, 30, lambda: "signals are pending")
        counts = _end(process)
        assert (counts["wrong"], counts["interrupted"], counts["signals"]) == (0, 0, sent)


def test_a_program_that_is_stopped_meanwhile_stays_stopped_until_it_is_continued(libraries: Path) -> None:
    with (
        _unharmed(libraries) as process,
        subprocess.Popen(_reader(NO_PERF, 15, process.pid), stdout=subprocess.PIPE, text=True) as reader,
    ):
        while reader.poll() is None:
            os.kill(process.pid, signal.SIGSTOP)
            wait_for_state(process.pid, "T")
            os.kill(process.pid, signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                reader.wait(0.02)
        reader.communicate(timeout=60)
        os.kill(process.pid, signal.SIGSTOP)
        wait_for_state(process.pid, "T")
        assert _read(process.pid, NO_PERF)[0]["state"] == "T"
        assert _status(process.pid)["State"].startswith("T")
        os.kill(process.pid, signal.SIGCONT)
        assert _end(process)["wrong"] == 0


def test_a_reader_that_is_killed_leaves_the_program_running(libraries: Path) -> None:
    with _unharmed(libraries) as process:
        for _ in range(5):
            with subprocess.Popen(_reader(NO_PERF, 1000, process.pid), stdout=subprocess.PIPE, text=True) as reader:
                assert reader.stdout is not None
                while '"method": "ptrace"' not in reader.stdout.readline():
                    assert reader.poll() is None
                reader.kill()
        wait_until(lambda: _status(process.pid)["TracerPid"] == "0", 10, lambda: str(_status(process.pid)))
        counts = _end(process)
        assert (counts["wrong"], counts["interrupted"], counts["signals"]) == (0, 0, 0)
