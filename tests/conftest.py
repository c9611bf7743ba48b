"""Shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobs import close_servers
from support import close_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.terminal import TerminalReporter

# Tests import torch whole; only the programs that they start do with less of it (at_start.py).
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "distdiag_tests"]
gc.disable()  # until all tests are imported: imports make no garbage, and to look for it takes a third of their time

# A shell's background job and nohup ignore these, and so would every process started and then signalled by a test.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ.pop("PYTHONUNBUFFERED", None)  # with it, `print` writes a line in pieces, between those of other ranks
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the threads that numpy starts are a tenth of an import of torch
os.environ.setdefault("DISTDIAG_TESTS_RUN", str(os.getpid()))  # in all workers the process that started these

# The kubectl fetched by `make test` precedes the system's, which may be too old for the tests.
os.environ["PATH"] = f"{sys.prefix}/kubectl:{os.environ['PATH']}"


@pytest.fixture(autouse=True)
def _a_timed_test_goes_first(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give a test marked `timed`, and what it starts, a priority at which the load of other tests hardly counts."""
    if request.node.get_closest_marker("timed") is None or os.geteuid():
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, -15)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, 0)


@pytest.fixture
def one_thread_of_torch() -> Iterator[None]:
    """Small operations on several threads wait for the slowest, which takes long on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_test_leaves_what_it_started() -> Iterator[None]:
    yield
    close_all()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Let garbage of the tests be collected, without a look at what was imported."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    close_servers()


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Append the reason of each skipped test to the file that `make test` counts in its last line."""
    path = os.environ.get("DISTDIAG_TESTS_SKIPPED")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        skipped = terminalreporter.stats.get("skipped", [])
        with Path(path).open("a") as file:
            file.writelines(f"{report.longrepr[2].removeprefix('Skipped: ')}\n" for report in skipped)
