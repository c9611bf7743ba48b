"""allreduce-bench on real ranks: every collective checked, faults made for real, files, launchers."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from jobs import free_port
from json_schema import check
from support_warm import WarmRunning, distdiag

from distdiag.facts import machine

if TYPE_CHECKING:
    from pathlib import Path

    from support import Result

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")
QUICK = ("--min-time", "0.02", "--device", "cpu")


def bench(*arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()) -> Result:
    return distdiag("allreduce-bench", "--json", *QUICK, *arguments, env=env, wrap=wrap)


def rows(result: Result) -> list[dict[str, Any]]:
    found = result.report["data"]["results"]
    assert isinstance(found, list)
    return found


@dataclass(frozen=True)
class Kept:
    """A run of every collective for people, and the facts that it saved."""

    folder: Path
    plain: Result
    again: Result
    """Its report, from the saved facts."""


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("every")
    plain = distdiag(
        "allreduce-bench", *QUICK, "--nproc", "3", "--op", "all", "--sizes", "100,1000KB", "--dtype", "bfloat16",
        "--save", str(folder / "kept"), env={"NO_COLOR": "1"},
    )  # fmt: skip
    return Kept(folder, plain, distdiag("allreduce-bench", "--json", "--from", str(folder / "kept")))


def test_every_collective_is_right_in_every_element(every: Kept) -> None:
    check(every.again.out, 0)
    assert [(row["op"], row["wrong"], row["skipped"]) for row in rows(every.again)] == [
        (op, 0, "") for op in OPS for _ in range(2)
    ]
    for row in rows(every.again):
        assert row["time_s"]["min"] <= row["time_s"]["p50"] <= row["time_s"]["p99"] <= row["time_s"]["max"]
        assert row["algbw_bytes_per_s"] == pytest.approx(row["size_bytes"] / row["time_s"]["p50"])
        assert row["iterations"] >= 20
    assert {arrival["rank"] for arrival in every.again.report["data"]["arrivals"]} == {0, 1, 2}


@pytest.fixture
def faster(every: Kept, tmp_path: Path) -> str:
    """A document of two ranks that no machine, however busy, comes near by noise."""
    document = json.loads(every.again.out)
    document["data"]["world_size"] = 2
    for row in document["data"]["results"]:
        row |= {"dtype": "float16", "size_bytes": 1024, "in_place": True, "time_s": dict.fromkeys(row["time_s"], 1e-7)}
        row["busbw_bytes_per_s"] *= 1000
        row["algbw_bytes_per_s"] *= 1000
    (tmp_path / "faster.json").write_text(json.dumps(document))
    return str(tmp_path / "faster.json")


def test_ranks_of_a_launcher_in_the_other_form_beside_an_earlier_run(every: Kept, faster: str) -> None:
    """Of the sizes one does not fit, and many calls in float16 do not overflow. Nothing is measured again."""
    ops = ("all_reduce", "all_gather", "reduce_scatter")
    assert [row["in_place"] for row in rows(every.again) if row["op"] in ops] == [True] * 2 + [False] * 4
    both = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    runs = [
        WarmRunning(
            "allreduce-bench", "--json", *QUICK, "--op", ",".join(ops), "--sizes", "1KiB,65536GiB,2KiB", "--in-place",
            "--dtype", "float16", "--iters", "100", "--compare", faster,
            env={**both, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]  # fmt: skip
    result, other = (run.finish() for run in runs)
    assert (other.out, "slower rows again" in result.err) == ("", False)
    assert [(row["op"], row["in_place"], row["wrong"], bool(row["time_s"])) for row in rows(result)] == [
        (op, True, 0 if fits else None, fits) for op in ops for fits in (True, False, True)
    ]
    assert {row["iterations"] for row in rows(result) if row["time_s"]} == {100}
    assert "bytes on each rank" in rows(result)[1]["skipped"]
    assert "too-large" in {one["id"].partition(".")[2] for one in result.report["findings"]}
    assert [row["op"] for row in result.report["data"]["compared"]] == list(ops)
    assert (result.report["exit_code"], "slower" in result.findings) == (1, True)


def test_what_is_slower_than_in_an_earlier_run_is_measured_again_and_ctrl_c_keeps_the_first_time(faster: str) -> None:
    """What the repetitions say is judged by test_bench."""
    run = WarmRunning(
        "allreduce-bench",
        "--json",
        *QUICK,
        "--nproc",
        "2",
        "--sizes",
        "1KiB",
        "--dtype",
        "float16",
        "--compare",
        faster,
    )
    run.wait_for("measuring 1 operation with slower rows again")
    os.kill(run.process.pid, signal.SIGINT)
    result = run.finish()
    assert result.code == 130
    assert [(row["size_bytes"], row["wrong"]) for row in rows(result)] == [(1024, 0)]
    assert result.findings["slower"]["level"] == "warn"


def test_a_corrupted_element_is_found_in_the_rank_that_sent_it_and_no_other_is_wrong() -> None:
    result = bench("--nproc", "3", "--op", "all", "--sizes", "64KiB", "--dtype", "int8", "--inject", "corrupt:1")
    assert result.code == 1
    finding = result.findings["wrong-result"]
    assert finding["where"]["ranks"] == [1]
    assert "rank 1 " in finding["title"]
    # Summed or gathered by all, received by one, and not rank 1's to send.
    assert [(row["op"], row["wrong"]) for row in rows(result)] == list(zip(OPS, (3, 3, 1, 1, 0, 1, 1), strict=True))


def test_a_wrong_dtype_is_found_before_anything_is_sent() -> None:
    result = bench("--nproc", "2", "--sizes", "1KiB", "--inject", "dtype:1")
    assert (result.code, list(result.findings)) == (1, ["mismatch"])
    finding = result.findings["mismatch"]
    assert finding["where"]["ranks"] == [1]
    assert "float64 on rank 1" in finding["title"]
    assert rows(result) == []


# A rank that is stopped is the same to this command; amid a collective one is stopped with gpu-test.
def test_what_was_measured_before_a_rank_dies_is_kept() -> None:
    result = bench("--nproc", "2", "--sizes", "1KiB,4KiB,16KiB,64KiB", "--inject", "kill:1@3")
    # A busy machine pauses ranks, too.
    assert (result.code, set(result.findings) - {"rank-paused"}) == (1, {"rank-died"})
    assert result.findings["rank-died"]["where"]["ranks"] == [1]
    assert [row["size_bytes"] for row in rows(result)] == [1024, 4096]
    assert all(row["time_s"] for row in rows(result))
    assert result.report["summary"].endswith("2 of 4 rows measured")


@pytest.mark.timed
def test_a_late_rank_is_named_which_alone_is_a_failure_to_the_strict() -> None:
    result = bench("--nproc", "2", "--sizes", "2MiB:8MiB:x2", "--inject", "slow:1", "--iters", "15", "--strict")
    assert (result.code, result.report["verdict"]) == (1, "warn")
    assert result.findings["late-rank"]["where"]["ranks"] == [1]


def test_ctrl_c_reports_and_keeps_what_was_measured(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    run = WarmRunning(
        "allreduce-bench", "--json", "--nproc", "2", "--sizes", "1KiB,16MiB", "--min-time", "30", "--iters", "1000",
        "--save", str(kept), "--device", "cpu",
    )  # fmt: skip
    run.wait_for("all_reduce 1KiB: busbw")
    os.kill(run.process.pid, signal.SIGINT)
    result = run.finish()
    assert result.code == 130
    assert [row["size_bytes"] for row in rows(result)] == [1024]
    assert "1 of 2 rows measured" in result.report["summary"]
    again = distdiag("allreduce-bench", "--json", "--from", str(kept))
    assert (again.code, again.report) == (130, result.report)


def test_one_rank_alone_and_facts_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / f"allreduce-bench.{machine.host_name()}.json").mkdir()
    result = bench("--nproc", "1", "--op", "all_reduce,sendrecv", "--sizes", "1KiB", "--save", str(tmp_path))
    assert (rows(result)[0]["busbw_bytes_per_s"], rows(result)[1]["time_s"]) == (0.0, None)
    # The measured rows are still reported; the failure to save them is a finding.
    levels = {one["id"]: one["level"] for one in result.report["findings"]}
    assert (result.code, levels["distdiag.not-saved"]) == (3, "unknown")
    assert rows(result)[0]["time_s"]


def test_saved_and_compared(every: Kept) -> None:
    kept = str(every.folder / "kept")
    same = distdiag("allreduce-bench", "--json", "--from", kept, "--compare", kept)
    assert [(row["op"], row["slower"]) for row in same.report["data"]["compared"]] == [
        (op, False) for op in OPS for _ in range(2)
    ]


def test_the_table_fits_into_80_columns(every: Kept) -> None:
    assert every.plain.code == 0
    lines = every.plain.out.splitlines()
    assert "\x1b" not in every.plain.out
    # A command to paste has one line.
    assert max(len(line) for line in lines if " allreduce-bench --nproc" not in line) <= 80
    assert "reduce_scatter" in every.plain.out
    # In a pipe each row is a line on stderr as soon as it is measured.
    assert sum("busbw" in line for line in every.plain.err.splitlines()) == 7 * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("--op", "nonsense"),
        ("--sizes", "big"),
        ("--dtype", "float8"),
        ("--op", "all_reduce", "--out-of-place"),
        ("--op", "all_to_all", "--in-place"),
        ("--inject", "slow:7", "--nproc", "2"),
        ("--compare", "/nowhere/at/all.json"),
        ("--save", "/dev/null/kept"),
        ("--iters", "0"),
        ("--from", "/nowhere"),
        ("--inject", "kill:1@9", "--sizes", "1KiB", "--nproc", "2"),
    ],
)
def test_wrong_usage_is_exit_2_and_says_why(arguments: tuple[str, ...]) -> None:
    result = bench(*arguments)
    assert result.code == 2
    assert result.report["error"]["message"]
