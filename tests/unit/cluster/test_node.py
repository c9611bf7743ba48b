"""The node side on its own: framing, deadlines, groups, identity, the greeting at the rendezvous."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from loops import each
from support import wait_until

from distdiag.agent import boot, rendezvous, wire
from distdiag.cluster import bootstrap, bundle
from distdiag.facts import machine, programs
from distdiag.facts.network import listeners
from distdiag.facts.network.sockets import TcpTables
from distdiag.facts.process import procs
from distdiag.facts.process.rank_identity import Identity, identify
from distdiag.facts.stacks import py_spy

if TYPE_CHECKING:
    from pathlib import Path


def test_records_are_found_among_noise_however_the_bytes_are_cut() -> None:
    stream = b'Welcome!\n\x1eDD1 {"kind": "a", "n": 1}\nprompt$ \x1eDD1 {"kind": "b"}\n\x1eDD1 broken\n'
    for size in (1, 3, 7, len(stream)):
        reader = wire.Reader()
        records = [
            record for start in range(0, len(stream), size) for record in reader.feed(stream[start : start + size])
        ]
        assert records == [b'{"kind": "a", "n": 1}', b'{"kind": "b"}', b"broken"]
        assert reader.noise == b"Welcome!\n"


def test_endless_output_without_a_line_end_is_dropped_in_bounded_memory() -> None:
    reader = wire.Reader()
    for _ in range(12):
        assert list(reader.feed(b"x" * 2**20)) == []
    assert list(reader.feed(b'\n\x1eDD1 {"kind": "after"}\n')) == [b'{"kind": "after"}']
    assert len(reader.noise) <= wire.MAX_NOISE_BYTES


def test_a_line_that_grows_in_small_pieces_costs_time_in_proportion() -> None:
    reader = wire.Reader()
    began = time.thread_time()
    for _ in range(4000):
        assert list(reader.feed(b"x" * 1000)) == []
    assert time.thread_time() - began < 0.3, "copying it each time took 2 s"


def first_number(process: subprocess.Popen[bytes]) -> int:
    """Read the line with which a program reports readiness."""
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_run_ends_a_program_with_all_its_children_at_the_deadline() -> None:
    process = programs.start(["sh", "-c", "sleep 60 & echo $!; sleep 60"])
    child = first_number(process)
    began = time.monotonic()
    done = programs.collect_output(process, timeout_s=0.3)
    assert time.monotonic() - began < 10
    assert (done.timed_out, done.status) == (True, -signal.SIGKILL)
    wait_until(lambda: machine.process_state(child).letter in ("", "Z"), 10, lambda: f"{child} lives")


def test_run_is_not_held_up_by_a_grandchild_that_keeps_the_pipe() -> None:
    # In one write: the text after the number is complete when the number is.
    process = programs.start(["sh", "-c", r"setsid sleep 60 & printf '%s\nstarted\n' $!"])
    grandchild = first_number(process)
    try:
        began = time.monotonic()
        done = programs.collect_output(process, timeout_s=0.5)
        assert time.monotonic() - began < 10
        assert done.stdout == b"started\n"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(grandchild, signal.SIGKILL)


def test_a_missing_program_is_said() -> None:
    with pytest.raises(programs.CannotRun, match="no-such-tool"):
        programs.run(["/no/such/no-such-tool"], timeout_s=1)


@each(
    "environ, expected",
    [
        ({}, None),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # the batch script is no rank
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            Identity("torchrun", 3, 4, 1, 2),
        ),
        (
            {
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "4",
                "SLURM_NTASKS": "9",
                "SLURM_STEP_NUM_TASKS": "5",
                "SLURM_LOCALID": "0",
                "SLURM_NODEID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
                "PMI_RANK": "4",
                "PMI_SIZE": "5",
            },
            Identity("srun", 4, 5, 0, 1),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "OMPI_COMM_WORLD_NODE_RANK": "1",
                "SLURM_STEP_ID": "0",
                "SLURM_PROCID": "0",
            },
            Identity("Open MPI", 1, 2, 1, 2),
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
            Identity("MPICH", 0, 2, 0, 2),
        ),
        ({"RANK": "1", "WORLD_SIZE": "8"}, Identity("environment", 1, 8, None, None)),
        ({"RANK": "one", "WORLD_SIZE": "8"}, None),
    ],
)
def test_who_am_i(environ: dict[str, str], expected: Identity | None) -> None:
    assert identify(environ) == expected


def greeted(nonce_of_others: str) -> list[BaseException | None]:
    """Let rank 0 of three receive two others; give how each of them fared."""
    listener = rendezvous.listen(0)
    port = listener.getsockname()[1]
    outcomes: list[BaseException | None] = [None, None, None]

    def other(rank: int) -> None:
        try:
            rendezvous.greet("127.0.0.1", port, nonce_of_others, rank)
        except (rendezvous.ForeignServer, ConnectionError) as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=other, args=(rank,), daemon=True) for rank in (1, 2)]
    host = threading.Thread(target=rendezvous.receive, args=(listener, "nonce", 3), daemon=True)
    for thread in (*threads, host):
        thread.start()
    with socket.create_connection(("127.0.0.1", port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.0\r\n\r\n")  # a stranger on our port does not disturb
        for thread in threads:
            thread.join(5)
    if nonce_of_others != "nonce":
        # Rank 0 still waits for its own two; they come now, so that it ends.
        late = [threading.Thread(target=rendezvous.greet, args=("127.0.0.1", port, "nonce", rank)) for rank in (1, 2)]
        for thread in late:
            thread.start()
        for thread in late:
            thread.join(5)
    host.join(5)
    assert not host.is_alive()
    listener.close()
    return outcomes


def test_ranks_with_the_nonce_meet() -> None:
    assert greeted("nonce") == [None, None, None]


def test_ranks_of_another_run_are_not_let_in() -> None:
    _, one, two = greeted("another")
    assert isinstance(one, rendezvous.ForeignServer)
    assert isinstance(two, rendezvous.ForeignServer)


def test_the_holder_of_a_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        holder = listeners.port_holder(server.getsockname()[1])
    assert holder is not None
    assert (holder.listening, holder.pid) == (True, os.getpid())


def test_who_listens_or_is_connected_at_a_port_has_a_connection_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port, free = server.getsockname()[1], other.getsockname()[1]
        other.close()
        tables = TcpTables()
        assert procs.has_connection(os.getpid(), {port, free}, tables)
        assert not procs.has_connection(os.getpid(), {free}, tables)
        child = programs.start(
            [sys.executable, "-c", f"import socket as s; c = s.create_connection(('127.0.0.1', {port})); input()"]
        )
        try:
            server.accept()[0].close()
            assert procs.has_connection(child.pid, {port}, TcpTables())
        finally:
            programs.end_group(child)
    assert not procs.has_connection(child.pid, {port}, TcpTables())


def test_the_sockets_of_a_network_namespace_are_read_once() -> None:
    tables = TcpTables()
    with socket.create_server(("127.0.0.1", 0)) as first:
        assert f"127.0.0.1:{first.getsockname()[1]}" in [each.local for each in tables.sockets(os.getpid())]
        with socket.create_server(("127.0.0.1", 0)) as second:
            assert f"127.0.0.1:{second.getsockname()[1]}" not in [each.local for each in tables.sockets(os.getpid())]


OPENS_ACROSS_PAGES = """
import ctypes, mmap, sys
size, path = 2 * mmap.PAGESIZE, sys.argv[1].encode() + bytes(1)
memory = mmap.mmap(-1, size)
place = mmap.PAGESIZE - len(path) // 2 if sys.argv[2] == "across" else size - len(path)
memory[place : place + len(path)] = path
ctypes.CDLL(None).open(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + place), 0)
"""


@pytest.mark.parametrize("where", ["across", "at the end"])
def test_the_path_that_a_process_opens_is_read_whole_wherever_it_lies(tmp_path: Path, where: str) -> None:
    fifo = str(tmp_path / "a-file-that-nobody-writes")
    os.mkfifo(fifo)
    process = subprocess.Popen([sys.executable, "-c", OPENS_ACROSS_PAGES, fifo, where])
    try:
        wait_until(lambda: procs.standstill(process.pid, process.pid, {}).path == fifo, 20, lambda: "no path")
    finally:
        process.kill()
        process.wait(10)


def test_a_stack_is_read_and_the_process_left_as_it_was() -> None:
    script = "import sys, time\ndef wait_for_data():\n  print('ready', flush=True)\n  time.sleep(60)\nwait_for_data()"
    process = programs.start([sys.executable, "-c", script])
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: machine.process_state(process.pid).letter == "T", 5, lambda: "it does not stop")
        stack = py_spy.main_stacks([process.pid], timeout_s=5)[process.pid]
        assert stack.frames[0].startswith("wait_for_data"), stack
        assert machine.process_state(process.pid).letter == "T"
    finally:
        programs.end_group(process)


def test_a_process_that_is_gone_has_a_reason_instead_of_a_stack() -> None:
    process = programs.start(["true"])
    process.wait(5)
    stack = py_spy.main_stacks([process.pid], timeout_s=5)[process.pid]
    programs.end_group(process)
    assert stack.frames == ()
    assert stack.error


def _pythons() -> list[str]:
    """List every Python from 3.9 on, ours first: what travels to a node has to run on it.

    A name on PATH may be a shim for an uninstalled Python, as with pyenv; the interpreter itself is then used.
    """
    found = {}
    for minor in range(9, 20):
        installed = glob.glob(os.path.expanduser(f"~/.pyenv/versions/3.{minor}.*/bin/python3.{minor}"))
        on_path = shutil.which(f"python3.{minor}")
        for program in [*([on_path] if on_path else []), *sorted(installed)]:
            if subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0:
                found[minor] = program
                break
    return [sys.executable, *found.values()]


def _order(collect: str) -> dict[str, Any]:
    return {"collect": collect, "ask": {"gpus": True}, "env": {}, "silence_s": None, "untrusted": False}


def test_the_node_side_runs_where_nothing_is_installed(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('a stray file of the working directory')")
    for python in _pythons():
        assert_node_side_runs(python, tmp_path)


def assert_node_side_runs(python: str, tmp_path: Path) -> None:
    collect = "distdiag.launch.collect"
    payload = boot.pack(bundle.sources(bundle.AGENT, collect), bundle.AGENT, _order(collect))
    agent = subprocess.Popen(
        [python, "-S", "-c", bootstrap.AGENT_START, str(len(payload)), "distdiag-agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write(payload)
    agent.stdin.flush()
    reader = wire.Reader()
    records: list[dict[str, Any]] = []
    while len(records) < 3 and (line := agent.stdout.readline()):
        records.extend(json.loads(frame) for frame in reader.feed(line))
    _, complaint = agent.communicate(timeout=30)
    assert (agent.returncode, complaint) == (0, b""), python
    ready, hello, record = records
    assert [ready["kind"], hello["kind"], record["kind"]] == ["ready", "hello", "facts"]
    assert record["facts"]["host"]
