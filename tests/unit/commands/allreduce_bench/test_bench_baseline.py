"""The earlier run that --compare names: our own documents, and every text that nccl-tests printed."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distdiag.commands.allreduce_bench.earlier import read
from distdiag.commands.allreduce_bench.types import Baseline, SizeResult, Times
from distdiag.errors import UsageError

RECORDED = sorted(
    path for path in (Path(__file__).parents[3] / "recorded" / "nccl_tests").iterdir() if path.suffix != ".md"
)
HEADER = (
    "#       size         count      type   redop    root"
    "     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
)
MEANS = "its times are means, as nccl-tests prints them"
ASSUMED = "the file does not name the collective: all_reduce is assumed"

# file -> rows, made_by, world_size, device, its first and its last row: op, size, dtype, in_place, p50_s, GB/s
EXPECTED: dict[str, tuple[int, str, int, str, tuple[Any, ...], tuple[Any, ...]]] = {
    "2023_all_reduce_perf.mpirun.txt": (
        *(28, "nccl-tests", 16, "NVIDIA H100 80GB HBM3"),
        ("all_reduce", 1048576, "bfloat16", False, 66.29e-6, 29.66),
        ("all_reduce", 8589934592, "bfloat16", True, 34.487e-3, 467.03),
    ),
    "2023_reduce_scatter_perf.unchecked.txt": (
        *(14, "nccl-tests", 4, "NVIDIA A10"),
        ("reduce_scatter", 65536, "float32", False, 35.66e-6, 1.38),
        ("reduce_scatter", 268435456, "float32", True, 18.248e-3, 11.03),
    ),
    "2.17.6_all_reduce.txt": (
        *(22, "nccl-tests 2.17.6", 8, "NVIDIA H100 80GB HBM3"),
        ("all_reduce", 8, "float32", False, 31.5e-6, 0.0),
        ("all_reduce", 8589934592, "float32", True, 31.625e-3, 475.33),
    ),
    "2.19.6_all_reduce.per_iteration.txt": (
        *(12, "nccl-tests 2.19.6", 4, "NVIDIA GH200 120GB"),
        ("all_reduce", 1024, "float16", False, 17.19e-6, 0.09),
        ("all_reduce", 1073741824, "float16", True, 12.6299e-3, 127.52),
    ),
}


def line(
    size: int = 2**20, *, type_: str = "float", redop: str = "sum", times: tuple[float, float] = (100, 125)
) -> str:
    """Print what 8 GPUs would have measured, times in microseconds."""
    lead = f"{size:12d}  {size // 4:12d}  {type_:>8}  {redop:>6}      -1"
    rates = [(one, size / one / 1e3) for one in times]
    return lead + "".join(f"  {one:7.2f}  {rate:6.2f}  {rate * 1.75:6.2f}      0" for one, rate in rates) + "\n"


ROW = line()


def read_text(folder: Path, text: str | bytes, name: str = "all_reduce_perf.txt") -> Baseline:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(str(path))


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(UsageError) as caught:
        read_text(folder, text)
    assert caught.value.hint
    return str(caught.value)


def of(row: SizeResult) -> Times:
    assert row.time_s is not None
    return row.time_s


def times(baseline: Baseline) -> dict[tuple[str, int, str, bool], tuple[float, float]]:
    return {(one.op, one.size_bytes, one.dtype, one.in_place): (of(one).p50, of(one).iqr) for one in baseline.rows}


def figures(row: SizeResult) -> tuple[Any, ...]:
    return (row.op, row.size_bytes, row.dtype, row.in_place, of(row).p50, (row.busbw_bytes_per_s or 0) / 1e9)


# ---- nccl-tests


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_every_generation_is_read(path: Path) -> None:
    count, made_by, world_size, device, first, last = EXPECTED[path.name]
    baseline = read(str(path))
    assert (len(baseline.rows), baseline.made_by) == (count, made_by)
    assert (baseline.world_size, baseline.device) == (world_size, device)
    for row, expected in ((baseline.rows[0], first), (baseline.rows[-1], last)):
        assert figures(row)[:4] == expected[:4]
        assert figures(row)[4:] == pytest.approx(expected[4:], rel=2e-3)
    assert {one.in_place for one in baseline.rows} == {False, True}


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("2.17.6_all_reduce.txt", (MEANS, "wrong data in 1 result")),
        ("2023_reduce_scatter_perf.unchecked.txt", (MEANS,)),
    ],
)
def test_what_a_person_should_know_is_noted(name: str, notes: tuple[str, ...]) -> None:
    assert read(str(RECORDED[0].parent / name)).notes == notes


def test_a_coefficient_of_variation_becomes_a_spread() -> None:
    path = next(path for path in RECORDED if path.name == "2.19.6_all_reduce.per_iteration.txt")
    line = next(line for line in path.read_text().splitlines() if line.startswith("        1024"))
    found = of(read(str(path)).rows[0])
    assert found.iqr / found.p50 == pytest.approx(1.35 * float(line.split()[12]) / 100)


@pytest.mark.parametrize(
    "prefix",
    ["", "[1,0]<stdout>:", " 0: ", "0: ", "[rank0]:", "    ", "[pod/launcher-x] ", "2026-03-02 10:15:20,123 | "],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_a_launcher_puts_before_a_line_is_no_part_of_it(tmp_path: Path, prefix: str, end: str) -> None:
    text = "".join(prefix + one + end for one in (HEADER + ROW + line(2**37, times=(1e6, 2e6))).splitlines())
    assert {key: p50_s for key, (p50_s, _) in times(read_text(tmp_path, text)).items()} == pytest.approx(
        {
            ("all_reduce", 2**20, "float32", False): 100e-6,
            ("all_reduce", 2**20, "float32", True): 125e-6,
            ("all_reduce", 2**37, "float32", False): 1.0,
            ("all_reduce", 2**37, "float32", True): 2.0,
        }
    )


@pytest.mark.parametrize(
    ("before", "name", "op", "notes"),
    [
        ("", "all_gather_perf.txt", "all_gather", (MEANS,)),
        ("", "run.log", "all_reduce", (ASSUMED, MEANS)),
        ("# Collective test starting: reduce_scatter_perf\n", "run.log", "reduce_scatter", (MEANS,)),
        ("$ ./build/alltoall_perf -b 8\n", "run.log", "all_to_all", (MEANS,)),
        ("+ srun sendrecv_perf_mpi -g 1\n", "all_reduce_perf.txt", "sendrecv", (MEANS,)),
        # A build that comes before says nothing.
        ("Linking build/all_reduce_perf\nLinking build/reduce_perf\n", "run.log", "all_reduce", (ASSUMED, MEANS)),
        (
            "Linking build/all_reduce_perf\n# Collective test starting: reduce_perf\n",
            "run.log",
            "reduce",
            (MEANS,),
        ),
    ],
)
def test_the_collective_is_the_one_that_was_started(
    tmp_path: Path, before: str, name: str, op: str, notes: tuple[str, ...]
) -> None:
    baseline = read_text(tmp_path, before + HEADER + ROW, name)
    assert ({row.op for row in baseline.rows}, baseline.notes) == ({op}, notes)


def test_several_collectives_may_stand_in_one_file(tmp_path: Path) -> None:
    text = "".join(
        f"# Collective test starting: {op}\n{HEADER}{ROW}# Collective test concluded: {op}\n"
        for op in ("all_reduce_perf", "all_gather_perf", "alltoallv_perf")
    )
    assert [row.op for row in read_text(tmp_path, text).rows[::2]] == ["all_reduce", "all_gather", "all_to_allv"]


def test_what_reduces_nothing_is_never_taken_for_an_all_reduce(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"for example all_gather_perf\.txt"):
        read_text(tmp_path, HEADER + line(redop="none"), "run.log")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *[("float", "float32"), ("half", "float16"), ("bfloat16", "bfloat16"), ("double", "float64")],
        *[("int8", "int8"), ("uint8", "uint8"), ("int32", "int32"), ("uint32", "uint32")],
        *[("int64", "int64"), ("uint64", "uint64")],
        *[("f8e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2"), ("float4", "float4")],
    ],
)
def test_types_have_the_names_of_torch(tmp_path: Path, theirs: str, ours: str) -> None:
    baseline = read_text(tmp_path, HEADER + line(type_=theirs))
    assert [row.dtype for row in baseline.rows] == [ours, ours]


ONE_GPU = "#  Rank  0 Group  0 Pid  4100 on     node0 device  0 [0x19] NVIDIA H100 80GB HBM3\n"


@pytest.mark.parametrize(
    ("ranks", "world_size", "device"),
    [
        ("", None, None),
        (ONE_GPU, 1, "NVIDIA H100 80GB HBM3"),
        # Built without MPI: each process runs alone, and prints that.
        (ONE_GPU + ONE_GPU, 1, "NVIDIA H100 80GB HBM3"),
        (
            ONE_GPU + ONE_GPU.replace("Rank  0", "Rank  1").replace("H100", "H200"),
            2,
            "NVIDIA H100 80GB HBM3, NVIDIA H200 80GB HBM3",
        ),
        # NCCL_TESTS_SPLIT: two groups of two side by side.
        (
            "".join(ONE_GPU.replace("Rank  0 Group  0", f"Rank {rank:2d} Group {rank % 2:2d}") for rank in range(4)),
            2,
            "NVIDIA H100 80GB HBM3",
        ),
        ("#   Rank  0 Pid  21284 on deep device  0 [0000:2f:00.0] AMD Instinct MI100\n", 1, "AMD Instinct MI100"),
    ],
)
def test_ranks_and_devices_are_counted(tmp_path: Path, ranks: str, world_size: int | None, device: str | None) -> None:
    baseline = read_text(tmp_path, ranks + HEADER + ROW)
    assert (baseline.world_size, baseline.device) == (world_size, device)


def test_runs_of_different_sizes_are_not_mixed(tmp_path: Path) -> None:
    two = ONE_GPU + ONE_GPU.replace("Rank  0", "Rank  1")
    assert "runs of 1 and 2 ranks" in refusal(tmp_path, ONE_GPU + HEADER + ROW + two + HEADER + ROW)


@pytest.mark.parametrize(
    ("line", "made_by"),
    [
        ("# nccl-tests version 2.19.6 nccl-headers=23003 nccl-library=23003\n", "nccl-tests 2.19.6"),
        ("rccl-tests: Version develop:83d38d9\n", "rccl-tests develop:83d38d9"),
        ("NCCL version 2.18.5+cuda12.2\n", "nccl-tests"),
    ],
)
def test_the_version_is_that_of_the_tests(tmp_path: Path, line: str, made_by: str) -> None:
    assert read_text(tmp_path, line + HEADER + ROW).made_by == made_by


TORN = "skipped {} result{}: size, time and bandwidth do not match"


@pytest.mark.parametrize(
    ("row", "taken", "note"),
    [
        (ROW, 0, "skipped 2 results: the same was measured before"),
        (line(2**21).replace("100.00", "   nan").replace("125.00", "  -125"), 0, TORN.format(2, "s")),
        (line(2**21).replace("100.00", "     0").replace("125.00", "  1e-9"), 0, TORN.format(2, "s")),
        (line(2**21).replace("36.70", "  inf"), 1, "skipped 1 result: implausible numbers"),
        (line(2**21).replace("36.70", "   -1"), 1, "skipped 1 result: implausible numbers"),
        # Another rank spoke in the middle of a line.
        (line(2**21).replace("sum", "[0] NCCL sum"), 0, TORN.format(2, "s")),
        (line(2**21).replace(" -1 ", " -1node0:1:2 [0] NCCL INFO comm 0x55 rank 0\n"), 0, TORN.format(2, "s")),
        (line(2**21)[:78] + "\n", 1, ""),
        (line(2**61, times=(1e9, 1e9)), 0, "skipped 2 results: implausible numbers"),
        (line(10**30).replace("1" + "0" * 30, "9" * 400), 0, ""),
    ],
)
def test_a_row_that_makes_no_sense_costs_itself_alone(tmp_path: Path, row: str, taken: int, note: str) -> None:
    baseline = read_text(tmp_path, HEADER + ROW + row + line(2**22))
    assert [one.size_bytes for one in baseline.rows] == [2**20, 2**20, *[2**21] * taken, 2**22, 2**22]
    assert baseline.notes == (MEANS, *filter(None, [note]))


def test_a_time_of_the_cpu_is_no_time_of_the_collective(tmp_path: Path) -> None:
    assert "unknown format" in refusal(tmp_path, HEADER.replace("   time", "cputime") + ROW)


# ---- JSON


TIMES = {"p50": 1e-6, "p99": 2e-6, "min": 1e-6, "max": 2e-6, "mean": 1.1e-6, "iqr": 2.5e-7}


def ours(**changes: object) -> dict[str, Any]:
    result: dict[str, object] = {
        **{"op": "all_gather", "size_bytes": 1024, "count": 256, "dtype": "float32", "in_place": True},
        **{"iterations": 20, "algbw_bytes_per_s": 1e9, "busbw_bytes_per_s": 0.5e9, "wrong": 0},
        "time_s": TIMES,
        "skipped": "",
    }
    data: dict[str, object] = {
        "world_size": 2,
        "device": "cuda",
        "device_name": "NVIDIA H100",
        "stat": "p50",
        "results": [result],
    }
    for key, value in changes.items():
        (result if key in result else data)[key] = value
    return {"schema": "distdiag/1", "version": "0.1.0", "command": "allreduce-bench", "verdict": "ok", "data": data}


def test_a_document_of_ours_is_read(tmp_path: Path) -> None:
    baseline = read_text(tmp_path, json.dumps(ours()))
    assert figures(baseline.rows[0]) == ("all_gather", 1024, "float32", True, 1e-6, 0.5)
    assert replace(baseline, rows=()) == Baseline(
        rows=(), made_by="distdiag 0.1.0", world_size=2, device="NVIDIA H100", notes=()
    )


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"device_name": None}, "device", "cuda"),
        ({"device_name": None, "device": ""}, "device", None),
        ({"world_size": 0}, "world_size", None),
        ({"wrong": 7}, "notes", ("wrong data in 1 result",)),
        ({"wrong": None}, "notes", ()),
        ({"stat": "min"}, "notes", ("its bandwidths are of min times, not of medians",)),
    ],
)
def test_less_usual_documents_of_ours_are_read(
    tmp_path: Path, changes: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(read_text(tmp_path, json.dumps(ours(**changes))), field) == value


def test_rows_that_were_not_measured_are_counted(tmp_path: Path) -> None:
    document = ours()
    document["data"]["results"].append(document["data"]["results"][0] | {"size_bytes": 4096, "time_s": None})
    baseline = read_text(tmp_path, json.dumps(document))
    assert (len(baseline.rows), baseline.notes) == (1, ("skipped 1 result: not measured",))


# ---- refused arguments


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("hello\n", "unknown format"),
        (ROW, "unknown format"),
        ("\x00" * 100, "unknown format"),
        (HEADER, "its list of results is empty"),
        (HEADER + ROW.replace("float", "float [0] NCCL"), "do not match"),
        ("[1, 2]", "unknown format"),
        ('{"schema": 1}', "unknown format"),
        ('{"a": 1}', "schema none, command none"),
        ('{"schema": "distdiag/1", "command": "ports"}', "command ports"),
        ('{"schema": "distdiag/2", "command": "allreduce-bench"}', "schema distdiag/2"),
        ('{"schema": "distdiag/1", "command": "allreduce-bench", "version": "1", "error": {}}', "that run failed"),
        (json.dumps(ours(results=[])), "its list of results is empty"),
        (json.dumps(ours(time_s=None)), "skipped 1 result: not measured"),
        (json.dumps(ours(time_s=TIMES | {"p50": 0})), "implausible numbers"),
        (json.dumps(ours(time_s=TIMES | {"p50": -1.0})), "implausible numbers"),
        (json.dumps(ours(time_s=TIMES | {"p50": 1e9})), "implausible numbers"),
        (json.dumps(ours(time_s=TIMES | {"p50": float("nan")})), "not a complete JSON document"),
        (json.dumps(ours(busbw_bytes_per_s=-1)), "implausible numbers"),
        (json.dumps(ours(busbw_bytes_per_s=1e300)), "implausible numbers"),
        (json.dumps(ours(size_bytes=-4)), "implausible numbers"),
        (json.dumps(ours(size_bytes="4")), "Expected `int`"),
        (json.dumps(ours())[:-40], "not a complete JSON document"),
        (json.dumps(ours()) * 2, "not a complete JSON document"),
        ('{"a":' + "[" * 100_000, "not a complete JSON document"),
    ],
)
def test_what_holds_no_results_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "No such file"),
        ("/", "not a regular file"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(name)


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="Not a directory"):
        read(str(tmp_path / "file" / "x.json"))


def test_a_pipe_is_read_like_a_file() -> None:
    source, sink = os.pipe()
    os.write(sink, (HEADER + ROW).encode())
    os.close(sink)
    try:
        assert len(read(f"/dev/fd/{source}").rows) == 2
    finally:
        os.close(source)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_what_windows_writes_is_read(tmp_path: Path, encoding: str) -> None:
    assert len(read_text(tmp_path, (HEADER + ROW).encode(encoding)).rows) == 2
    assert len(read_text(tmp_path, json.dumps(ours()).encode(encoding)).rows) == 1


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_a_file_that_was_cut_off_has_fewer_rows_and_no_others(tmp_path: Path, path: Path) -> None:
    data = path.read_bytes()
    whole = times(read(str(path)))
    for size in range(0, len(data), 37):
        try:
            found = times(read_text(tmp_path, data[:size], path.name))
        except UsageError:
            continue
        assert all((p50_s, spread) in [whole[key], (whole[key][0], 0)] for key, (p50_s, spread) in found.items())


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, path: Path) -> None:
    dice = random.Random(path.name)
    whole = path.read_bytes()
    for _ in range(25):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 20)):
            at = dice.randrange(len(data))
            data[at : at + dice.randrange(3)] = dice.choice(
                [b"", b"\n", b" ", b"9", b"-", b"e", b"\xff", b'"', b"nan", b"["]
            )
        try:
            rows = read_text(tmp_path, bytes(data), path.name).rows
        except UsageError:
            continue
        assert all(1e-9 <= of(row).p50 <= 1e6 and 0 < row.size_bytes <= 2**60 for row in rows)
        assert all(0 <= (row.busbw_bytes_per_s or 0) < float("inf") for row in rows)


@pytest.mark.parametrize(
    "line",
    ["9" * 4_000_000, "# Rank 0 " * 400_000, "# Rank  0 device 0 [" * 200_000, "1 " * 2_000_000, "_perf" * 800_000],
)
def test_no_line_takes_long(tmp_path: Path, line: str) -> None:
    assert len(read_text(tmp_path, f"{line}\n{HEADER}{ROW}{line}\n").rows) == 2
