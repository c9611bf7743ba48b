"""The fix for a stuck rank follows from its wait, as shown by the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hang_facts import ASLEEP, LONG, fix_of, judge, node, waiting, with_blocked
from loops import each
from pyspy_facts import SITE, frames, loads, process, twice
from trace_facts import at_lock, connection, thread

from distdiag.diagnosis.stuck.types import StuckKind
from distdiag.facts.network.socket_owners import Network, Owned, PeerProcess
from distdiag.facts.process.blocked_threads import Target
from distdiag.facts.process.descriptors import Descriptor, End
from distdiag.facts.process.procs import Proc
from distdiag.report import Verdict

if TYPE_CHECKING:
    from distdiag.facts.process.blocked_threads import Thread
    from distdiag.facts.stacks.stack_types import Sample


def stuck(call: str = "read", *, since_s: float = 214.0) -> tuple[Sample, ...]:
    return twice(loads(), still=replace(ASLEEP, syscall=call, wait_channel="", since_s=since_s))


def at(kind: str, target: str, *, fd: int = 5, wants: str = "r", call: str = "read") -> Thread:
    """Wait at a descriptor of which no other process has the other end."""
    return thread(102, call, targets=(Target(fd, wants, Descriptor(fd, kind, target, "r", 0)),))


INPUT = thread(
    102, "read", targets=(Target(0, "r", Descriptor(0, "pipe", "pipe:[5]", "r", 0, ends=(End(50, 7, "w"),))),)
)


@each(
    "of, text",
    [
        (at("fifo", "/run/job/tokens"), "on n1, start the process that writes to /run/job/tokens"),
        (at("fifo", "/run/job/log", wants="w", call="write"), "on n1, start the process that reads from /run/job/log"),
        (thread(102, "openat", path="/run/job/tokens"), "on n1, start the process at the other end of /run/job/tokens"),
        (at("file", "/dev/pts/3"), "it waits for input: answer it, or start the job with `< /dev/null`"),
        (INPUT, "it waits for input: answer it, or start the job with `< /dev/null`"),
    ],
)
def test_a_rank_at_a_file_needs_its_other_end(of: Thread, text: str) -> None:
    report = judge(with_blocked(node(waiting(), waiting(), stuck(of.syscall)), of))
    assert (report.verdict, report.data.ranks) == (Verdict.FAIL, (2,))
    assert fix_of(report) == (text, ())


def test_a_process_that_is_stopped_at_the_other_end_is_resumed() -> None:
    ends = "10.0.0.1:102", "10.0.0.1:900"
    sockets = (
        Owned(102, 1020, "tcp", "ESTABLISHED", *ends),
        Owned(900, 9000, "tcp", "ESTABLISHED", *reversed(ends)),
    )
    report = judge(
        with_blocked(
            node(waiting(), waiting(), stuck("recvfrom")),
            thread(102, "recvfrom", targets=(connection(102, "10.0.0.1:900"),)),
            networks=(Network("", ("10.0.0.1",), sockets),),
            peer_processes=(PeerProcess(900, "feeder", "feeder", "T"),),
        )
    )
    assert (report.verdict, report.data.ranks) == (Verdict.FAIL, (2,))
    assert fix_of(report) == ("on n1, resume it and find out what stopped it", ("kill -CONT 900",))


def test_a_child_that_is_stopped_is_resumed() -> None:
    child = Proc(pid=900, parent=102, state="T", comm="tar", cpu_s=1.0, started=1)
    report = judge(with_blocked(node(waiting(), waiting(), stuck("wait4")), thread(102, "wait4", children=(child,))))
    assert fix_of(report) == ("on n1, resume it and find out what stopped it", ("kill -CONT 900",))


def test_the_holder_of_a_lock_on_a_file_is_named() -> None:
    holder = PeerProcess(900, "tokenize", "tokenize", "S")
    report = judge(
        with_blocked(node(waiting(), waiting(), stuck("flock")), at_lock(102, 900), peer_processes=(holder,))
    )
    assert (report.verdict, report.data.class_name, report.data.ranks) == (Verdict.FAIL, StuckKind.LOCK, (2,))
    text, commands = fix_of(report)
    assert text == "next: see what pid 900 (tokenize) does, which holds the lock on /data/lock"
    assert commands == ("distdiag pyspy-all --pid 900",)


def test_the_lock_of_a_build_that_was_killed_is_removed() -> None:
    baton = frames(("FileBaton.wait", SITE + "torch/utils/file_baton.py", 42), ("load", "/home/me/train.py", 3))
    seen = twice(baton, still=replace(ASLEEP, since_s=0.1), apart_s=31.0)
    seen = tuple(replace(each, switches=7 + 300 * number) for number, each in enumerate(seen))
    picture = node(waiting(), waiting(), seen)
    report = judge(with_blocked(picture, thread(102, "clock_nanosleep", since_s=0.1)))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (Verdict.WARN, StuckKind.SLOW, (2,))
    assert fix_of(report)[0].endswith("in its folder of TORCH_EXTENSIONS_DIR")
    watched = [replace(each, build_locks=("/tmp/a b/lock",)) if each.pid == 102 else each for each in picture.watched]
    report = judge(with_blocked(replace(picture, watched=tuple(watched)), thread(102, "clock_nanosleep", since_s=0.1)))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (Verdict.FAIL, StuckKind.LOCK, (2,))
    assert report.summary == (
        "rank 2 (n1, pid 102) is not in the collective: `load` train.py:3 (in `FileBaton.wait`), waiting for a lock, "
        "polling"
    )
    assert fix_of(report)[1] == ("rm '/tmp/a b/lock'",)


def test_of_a_rank_that_looks_again_and_again_the_calls_are_shown() -> None:
    seen = twice(loads(), still=replace(ASLEEP, since_s=0.1), apart_s=31.0)
    seen = tuple(replace(each, switches=7 + 300 * number) for number, each in enumerate(seen))
    report = judge(with_blocked(node(waiting(), waiting(), seen), thread(102, "clock_nanosleep", since_s=0.1)))
    assert (report.verdict, report.data.ranks) == (Verdict.WARN, (2,))
    text = "next: see which file or address it looks for again and again"
    assert fix_of(report) == (text, ("distdiag trace sys --rank 2 --for 5s",))


def test_a_file_system_that_does_not_answer_is_checked() -> None:
    still = replace(LONG, state="D", syscall="statx", wait_channel="rpc_wait", path="/data/train set/x.bin")
    report = judge(node(waiting(), waiting(), twice(loads(), state="D", still=still)))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (Verdict.FAIL, StuckKind.STORAGE, (2,))
    assert fix_of(report) == (
        "on n1, check that the file system answers",
        ("timeout 5 stat -f '/data/train set'",),
    )


def test_a_job_that_torchrun_starts_again_and_again_fails_whatever_its_ranks_do() -> None:
    launcher = process(50, kind="launcher", place=None, started_s=100.0)
    young = node(waiting(), waiting(), waiting())
    ranks = tuple(
        replace(
            each,
            parent=50,
            above=(50, 1),
            started_s=190.0,
            job={**each.job, "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "100"},
        )
        for each in young.processes.processes
    )
    facts = replace(young.processes, processes=(launcher, *ranks), uptime_s=200.0)
    report = judge(replace(young, processes=facts))
    assert (report.verdict, report.data.class_name, report.data.ranks) == (Verdict.FAIL, StuckKind.RESTART, ())
    assert report.summary == "restarted 3 times, after 30 s each on average: a restart loop"
    assert fix_of(report) == ("read why the last attempts ended", ("distdiag logs PATH",))
