"""What people have in tickets: py-spy's output in its forms."""

from __future__ import annotations

import json

from pyspy_facts import judge, outlier_ranks

from distdiag.commands.pyspy_all.dumps import as_nodes, parse

ONE = """\
Process {pid}: python -u train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
    {function} ({file}:{line})
    <module> (train.py:90)
Thread {other} (active+gil): "pin_memory (1)"
    run (threading.py:982)
"""


def dump(pid: int, *, waits: bool = True) -> str:
    place = ("all_reduce", "torch/distributed/distributed_c10d.py", 3252) if waits else ("load_batch", "train.py", 26)
    return ONE.format(pid=pid, other=pid + 5000, function=place[0], file=place[1], line=place[2])


def test_a_file_of_one_process_named_by_its_rank() -> None:
    (found,) = parse(dump(4711), "hang_rank12.txt")
    assert (found.pid, found.command, len(found.threads)) == (4711, "python -u train.py", 2)
    assert found.threads[0].name == "MainThread"
    assert found.threads[1].owns_gil
    (node,) = as_nodes([found])
    place = node.processes.processes[0].place
    assert place is not None
    assert place.rank == 12


def test_several_processes_in_one_file_have_no_ranks() -> None:
    found = parse(dump(1) + dump(2) + dump(3, waits=False), "node7.out")
    assert [one.pid for one in found] == [1, 2, 3]
    (node,) = as_nodes(found)
    assert [one.place for one in node.processes.processes] == [None] * 3


def labelled(prefixes: list[str], dumps: list[str]) -> str:
    return "\n".join(
        f"{prefix}: {line}".rstrip() for prefix, text in zip(prefixes, dumps, strict=True) for line in text.splitlines()
    )


def test_lines_with_labels_of_srun_and_clush() -> None:
    text = labelled([str(rank) for rank in range(4)], [dump(100 + rank, waits=rank != 2) for rank in range(4)])
    report = judge(*as_nodes(parse("srun: launching\n" + text, "slurm-1.out")))
    assert outlier_ranks(report) == [[2]]
    # Labels that name hosts, each with two processes: no rank is made up.
    both = labelled(["node1", "node2"], [dump(1) + dump(2), dump(1) + dump(2, waits=False)])
    report = judge(*as_nodes(parse(both, "x")))
    assert {(row.host, row.rank) for row in report.data.processes} == {("node1", None), ("node2", None)}


def test_lines_of_several_ranks_may_be_mixed() -> None:
    texts = [dump(100 + rank, waits=rank != 1).splitlines() for rank in range(3)]
    mixed = "\n".join(f"rank{rank}: {texts[rank][number]}" for number in range(len(texts[0])) for rank in range(3))
    assert outlier_ranks(judge(*as_nodes(parse(mixed, "x")))) == [[1]]


def test_locals_are_read_for_counters_alone() -> None:
    text = dump(1).replace(
        "    <module> (train.py:90)\n",
        "    train (train.py:40)\n        Arguments:\n            step: 7\n"
        '            token: "s3cret"\n            size: 12\n',
        1,
    )
    (found,) = parse(text, "rank0.txt")
    assert [(one.name, one.value) for one in found.threads[0].counters] == [("step", 7)]


def test_a_dump_that_failed_is_a_rank_that_could_not_be_read() -> None:
    text = (
        "Process 9: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\nError: Permission denied (os error 13)\n"
    )
    report = judge(*as_nodes([*parse(text, "rank0.txt"), *parse(dump(2), "rank1.txt")]))
    rows = {row.rank: (row.status, row.reason) for row in report.data.processes}
    assert rows[0] == ("failed", "Error: Permission denied (os error 13)")
    assert rows[1][0] == "ok"


def test_json_that_is_no_dump_is_passed_over() -> None:
    for text in ("[]", "[1]", '[{"pid": 1}]', "[", "{}", "hello"):
        assert parse(text, "x") == []
    reported = [
        {
            "pid": 3,
            "thread_name": None,
            "os_thread_id": 3,
            "frames": [{"name": "f", "filename": "a.py", "line": 1, "locals": None}],
        }
    ]
    assert [one.pid for one in parse(json.dumps(reported), "x")] == [3]


def test_several_processes_of_one_ticket_are_compared() -> None:
    report = judge(*as_nodes(parse(dump(1) + dump(2) + dump(3, waits=False), "ticket.txt")))
    assert [one.pids for one in report.data.outliers] == [(3,)]


def test_line_ends_of_windows_and_byte_order_marks() -> None:
    assert len(parse("\ufeff" + dump(7).replace("\n", "\r\n"), "rank0.txt")) == 1


def test_what_would_move_the_cursor_is_not_passed_on() -> None:
    (found,) = parse(dump(7).replace("train.py", "tr\x1b[2Jain.py"), "rank0.txt")
    assert found.threads[0].frames[-1].file == "tr?[2Jain.py"


def test_hostile_numbers_and_depths_are_no_dump() -> None:
    parse(dump(7).replace(":3252)", ":" + "9" * 6000 + ")"), "x")
    assert parse("[" * 100_000, "x") == []
