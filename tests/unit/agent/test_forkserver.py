"""Forked ranks: private environments and descriptors; on any trouble ranks start separately."""

from __future__ import annotations

import os
import select
import signal
import time
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

from distdiag.agent.forkserver import Forkserver
from distdiag.cluster import bundle
from distdiag.facts import programs

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRY = "tells_who_it_is"
SOURCE = """
import gc, os, sys
def main(config):
    told = config["rank"], os.environ["RANK"], os.getppid(), "GONE" in os.environ, gc.isenabled()
    os.write(config["events_fd"], " ".join(map(str, told)).encode())
    print("printed", flush=True)
    if config["rank"] == 1:
        raise ValueError("one is bad")
    sys.stdin.read()
    os._exit(7)
"""


@pytest.fixture
def servers() -> Iterator[list[Forkserver]]:
    made: list[Forkserver] = []
    yield made
    for one in made:
        one.end()
    programs._prctl(36, 0)  # PR_SET_CHILD_SUBREAPER: other tests' orphans are not ours


def start(servers: list[Forkserver], *modules: str, source: str = SOURCE) -> Forkserver:
    sources = {**bundle.sources("distdiag.agent.forkserver"), ENTRY: source}
    servers.append(Forkserver(sources, [*modules, ENTRY], {**os.environ, "GONE": "1"}))
    deadline = time.monotonic() + 20
    while not (servers[-1].ready or servers[-1].failed) and time.monotonic() < deadline:
        select.select(servers[-1].descriptors(), [], [], 1)
        servers[-1].poll()
    return servers[-1]


def fork(server: Forkserver, rank: int) -> tuple[programs.Adopted, int]:
    stdin, output, events = os.pipe(), os.pipe(), os.pipe()
    env = {name: value for name, value in os.environ.items() if name != "GONE"} | {"RANK": str(rank)}
    pid = server.fork({"env": env, "entry": ENTRY, "config": {"rank": rank}}, [stdin[0], output[1], events[1]])
    assert pid is not None
    for fd in (stdin[0], output[1], events[1]):
        os.close(fd)
    return programs.Adopted(pid, stdin[1], output[0]), events[0]


def test_each_is_our_child_with_its_own_variables_and_status(servers: list[Forkserver]) -> None:
    server = start(servers, "json")
    assert server.ready
    (zero, events), (one, others) = fork(server, 0), fork(server, 1)
    assert os.read(events, 100).decode() == f"0 0 {os.getpid()} False True"
    assert os.read(others, 100).decode() == f"1 1 {os.getpid()} False True"
    server.end()
    assert zero.poll() is None, "a rank lives on without who made it"
    zero.stdin.close()
    assert (zero.wait(5), one.wait(5)) == (7, 1)
    assert zero.stdout.read() == b"printed\n"
    assert b"ValueError: one is bad" in one.stdout.read()
    for process, fd in ((zero, events), (one, others)):
        programs.end_group(process)
        os.close(fd)


def test_a_signal_is_told_as_popen_tells_it_and_the_group_can_be_ended(servers: list[Forkserver]) -> None:
    process, events = fork(start(servers), 0)
    os.kill(process.pid, signal.SIGSTOP)
    assert os.getpgid(process.pid) == process.pid
    assert programs.end_group(process) == -signal.SIGKILL
    os.close(events)


@pytest.mark.parametrize(
    ("modules", "source"),
    [
        (("no_such_module",), SOURCE),
        ((), "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        ((), "import threading; threading.Thread(target=input, daemon=True).start()"),
        ((), "raise SystemExit"),
    ],
    ids=["import error", "crash", "a thread", "exit"],
)
def test_what_cannot_be_forked_says_so(servers: list[Forkserver], modules: tuple[str, ...], source: str) -> None:
    server = start(servers, *modules, source=source)
    assert server.failed
    assert server.descriptors() == []


def test_a_server_that_dies_later_forks_nobody(servers: list[Forkserver]) -> None:
    server = start(servers)
    os.kill(server.process.pid, signal.SIGKILL)
    assert server.fork({"env": {}, "entry": ENTRY, "config": {}}, []) is None
    assert server.failed


def test_what_is_imported_once_can_be_imported() -> None:
    from distdiag.launch.rank_runs import IMPORTED_ONCE

    for name in IMPORTED_ONCE["modules"]:
        assert import_module(name)
