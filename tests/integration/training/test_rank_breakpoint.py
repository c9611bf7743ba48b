"""distdiag.breakpoint on real gloo ranks: one is debugged on a terminal or by a socket, and the others never hang."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Any, ClassVar

import pexpect
import pexpect.fdpexpect
import pytest
from jobs import PROGRAMS, free_port
from support import need_root, wait_until

from distdiag.facts.process import procs
from distdiag.training.breakpoint import debug_barrier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PROGRAM = str(PROGRAMS / "stops_in_debugger.py")
PROMPT = r"\(Pdb\) "
NEXT = ["n"] * (2 if sys.version_info >= (3, 13) else 1)
"""Over the line after breakpoint(): since 3.13 pdb stops in the line of the call."""
SOON_S = 30  # other limits are 60 s and more
PLAIN = """
from distdiag import breakpoint
def double(number):
    breakpoint({options})
    doubled = number * 2
    return doubled
print("made", double(21))
"""


def line_of(text: str) -> int:
    with open(PROGRAM, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


STEPS_AT = f"{PROGRAM}:{line_of('on_quit=JOB')}"


class Ranks:
    """A job at a terminal."""

    def __init__(self, terminal: Any) -> None:  # noqa: ANN401 - pexpect has no types
        self.terminal = terminal
        self.said = ""

    def until(self, what: object) -> str:
        """Wait for a text, give what came before it."""
        self.terminal.expect(what, timeout=60)
        before = str(self.terminal.before)
        self.said += before + (self.terminal.after if isinstance(self.terminal.after, str) else "")
        return before

    def at_prompt(self) -> str:
        return self.until(PROMPT)

    def command(self, text: str) -> None:
        self.at_prompt()
        self.terminal.sendline(text)

    def pid(self, rank: int) -> int:
        line = rf":{rank}\] pid (\d+)\s"
        if re.search(line, self.said) is None:
            self.until(line)  # the ranks write in any order
        return int(re.findall(line, self.said)[0])

    def end(self) -> str:
        self.until(pexpect.EOF)
        return self.said

    def own(self, rank: int) -> list[str]:
        """List the lines that a rank said."""
        return [line.strip() for line in re.findall(rf"\[[\w-]+:{rank}\] (.*)", self.said)]

    def stop(self) -> None:
        job = re.search(r"job (\d+)", self.said)
        if job is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(job[1]), signal.SIGKILL)
        self.terminal.close()


@pytest.fixture(scope="module")
def torch_at_hand() -> Iterator[IO[str]]:
    """A process that has imported torch, and forks jobs."""
    with subprocess.Popen(
        [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.stdin
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture
def ranks(tmp_path: Path, torch_at_hand: IO[str]) -> Iterator[Callable[..., Ranks]]:
    started = []

    def start(*what: str, size: int = 2, **other: object) -> Ranks:
        here, there = os.openpty()
        job = {"what": what, "size": size, "store": str(tmp_path / "store"), "terminal": os.ttyname(there)}
        defaults: dict[str, object] = {"as_terminal": True, "listen": None, "on_quit": "stop"}
        defaults.update(exits=False, env={})
        torch_at_hand.write(json.dumps({**job, **defaults, **other}) + "\n")
        torch_at_hand.flush()
        started.append(Ranks(pexpect.fdpexpect.fdspawn(here, encoding="utf-8")))
        started[-1].until(r"job \d+")
        os.close(there)  # or there would be no end
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_stepping_keeps_the_others_and_continue_lets_them_go(ranks: Callable[..., Ranks]) -> None:
    job = ranks("steps")
    assert "steps()" in job.at_prompt(), "the frame is the caller's"
    job.terminal.sendline("n")
    for command in (*NEXT[1:], "p 'secret', secret"):
        job.command(command)
    assert "'secret', 7" in job.at_prompt()
    assert not [line for line in job.own(1) if "after" in line], "rank 1 waits while rank 0 is stepped"
    job.terminal.sendline("c")
    job.end()
    for rank in (0, 1):
        assert job.own(rank)[-2:] == ["total 3.0 timeouts as before True", "ended well"]


@pytest.mark.parametrize("way", ["q", "Ctrl-D"])
def test_quitting_stops_all_with_the_place(ranks: Callable[..., Ranks], way: str) -> None:
    job = ranks("steps")
    job.at_prompt()
    began = time.monotonic()
    job.terminal.send("q\n" if way == "q" else "\x04")
    job.end()
    assert time.monotonic() - began < SOON_S
    assert job.own(0)[-1] == "ended by BdbQuit"
    assert re.match(r"ended by DebuggerQuit rank 0 \(pid \d+ on [\w-]+\) quit the debugger at ", job.own(1)[-1])
    assert STEPS_AT in job.own(1)[-1]


def test_quitting_may_let_all_go_on(ranks: Callable[..., Ranks]) -> None:
    job = ranks("steps", on_quit="continue", env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    job.command("b total")
    job.command("q")
    job.end()
    for rank in (0, 1):
        assert job.own(rank)[-2:] == ["total 3.0 timeouts as before True", "ended well"]


def test_each_place_is_skipped_by_its_own_count(ranks: Callable[..., Ranks]) -> None:
    job = ranks("quiet_twice")
    assert "quiet_twice()" in job.at_prompt()
    assert [line for line in job.own(0) if "place" in line] == [
        *("first place 0", "second place 0", "first place 1", "second place 1"),
        *("third place 0", "third place 1"),
    ]
    job.terminal.sendline("c")
    job.end()
    assert {job.own(rank)[-1] for rank in (0, 1)} == {"ended well"}


def test_released_ranks_meet_in_the_collective_and_have_their_timeouts_back(ranks: Callable[..., Ranks]) -> None:
    job = ranks("releases")
    for command in ("release", *NEXT, "p 'sum', added"):
        job.command(command)
    assert "'sum', 3.0" in job.at_prompt()
    if ":1] added" not in job.said:
        job.until(r":1\] added ")  # when rank 0 goes on, rank 1 has its timeouts back
    job.terminal.sendline("c")
    job.end()
    assert "added 3.0 with timeouts [100.0, 100.0]" in job.own(1)
    for rank in (0, 1):
        assert job.own(rank)[-2:] == ["timeouts as before True", "ended well"]


def test_a_debugger_with_breakpoints_is_left_when_the_program_ends(ranks: Callable[..., Ranks]) -> None:
    job = ranks("releases", exits=True)
    job.command("b total")
    job.command("c")
    assert "total()" in job.at_prompt()
    job.terminal.sendline("c")
    job.end()
    assert job.own(0)[-2:] == ["timeouts as before False", "ended well"]
    assert job.own(1)[-2:] == ["timeouts as before True", "ended well"]


def test_the_others_do_not_wait_for_ever(ranks: Callable[..., Ranks]) -> None:
    job = ranks("impatient")
    job.command("dist.distributed_c10d._get_default_store().set('come', '')")
    job.until("waiting for rank 0 .* to leave the debugger at .* has taken 1 s; this rank stops waiting True")
    job.terminal.sendline("c")
    assert "ended well" in job.end()


def test_a_group_of_some_ranks_keeps_no_others(ranks: Callable[..., Ranks]) -> None:
    job = ranks("some", size=3)
    job.until(r":1\] passed")
    if "(Pdb)" not in job.said:
        job.at_prompt()
    assert not [rank for rank in (0, 2) if "passed" in job.own(rank)]
    job.terminal.sendline("c")
    job.end()
    assert {job.own(rank)[-1] for rank in range(3)} == {"ended well"}


@pytest.mark.parametrize("store", ["in a file", "kept by the dead"])
def test_a_rank_killed_in_the_debugger_is_missed(ranks: Callable[..., Ranks], store: str) -> None:
    job = ranks("far_away", **({} if store == "in a file" else {"store": f"127.0.0.1:{free_port()}"}))
    job.at_prompt()
    began = time.monotonic()
    os.kill(job.pid(0), signal.SIGKILL)
    job.end()
    assert time.monotonic() - began < SOON_S
    # No answer: rank 1 has just been about to connect.
    reported = r"waiting for rank 0 .* (store is gone|no sign of life for)"
    assert re.search(f"ended by DebuggerQuit {reported}", job.own(1)[-1])


@pytest.mark.parametrize("command", ["c", "q"])
def test_the_final_state_is_read_though_its_rank_takes_the_store_with_it(
    ranks: Callable[..., Ranks], command: str
) -> None:
    job = ranks("leaves", store=f"127.0.0.1:{free_port()}", size=3, exits="atexit")
    job.command(command)
    job.end()
    last = {rank: job.own(rank)[-1] for rank in (1, 2)}
    if command == "c":
        assert set(last.values()) == {"ended well"}
    else:
        assert all(" quit the debugger at " in said for said in last.values())


def test_who_keeps_the_store_and_answers_no_more_is_missed(ranks: Callable[..., Ranks]) -> None:
    job = ranks("far_away", store=f"127.0.0.1:{free_port()}", exits=True)
    job.at_prompt()
    os.kill(job.pid(0), signal.SIGSTOP)
    job.until("ended by DebuggerQuit waiting for rank 0 .* no sign of life for 2.5 s")
    # It ends, though one of its threads still waits in the store.
    wait_until(lambda: (proc := procs.read(job.pid(1))) is None or proc.state == "Z", SOON_S, lambda: job.said)


def test_who_waits_in_the_store_for_something_else_is_not_told_that_it_is_dead(ranks: Callable[..., Ranks]) -> None:
    job = ranks("waits_elsewhere", store=f"127.0.0.1:{free_port()}")
    job.at_prompt()
    time.sleep(4)  # as a person who looks around
    job.terminal.sendline("c")
    job.end()
    assert [job.own(rank)[-1] for rank in (0, 1)] == ["ended well"] * 2


def test_nobody_waits_for_those_who_were_released_and_ended(ranks: Callable[..., Ranks]) -> None:
    job = ranks("ends_released", store=f"127.0.0.1:{free_port()}", exits="atexit")
    job.command("release")
    job.at_prompt()
    wait_until(lambda: procs.read(job.pid(1)) is None, SOON_S, lambda: job.said)
    job.terminal.sendline("c")
    assert "went on" in job.end()


def test_the_status_is_published_while_the_job_waits_in_the_store(tmp_path: Path) -> None:
    torch_distributed = pytest.importorskip("torch.distributed")
    server = torch_distributed.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    jobs = server.clone()
    holder = debug_barrier.Holder(
        jobs, "place", debug_barrier.Status("stopped", 0, "here", "n", os.getpid()), waiters=0
    )
    waits = threading.Thread(target=jobs.wait, args=(["never"],), daemon=True)
    waits.start()
    first = json.loads(server.get("place"))["beat"]
    wait_until(lambda: json.loads(server.get("place"))["beat"] > first + 1, SOON_S, lambda: "no beat")
    assert waits.is_alive()
    server.set("never", "now")
    waits.join(SOON_S)
    holder.set_state(debug_barrier.DONE)


def test_the_others_know_of_a_stop_before_its_prompt_appears() -> None:
    """Or they would wait for a rank killed at its first prompt as long as for one that has not come yet."""

    class Slow:
        kept: ClassVar[dict[str, str]] = {}

        def set(self, key: str, text: str) -> None:
            time.sleep(0.2)
            self.kept[key] = text

        def add(self, key: str, amount: int) -> int:
            return 1

    status = debug_barrier.Status("stopped", 0, "here", "n", os.getpid())
    holder = debug_barrier.Holder(Slow(), "place", status, waiters=1)
    assert json.loads(Slow.kept["place"])["state"] == "stopped"
    holder.set_state(debug_barrier.DONE)


def test_a_rank_that_cannot_be_seen_is_missed_by_its_silence(ranks: Callable[..., Ranks]) -> None:
    job = ranks("far_away")
    job.at_prompt()
    os.kill(job.pid(0), signal.SIGSTOP)
    job.until("ended by DebuggerQuit waiting for rank 0 .* no sign of life for 2.5 s")


CONNECT = r"distdiag.training.breakpoint.console (\S+\.socket)\s"


def test_without_a_terminal_one_connects(ranks: Callable[..., Ranks]) -> None:
    job = ranks("steps", as_terminal=False)
    job.until(CONNECT)
    line = job.said.splitlines()[-1]
    assert f"stopped at {STEPS_AT}" in line
    command = shlex.split(line.partition("): ")[2])
    typed = "\n".join([*NEXT, "p 6 * secret", "c", ""])
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=30, check=True)
    assert "(Pdb) 42\n" in done.stdout
    job.end()
    for rank in (0, 1):
        assert job.own(rank)[-2:] == ["total 3.0 timeouts as before True", "ended well"]
    assert not os.path.exists(command[-1])


def test_a_connection_that_breaks_while_the_rank_runs_quits(ranks: Callable[..., Ranks]) -> None:
    job = ranks("sleeps", as_terminal=False)
    job.until(CONNECT)
    path = re.search(CONNECT, job.said)
    assert path is not None
    with socket.socket(socket.AF_UNIX) as person:
        person.connect(path[1])
        person.sendall("".join(f"{command}\n" for command in NEXT).encode())
        job.until("sleeping")
        assert person.recv(1)  # unread data turns the end into a reset
    job.end()
    assert job.own(0)[-1].startswith("ended by BdbQuit")
    assert " quit the debugger at " in job.own(1)[-1]


def test_without_a_terminal_and_a_socket_it_says_why(ranks: Callable[..., Ranks]) -> None:
    job = ranks("steps", as_terminal=False, listen=False)
    job.end()
    assert job.own(0)[-1].startswith("ended by NoTerminal stdin is not a terminal and /dev/tty cannot be opened")
    assert re.match("ended by DebuggerQuit rank 0 .* cannot be debugged .stdin is not a terminal", job.own(1)[-1])


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program without torch and without a terminal, with a breakpoint with these options."""
    started = []

    def start(options: str, **env: str) -> subprocess.Popen[str]:
        (tmp_path / "plain.py").write_text(PLAIN.format(options=options))
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "plain.py")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **env},
        )
        started.append(process)
        return process

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_no_connection_is_made_in_time(plain: Callable[..., subprocess.Popen[str]]) -> None:
    said = plain("timeout_s=0.5").communicate(timeout=20)[0]
    assert "NoTerminal: no client connected within 0.5 s" in said


def test_a_connection_that_is_lost_quits(plain: Callable[..., subprocess.Popen[str]]) -> None:
    job = plain("listen=True")
    assert job.stdout is not None
    with socket.socket(socket.AF_UNIX) as person:
        person.connect(job.stdout.readline().split()[-1])
        assert person.recv(10)
        # Unread data turns the end into a reset.
    said = job.communicate(timeout=20)[0]
    assert "bdb.BdbQuit" in said
    assert "made 42" not in said


AS_ANOTHER_USER = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
path = sys.argv[1]
try:
    s = socket.socket(socket.AF_UNIX); s.connect(path)
    s.sendall(b"import os; print(os.getuid())\\n"); print(s.recv(9))
except PermissionError as error:
    print("denied")
"""


def test_another_user_of_the_node_gets_no_prompt(plain: Callable[..., Any]) -> None:
    need_root()
    job = plain("listen=True")
    line = job.stdout.readline()
    path = re.search(r"\S+\.socket\b", line)
    assert path is not None
    tried = subprocess.run([sys.executable, "-c", AS_ANOTHER_USER, path[0]], capture_output=True, text=True, timeout=30)
    assert tried.stdout.strip() == "denied", tried.stdout + tried.stderr
    # His visit has cost the owner nothing.
    pasted = line.partition("): ")[2].strip()
    done = subprocess.run(["bash", "-c", pasted], input="c\n", capture_output=True, text=True, timeout=30)
    assert "(Pdb) " in done.stdout, done.stderr
    assert "made 42" in job.communicate(timeout=20)[0]


def test_a_folder_that_another_user_made_first_is_not_used(tmp_path: Path, plain: Callable[..., Any]) -> None:
    need_root()
    (tmp_path / "tmp").mkdir(mode=0o777)
    theirs = tmp_path / "tmp" / f"distdiag-breakpoint-{os.geteuid()}"
    theirs.mkdir(mode=0o777)
    os.chown(theirs, 65534, 65534)
    line = plain("listen=True", TMPDIR=str(tmp_path / "tmp")).stdout.readline()
    assert not line.split()[-1].startswith(str(tmp_path))
    assert list(theirs.iterdir()) == []


def test_alone_it_is_pdb_at_the_line_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN.format(options=""))
    job = Ranks(pexpect.spawn(sys.executable, [str(tmp_path / "plain.py")], encoding="utf-8"))
    assert "double()" in job.at_prompt()
    job.terminal.sendline("p number")
    assert "21" in job.at_prompt()
    job.terminal.sendline("c")
    assert "made 42" in job.end()


def test_before_the_process_group_only_the_chosen_rank_stops(plain: Callable[..., subprocess.Popen[str]]) -> None:
    assert plain("rank=3", RANK="2", WORLD_SIZE="8").communicate(timeout=20)[0] == "made 42\n"
