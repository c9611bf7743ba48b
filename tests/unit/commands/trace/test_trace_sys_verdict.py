"""Conclusions from strace logs: recorded logs, and small ones written here for single cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loops import each
from pyspy_facts import node, process
from trace_facts import NET, owned, receives, sleeps

from distdiag.cluster.targets import Cluster
from distdiag.commands.pyspy_all import types as pyspy_all
from distdiag.commands.pyspy_all.subcommand import _choose as choose_to_sample
from distdiag.commands.trace import ranks
from distdiag.commands.trace.nodes import Answers
from distdiag.commands.trace.sys.collect import Attached, Reply, Traced
from distdiag.commands.trace.sys.diagnose import diagnose, diagnose_logs
from distdiag.commands.trace.sys.logs import read
from distdiag.commands.trace.sys.types import MAX_PROCESSES, Request
from distdiag.commands.trace.sys.wording import log_name, parse_log_name
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts.network.socket_owners import Network
from distdiag.facts.strace.types import Call, ThreadLog
from distdiag.jobs.roles import of_job, to_sample
from distdiag.options import parse_duration
from distdiag.report import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.commands.trace.sys.types import TraceSys
    from distdiag.facts.process.blocked_threads import Thread
    from distdiag.jobs.collect import Process
    from distdiag.report import Finding, Report

RECORDED = Path(__file__).parents[3] / "recorded" / "strace"
REQUEST = Request(program="distdiag", cluster=Cluster(), wanted=ranks.Wanted())
EPOCH_S = 1_700_000_000
MINE, THEIRS = "10.0.0.1:29501", "10.0.0.2:40000"


def judge(*paths: Path) -> Report[TraceSys]:
    return diagnose_logs(REQUEST, *read(list(map(str, paths))))


def written(tmp_path: Path, **logs: str) -> Report[TraceSys]:
    """Judge logs: name "rank_0" is that of rank 0 on host n0, with process 100."""
    for name, text in logs.items():
        rank = int(name.removeprefix("rank_"))
        (tmp_path / log_name(rank, f"n{rank}", 100 + rank)).write_text(text)
    return judge(tmp_path)


def only(report: Report[TraceSys], id_: str) -> Finding:
    (found,) = [one for one in report.findings if one.id == id_]
    return found


def line(tid: int, at_s: float, call: str, result: str = "0", took_s: float = 0.00002) -> str:
    return f"{tid} {EPOCH_S + at_s:.6f} {call} = {result} <{took_s:.6f}>\n"


def begun(tid: int, at_s: float, call: str) -> str:
    return f"{tid} {EPOCH_S + at_s:.6f} {call},  <detached ...>\n"


def test_a_rank_that_waits_for_another_is_told_by_both_logs(tmp_path: Path) -> None:
    report = written(
        tmp_path,
        rank_0=begun(100, 0.0, f"recvfrom(7<TCP:[{MINE}->{THEIRS}]>"),
        rank_1=line(101, 1.0, f'sendto(5<TCP:[{THEIRS}->{MINE}]>, "x"..., 8, 0, NULL, 0)', "8")
        + begun(101, 8.0, "clock_nanosleep(CLOCK_MONOTONIC, 0, {tv_sec=600, tv_nsec=0}")
        + line(102, 12.0, "getppid()", "1"),
    )
    finding = only(report, "trace.blocked")
    assert finding.title == (
        f"rank 0 (n0, pid 100) has been blocked for 12 s in recvfrom on {THEIRS} = rank 1 (n1, pid 101); "
        "rank 1 is not blocked on another rank: it is in clock_nanosleep on a sleep"
    )
    assert (report.verdict, finding.where.ranks) == (Verdict.FAIL, (0, 1))
    first = report.data.threads[0]
    assert first.ranks == (1,)
    assert first.blocked_s == pytest.approx(12.0)


def test_several_waiters_are_one_sentence_and_a_chain_is_followed_to_its_end(tmp_path: Path) -> None:
    pairs = {rank: (f"10.0.0.{rank}:50000", "10.0.0.9:29501") for rank in (0, 2)}
    logs = {f"rank_{rank}": begun(100 + rank, 0.0, f"recvfrom(7<TCP:[{a}->{b}]>") for rank, (a, b) in pairs.items()}
    sent = "".join(line(101, 0.5, f'sendto(7<TCP:[{b}->{a}]>, "", 1, 0, NULL, 0)') for a, b in pairs.values())
    waits = begun(101, 0.6, f"recvfrom(9<TCP:[{MINE}->{THEIRS}]>")
    runs = line(103, 0.0, f'sendto(3<TCP:[{THEIRS}->{MINE}]>, "", 1, 0, NULL, 0)') + line(103, 20.0, "getppid()", "1")
    report = written(tmp_path, **logs, rank_1=sent + waits, rank_3=runs)
    title = only(report, "trace.blocked").title
    assert title.startswith("ranks 0,2 (n[0,2]) have been blocked for 20 s in recvfrom on rank 1")
    assert "rank 1 (n1, pid 101) has been blocked for 19 s in recvfrom on 10.0.0.2:40000 = rank 3" in title
    assert title.endswith("rank 3 is not blocked on another rank: it is running, with 2 system calls in 20 s")
    # AND who goes on may get there: that is no fault yet.
    assert report.verdict is Verdict.WARN


def test_two_that_wait_for_each_other(tmp_path: Path) -> None:
    report = written(
        tmp_path,
        rank_0=begun(100, 0.0, f"recvfrom(7<TCP:[{MINE}->{THEIRS}]>") + line(200, 9.0, "getppid()", "1"),
        rank_1=begun(101, 1.0, f"recvfrom(7<TCP:[{THEIRS}->{MINE}]>"),
    )
    finding = only(report, "trace.blocked")
    assert finding.title.endswith("they wait for each other")
    assert report.verdict is Verdict.FAIL


def test_who_only_connected_is_found_if_it_was_the_only_one(tmp_path: Path) -> None:
    connects = 'connect(3<TCP:[77]>, {sa_family=AF_INET, sin_port=htons(29501), sin_addr=inet_addr("10.0.0.1")}, 16)'
    waits = begun(100, 0.0, f"recvfrom(7<TCP:[{MINE}->{THEIRS}]>") + line(200, 9.0, "getppid()", "1")
    one = written(tmp_path, rank_0=waits, rank_1=line(101, 0.0, connects))
    assert "= rank 1" in only(one, "trace.blocked").title
    two = written(tmp_path, rank_0=waits, rank_1=line(101, 0.0, connects), rank_2=line(102, 0.0, connects))
    assert "10.0.0.2:40000, peer in no log" in only(two, "trace.blocked").title


def test_the_other_ends_of_many_that_wait_are_found(tmp_path: Path) -> None:
    waits = {f"rank_{rank}": begun(100 + rank, 0.0, f"recvfrom(7<TCP:[10.0.0.{rank}:5->{MINE}]>") for rank in range(20)}
    listens = line(120, 8.0, f"accept4(3<TCP:[{MINE}]>, NULL, NULL, 0)", f"9<TCP:[{MINE}->10.0.0.1:5]>")
    report = written(tmp_path, **waits, rank_20=listens)
    assert [row.ranks for row in report.data.threads[:20]] == [(20,)] * 20
    assert "ranks 0-19" in only(report, "trace.blocked").title


def test_the_other_end_of_many_connections_is_found_by_the_connection_alone(tmp_path: Path) -> None:
    ends = [(f"10.0.0.{rank}:5", f"10.0.1.{rank}:6") for rank in range(20)]
    waits = {
        f"rank_{rank}": begun(100 + rank, 0.0, f"recvfrom(7<TCP:[{ends[rank][0]}->{ends[rank][1]}]>")
        for rank in range(20)
    }
    sends = "".join(line(120, 8.0, f'sendto(7<TCP:[{b}->{a}]>, "", 1, 0, NULL, 0)') for a, b in ends)
    report = written(tmp_path, **waits, rank_20=sends)
    assert [row.ranks for row in report.data.threads[:20]] == [(20,)] * 20


@pytest.mark.parametrize(
    ("text", "id_", "verdict", "says"),
    [
        (
            line(100, 0.0, 'write(3</ckpt/step.pt>, "x"..., 4096)', "-1 ENOSPC (No space left on device)"),
            "trace.error-enospc",
            Verdict.FAIL,
            "got ENOSPC once: write on /ckpt/step.pt: no space left on device",
        ),
        (
            line(100, 0.0, 'openat(AT_FDCWD</w>, "/data/1", O_RDONLY)', "-1 EMFILE (Too many open files)") * 9,
            "trace.error-emfile",
            Verdict.FAIL,
            "got EMFILE 9 times: openat on /data/1: too many open files in the process",
        ),
        (
            line(
                100,
                0.0,
                'connect(3<TCP:[7]>, {sa_family=AF_INET, sin_port=htons(29500), sin_addr=inet_addr("10.0.0.1")}, 16)',
                "-1 ECONNREFUSED (Connection refused)",
            )
            * 3,
            "trace.error-econnrefused",
            Verdict.WARN,
            "got ECONNREFUSED 3 times: connect on 10.0.0.1:29500: no process listens there",
        ),
        (
            line(100, 0.0, 'openat(AT_FDCWD</w>, "/data/1", O_RDONLY)', "-1 EACCES (Permission denied)"),
            "trace.error-eacces",
            Verdict.WARN,
            "got EACCES once: openat on /data/1: permission denied",
        ),
        (
            line(100, 0.0, 'openat(AT_FDCWD</w>, "/usr/lib/libnccl.so.2", O_RDONLY)', "-1 ENOENT (No such file)"),
            "trace.error-enoent",
            Verdict.OK,
            "did not find /usr/lib/libnccl.so.2",
        ),
        (
            "".join(
                line(100, at, 'stat("/data/READY", 0x7f00)', "-1 ENOENT (No such file)")
                + line(100, at + 0.1, "clock_nanosleep(CLOCK_REALTIME, 0, {tv_sec=1}, NULL)", "0", 0.9)
                for at in range(5)
            ),
            "trace.polled-path",
            Verdict.WARN,
            "rank 0 (n0, pid 100) polls for /data/READY, which does not exist (5 of 5 tries in 4.1 s)",
        ),
        (
            "".join(line(100, at / 10, 'read(3</mnt/nfs/a/b>, ""..., 9)', "9", 0.05) for at in range(9)),
            "trace.slow-storage",
            Verdict.WARN,
            "calls on /mnt/nfs took 56% of the time; the slowest one 50 ms (read /mnt/nfs/a/b)",
        ),
        (
            line(100, 0.0, "fsync(3</mnt/nfs/a/b>)", "0", 3.5) + line(100, 60.0, "getppid()", "1"),
            "trace.slow-storage",
            Verdict.WARN,
            "the slowest one 3.5 s (fsync /mnt/nfs/a/b)",
        ),
        (
            "".join(line(100, at / 5000, "poll([{fd=3<pipe:[7]>, events=POLLIN}], 1, 0)", "0") for at in range(2000)),
            "trace.busy-wait",
            Verdict.WARN,
            "busy-waits: 2000 calls to poll on pipe:[7] without success, 5003 times a second",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) and one.startswith("trace.") else "",
)
def test_what_is_worth_to_be_looked_at(tmp_path: Path, text: str, id_: str, verdict: Verdict, says: str) -> None:
    report = written(tmp_path, rank_0=text)
    assert says in only(report, id_).title
    assert only(report, id_).where.ranks == (0,)
    assert report.verdict is verdict


def test_a_look_at_a_path_now_and_then_is_no_wait_for_it(tmp_path: Path) -> None:
    text = "".join(
        line(100, at, 'stat("/data/STOP", 0x7f00)', "-1 ENOENT (No such file)")
        + line(100, at + 0.1, "clock_nanosleep(CLOCK_REALTIME, 0, {tv_nsec=1}, NULL)", "0", 0.1)
        for at in range(9)
    )
    assert "trace.polled-path" not in [one.id for one in written(tmp_path, rank_0=text).findings]


def test_a_trace_without_findings_gives_no_clean_bill(tmp_path: Path) -> None:
    report = written(tmp_path, rank_0=line(100, 0.0, "getpid()", "100"))
    assert (report.findings, report.exit_code()) == ((), 0)
    assert report.summary.startswith("1 system call of 1 process in ")
    assert report.summary.endswith("busy-wait seen. What shows a slow rank: distdiag pyspy-all --samples 20")


def test_a_log_that_ends_within_a_line_is_said_to_be_cut(tmp_path: Path) -> None:
    report = written(tmp_path, rank_0=line(100, 0.0, "getppid()", "1") + f'100 {EPOCH_S}.000000 read(3</x>, "abc')
    assert "ends early" in only(report, "trace.log-cut").title


@pytest.mark.parametrize("version", ["5.10", "6.1", "6.13", "7.2"])
def test_recorded_logs_are_read_whatever_the_version(version: str) -> None:
    report = judge(RECORDED / f"{version}_live")
    (row,) = report.data.threads
    assert (row.main, row.n_calls > 20) == (True, True)
    assert (row.state, row.call, row.ranks) == ("blocked", "recvfrom", ())


def test_what_is_no_log_is_an_error() -> None:
    with pytest.raises(DistdiagError, match="not a strace log"):
        judge(RECORDED / "6.1_summary.txt")
    with pytest.raises(DistdiagError, match="without -ttt -T -yy") as raised:
        judge(RECORDED / "6.1_forks_relative.txt")
    assert "strace -f -ff -ttt -T -yy -o DIR/trace -- COMMAND" in (raised.value.hint or "")
    with pytest.raises(UsageError, match="no such file"):
        judge(RECORDED / "not-there")


def thread_log(pid: int, last: Call | None, n_calls: int = 0, at_s: float = 1000.0) -> ThreadLog:
    state = "detached" if last is not None else "returned"
    return ThreadLog("", None, pid, "", at_s, at_s, n_calls, 0, state, 0.0, last)


def seen(pid: int, threads: Sequence[Thread], logs: Sequence[ThreadLog], **more: object) -> Reply:
    one = Traced(pid, 1000.0, 1002.0, False, "", tuple(logs), "S", None, tuple(threads))
    before = Attached(pid, "", "", None, "S", tuple(threads))
    return Reply(attached=(before,), traced=(replace(one, **more),))  # type: ignore[arg-type]


def two_ranks(*reported: Reply, **more: object) -> Report[TraceSys]:
    nodes = [node([process(100, 0, 2), process(101, 1, 2)], {}).stacks]
    network = Network(NET, ("10.0.0.1",), owned((100, 101)))
    answers = Answers[Reply](nodes=nodes, replies={"n1": [Reply(networks=(network,)), *reported]}, **more)  # type: ignore[arg-type]
    return diagnose(REQUEST, answers, ranks.choose(nodes, ranks.Wanted()))


def received() -> Call:
    target = "TCP:[10.0.0.1:100->10.0.0.1:101]"
    return Call("recvfrom", 7, target, 1000.0, "", "", None)


def waits_and_sleeps(**more: object) -> tuple[Reply, Reply]:
    return (
        seen(100, [receives(100, 101)], [thread_log(100, received())], **more),
        seen(101, [sleeps(101)], [], **more),
    )


def test_how_long_it_was_blocked_counts_from_before_it_was_traced() -> None:
    report = two_ranks(*waits_and_sleeps())
    finding = only(report, "trace.blocked")
    assert "rank 0 (n1, pid 100) has been blocked for 62 s in recvfrom on 10.0.0.1:101 = rank 1" in finding.title
    assert finding.title.endswith("rank 1 is not blocked on another rank: it sleeps (clock_nanosleep, 62 s)")
    assert finding.fix is not None
    assert finding.fix.commands == ("distdiag pyspy-all --pid 101",)
    assert report.exit_code() == 1
    assert [finding.id for finding in report.findings] == ["trace.blocked"]


def test_a_rank_that_was_left_stopped_is_a_fault() -> None:
    report = two_ranks(*waits_and_sleeps(state="t", tracer=7))
    titles = [one.title for one in report.findings if one.id == "trace.left-stopped"]
    assert len(titles) == 2
    assert "rank 0 (n1, pid 100) was left traced by pid 7 after tracing" in titles[0]


def test_a_log_that_became_too_long_is_said() -> None:
    report = two_ranks(*waits_and_sleeps(cut=True))
    assert "limit of 256 MiB of logs per node was reached" in only(report, "trace.log-cut").title


@pytest.mark.parametrize(
    ("why", "words", "says", "command"),
    [
        ("no-strace", "", "on n1 was not traced: strace is not installed", "apt-get"),
        (
            "traced",
            "gdb -p 100",
            "another program is already tracing it: pid 7 (gdb -p 100)",
            "trace blocked --pid 100",
        ),
        ("kernel", "", "one of its threads is stuck in the kernel (D", "trace blocked --pid 100"),
        ("denied", "Operation not permitted", "permission denied (Operation not permitted)", "trace blocked"),
    ],
)
def test_who_was_not_traced_and_what_works_instead(why: str, words: str, says: str, command: str) -> None:
    refused = Reply(attached=(Attached(100, why, words, 7 if why == "traced" else None, "S", ()),))
    report = two_ranks(refused, waits_and_sleeps()[1])
    finding = only(report, "trace.not-attached")
    assert says in finding.title
    assert finding.fix is not None
    assert any(command in one for one in finding.fix.commands)
    assert finding.fix.commands[-1] == "distdiag trace blocked --pid 100"
    assert (report.verdict, report.exit_code()) == (Verdict.UNKNOWN, 3)


def test_more_processes_than_a_node_can_bear_are_not_traced() -> None:
    nodes = [node([process(100 + rank, rank, 70) for rank in range(70)], {}).stacks]
    answers = Answers[Reply](nodes=nodes, replies={"n1": []})
    report = diagnose(REQUEST, answers, ranks.choose(nodes, ranks.Wanted()))
    finding = only(report, "trace.not-attached")
    assert "rank 64, rank 65, rank 66, rank 67 and 2 more were not traced" in finding.title
    assert str(MAX_PROCESSES) in finding.title


def of_run(pid: int, rank: int, run_id: str, port: str) -> Process:
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": run_id}
    launcher = pid // 100 * 10
    return process(pid, rank, 2, parent=launcher, above=(launcher, 1), job=job)


@pytest.mark.parametrize(
    ("second", "options"),
    [
        (of_run(201, 1, "B", "4002"), ("A", "B")),
        (of_run(201, 1, "A", "4002"), ("localhost:4001", "localhost:4002")),
        (
            of_run(201, 1, "A", "4001"),
            ("'A at localhost:4001 started by pid 10'", "'A at localhost:4001 started by pid 20'"),
        ),
    ],
)
def test_a_rank_of_several_jobs_is_refused_before_anything_is_attached(
    second: Process, options: tuple[str, str]
) -> None:
    nodes = [node([of_run(100, 0, "A", "4001"), of_run(101, 1, "A", "4001"), second], {}).stacks]
    wanted = ranks.Wanted(ranks=(1,))
    with pytest.raises(UsageError) as raised:
        ranks.refuse_several_jobs(ranks.choose(nodes, wanted), wanted)
    hint = f"name one: --job {options[0]} or --job {options[1]}"
    assert (str(raised.value), raised.value.hint) == ("rank 1 exists in 2 jobs", hint)
    name = options[0].strip("'")
    one = ranks.Wanted(ranks=(1,), job=name)
    ranks.refuse_several_jobs(ranks.choose(nodes, one), one)
    assert [each.pid for each in of_job(nodes[0].processes, name).processes] == [100, 101]


def test_a_rank_on_two_hosts_under_one_name_is_told_apart_by_pid() -> None:
    nodes = [node([of_run(101, 1, "A", "4001")], {}).stacks, node([of_run(201, 1, "A", "4001")], {}, "n2").stacks]
    wanted = ranks.Wanted(ranks=(1,))
    with pytest.raises(UsageError, match="rank 1 exists more than once in job A at localhost:4001") as raised:
        ranks.refuse_several_jobs(ranks.choose(nodes, wanted), wanted)
    assert raised.value.hint == "name one: --pid 101 or --pid 201"


def test_native_stacks_of_several_jobs_are_refused_as_they_pause_the_ranks() -> None:
    processes = [of_run(101, 1, "A", "4001"), of_run(201, 1, "B", "4002")]
    hosts = {"n1": node(processes, {}).processes}
    request = pyspy_all.Request(program="distdiag", cluster=Cluster(), native=True)
    with pytest.raises(UsageError) as raised:
        choose_to_sample(request, hosts)
    assert raised.value.hint == "name one: --job A or --job B or --pid PID"
    chosen = choose_to_sample(replace(request, job="B"), hosts)["n1"]
    assert to_sample(chosen.processes)[0] == [201]


def test_names_of_logs_are_read_back() -> None:
    assert parse_log_name(log_name(3, "node-07", 4711)) == (3, "node-07", 4711)
    assert parse_log_name(log_name(None, "a.b", 1)) == (None, "a_b", 1)
    assert parse_log_name("F.1234") == (None, "", None)
    assert parse_log_name("rank-3.1234") == (3, "", None)


@each("text, seconds", [("5", 5.0), ("5s", 5.0), ("500ms", 0.5), ("2m", 120.0), ("1.5 s", 1.5), ("1min", 60.0)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text, "--for", longest_s=600) == seconds


@each("text", ["", "x", "-5", "5h", "0", "11m", "1e3"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text, "--for", longest_s=600)


def test_each_grave_error_has_its_id(tmp_path: Path) -> None:
    calls = {
        "read(3</data/x>, 0x1, 1)": ("EIO", "ESTALE", "EUCLEAN"),
        "write(4</data/y>, 0x1, 1)": ("EDQUOT", "EPIPE"),
        'openat(AT_FDCWD</w>, "/data/z", O_WRONLY)': ("EROFS", "ENFILE"),
        "mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, 5</data/m>, 0)": ("ENOMEM",),
        f"recvfrom(7<TCP:[{MINE}->{THEIRS}]>, 0x1, 1, 0, NULL, NULL)": ("ECONNRESET", "ETIMEDOUT"),
        f"sendto(7<TCP:[{MINE}->{THEIRS}]>, 0x1, 1, 0, NULL, 0)": ("EHOSTUNREACH", "ENETUNREACH"),
        f"bind(8<TCP:[{MINE}]>, 0x1, 16)": ("EADDRINUSE", "EADDRNOTAVAIL"),
    }
    names = [(call, error) for call, errors in calls.items() for error in errors]
    text = "".join(line(100, number, call, f"-1 {error} (text)") for number, (call, error) in enumerate(names))
    found = {str(one.id) for one in written(tmp_path, rank_0=text).findings}
    wanted = {
        *("trace.error-eio", "trace.error-estale", "trace.error-euclean", "trace.error-edquot", "trace.error-epipe"),
        *("trace.error-erofs", "trace.error-enfile", "trace.error-enomem", "trace.error-econnreset"),
        *("trace.error-etimedout", "trace.error-ehostunreach", "trace.error-enetunreach", "trace.error-eaddrinuse"),
        "trace.error-eaddrnotavail",
    }
    assert sorted(wanted - found) == []


def test_a_log_without_times_beside_a_good_one_is_reported(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a.strace").write_text("read(3, 0x1, 1) = 1\n" * 30)
    (tmp_path / "new.strace").write_text(line(100, 1.0, "getppid()", "1") * 30)
    report = judge(tmp_path / "old", tmp_path / "new.strace")
    assert only(report, "trace.log-unread").title
