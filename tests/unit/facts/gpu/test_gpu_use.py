"""What the load of GPUs shows: read by stand-ins for the vendors' tools, and judged.

The answers were written by hand: nvidia-smi's after its manual, amd-smi's and rocm-smi's after the form that ROCm 6 and
7 print. No real GPU made them.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from loops import each
from pyspy_facts import process
from support import wait_until

from distdiag.diagnosis.gpu_use import GpuKind, GpuVerdict, judge_gpus
from distdiag.diagnosis.rank_gpus import RankGpu, rank_gpus
from distdiag.facts.gpu import gpu_use
from distdiag.facts.gpu.gpu_use import GpuUse
from distdiag.facts.process import procs
from distdiag.jobs.types import Helper, Member

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

UUID = "GPU-{:08x}-aaaa-bbbb-cccc-123456789abc"
GIB = 2**30


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that is first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def install(folder: Path, tool: str, answers: dict[str, Sequence[str]]) -> None:
    """Install a stand-in: for a command line that contains a key, it prints that key's answers one after the other."""
    cases = []
    for number, (words, texts) in enumerate(answers.items()):
        base = folder / f"{tool}.{number}"
        for turn, text in enumerate(texts, 1):
            base.with_name(f"{base.name}.{turn}").write_text(text)
        count = f"echo >> {base}; turn=$(wc -l < {base}); [ $turn -le {len(texts)} ] || turn={len(texts)}"
        cases.append(f"*{shlex.quote(words)}*) {count}; cat {base}.$((turn));;")
    program = folder / tool
    program.write_text(
        '#!/bin/sh\ncase "$*" in\n' + "\n".join(cases) + "\n*) echo unexpected: $* >&2; exit 2;;\nesac\n"
    )
    program.chmod(0o755)


def rows(*gpus: str) -> str:
    """Format lines of `--query-gpu`; each GPU is "utilization, power"."""
    return "".join(f"{index}, {UUID.format(index)}, {gpu}, 700.00, 70000\n" for index, gpu in enumerate(gpus))


def read() -> gpu_use.GpuReadings:
    return gpu_use.read(interval_s=0.01)


def test_a_node_of_sixteen_gpus_is_read_twice_with_its_processes(path: Path) -> None:
    first, second = ["100, 118.40"] * 16, ["100, 119.90"] * 16
    first[5], second[5] = "0, 74.10", "0, 75.20"
    apps = "".join(f"{UUID.format(index)}, {4000 + index}, 69000\n" for index in range(16))
    stray = "".join(f"{UUID.format(0)}, {4000 + index}, 520\n" for index in range(1, 16))
    install(path, "nvidia-smi", {"query-gpu": [rows(*first), rows(*second)], "query-compute-apps": [stray + apps]})
    found = read()
    assert (found.error, len(found.gpus)) == ("", 16)
    gpu = found.gpus[5]
    assert (gpu.index, gpu.uuid, gpu.busy_percent, gpu.power_w) == (5, UUID.format(5), (0, 0), (74.1, 75.2))
    assert (gpu.limit_w, gpu.memory_used_bytes, gpu.pids) == (700.0, 70000 * 2**20, (4005,))
    assert found.gpus[0].pids[0] == 4000
    assert len(found.gpus[0].pids) == 16


@pytest.mark.parametrize("words", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A", "ERR!", "", "-1", "1e9999"])
def test_a_value_that_the_driver_does_not_give_is_unknown(path: Path, words: str) -> None:
    text = f"0, {UUID.format(0)}, {words}, {words}, {words}, {words}\n"
    install(path, "nvidia-smi", {"query-gpu": [text], "query-compute-apps": [f"{UUID.format(0)}, 77, [N/A]\n"]})
    (gpu,) = read().gpus
    assert gpu == GpuUse(0, UUID.format(0), (None, None), (None, None), None, None, (77,))


def test_processes_of_mig_devices_belong_to_the_gpu_that_is_divided(path: Path) -> None:
    mig = "MIG-11111111-2222-3333-4444-555555555555"
    listed = (
        f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {UUID.format(0)})\n"
        f"GPU 1: NVIDIA H100 80GB HBM3 (UUID: {UUID.format(1)})\n"
        f"  MIG 3g.40gb     Device  0: (UUID: {mig})\n"
    )
    install(
        path,
        "nvidia-smi",
        {
            "query-gpu": [rows("100, 110.0", "[N/A], 160.0")],
            "query-compute-apps": [f"{mig}, 42, 900\n"],
            "-L": [listed],
        },
    )
    whole, divided = read().gpus
    assert (whole.pids, divided.pids, divided.busy_percent) == ((), (42,), (None, None))


def test_a_gpu_that_falls_off_the_bus_between_the_readings_is_unknown_in_the_second(path: Path) -> None:
    lost = rows("100, 110.0") + "Unable to determine the device handle for GPU1: 0000:41:00.0: GPU is lost\n"
    install(path, "nvidia-smi", {"query-gpu": [rows("100, 110.0", "0, 70.0"), lost], "query-compute-apps": [""]})
    found = read()
    assert [gpu.busy_percent for gpu in found.gpus] == [(100, 100), (0, None)]
    assert found.error == "nvidia-smi: Unable to determine the device handle for GPU1: 0000:41:00.0: GPU is lost"


WEDGED = """#!/bin/sh
case "$*" in *--query-gpu*) [ -e {folder}/asked ] || {{ touch {folder}/asked; cat {folder}/answer; exit; }};; esac
sleep 600 &
echo $$ $! > {folder}/pids
wait
"""


@pytest.mark.parametrize("answer", ["", rows("100, 110.0", "0, 70.0")], ids=["at once", "in the second reading"])
def test_a_wedged_driver_is_left_behind_and_its_tool_is_killed(path: Path, answer: str) -> None:
    (path / "answer").write_text(answer)
    if not answer:
        (path / "asked").touch()
    program = path / "nvidia-smi"
    program.write_text(WEDGED.format(folder=path))
    program.chmod(0o755)
    install(path, "amd-smi", {})
    found = read()
    assert found.error == "nvidia-smi did not answer within 5 s: the driver may be wedged"
    assert [gpu.busy_percent for gpu in found.gpus] == ([(100,), (0,)] if answer else [])
    pids = [int(pid) for pid in (path / "pids").read_text().split()]
    wait_until(lambda: not any(map(_runs, pids)), 30, lambda: f"still running: {pids}")


def _runs(pid: int) -> bool:
    found = procs.read(pid)
    return found is not None and found.state != "Z"


def test_a_tool_that_fails_says_why_and_the_next_one_is_asked(path: Path) -> None:
    assert read().error == "none of nvidia-smi, amd-smi and rocm-smi is on this node's PATH"
    program = path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    program.chmod(0o755)
    assert read() == gpu_use.GpuReadings(error="nvidia-smi: No devices were found")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert read().error == "nvidia-smi ended with status 9"
    install(path, "rocm-smi", {"--showuse": [json.dumps({"card0": {"GPU use (%)": "3"}})]})
    assert [gpu.busy_percent for gpu in read().gpus] == [(3, 3)]


def amd_metric(*gpus: tuple[int, int], wrapped: bool) -> str:
    entries: list[dict[str, Any]] = [
        {
            "gpu": index,
            "usage": {"gfx_activity": {"value": busy, "unit": "%"}, "vcn_activity": ["N/A", "N/A"]},
            "power": {"socket_power": {"value": power, "unit": "W"}, "throttle_status": "N/A"},
            "mem_usage": {"total_vram": {"value": 196288, "unit": "MB"}, "used_vram": {"value": 1024, "unit": "MB"}},
        }
        for index, (busy, power) in enumerate(gpus)
    ]
    return json.dumps({"gpu_data": entries} if wrapped else entries, indent=4)


@pytest.mark.parametrize("wrapped", [False, True], ids=["ROCm 6", "ROCm 7"])
def test_amd_smi_is_read_in_both_its_forms(path: Path, *, wrapped: bool) -> None:
    limit: dict[str, Any] = {"socket_power": {"value": 750, "unit": "W"}, "max_power": {"value": 750, "unit": "W"}}
    if wrapped:
        limit = {"ppt0": {"socket_power_limit": {"value": 750, "unit": "W"}}, "ppt1": {"socket_power_limit": "N/A"}}
    static: Any = [{"gpu": 0, "limit": limit}, {"gpu": 1, "limit": "N/A"}]
    used = {"name": "python", "pid": 31, "memory_usage": {"vram_mem": {"value": 9 * GIB, "unit": "B"}}}
    users = [
        {"gpu": 0, "process_list": [{"process_info": used}]},
        {"gpu": 1, "process_list": [{"process_info": "No running processes detected"}]},
    ]
    warning = "WARNING: User is missing the following required groups: render, video.\n"
    readings = [amd_metric((100, 160), (0, 135), wrapped=wrapped), amd_metric((100, 162), (0, 136), wrapped=wrapped)]
    install(
        path,
        "amd-smi",
        {
            "metric --usage --power --mem-usage --json": [warning + text for text in readings],
            "static --limit --json": [json.dumps({"gpu_data": static} if wrapped else static)],
            "process --json": [json.dumps(users)],
        },
    )
    spins, idle = read().gpus
    assert (spins.busy_percent, spins.power_w, spins.limit_w, spins.pids) == ((100, 100), (160, 162), 750, (31,))
    assert (idle.busy_percent, idle.power_w, idle.limit_w, idle.pids) == ((0, 0), (135, 136), None, ())
    assert idle.memory_used_bytes == GIB


def test_rocm_smi_is_read_under_both_its_names_for_power(path: Path) -> None:
    cards = {
        "card0": {
            "Average Graphics Package Power (W)": "238.0",
            "Max Graphics Package Power (W)": "560.0",
            "GPU use (%)": "100",
            "VRAM Total Used Memory (B)": str(GIB),
        },
        "card1": {"Average Graphics Package Power (W)": "N/A (Secondary die)", "GPU use (%)": "0"},
        "card2": {"Current Socket Graphics Package Power (W)": "131.5", "GPU use (%)": "N/A"},
        "system": {"Driver version": "6.12.12"},
    }
    install(path, "rocm-smi", {"--showuse": [json.dumps(cards)]})
    first, second, third = read().gpus
    assert first == GpuUse(0, "", (100, 100), (238.0, 238.0), 560.0, GIB)
    assert (second.busy_percent, second.power_w) == ((0, 0), (None, None))
    assert (third.busy_percent, third.power_w) == ((None, None), (131.5, 131.5))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "null", '{"gpu_data": 3}', '[{"gpu": "x"}, 7]', '{"card0": 1}', "Segmentation fault\n"],
)
def test_a_broken_answer_is_an_error_and_no_gpu(path: Path, text: str) -> None:
    for tool in ("nvidia-smi", "amd-smi", "rocm-smi"):
        install(path, tool, {"": [text]})
        found = read()
        assert found.gpus == ()
        assert found.error


def member(rank: int, *visible: str, pid: int = 0, host: str = "n1", local_rank: int | None = None) -> Member:
    own = process(pid or 4000 + rank, rank, gpu=True, visible_gpus=visible)
    return Member(
        host=host, rank=rank, local_rank=rank if local_rank is None else local_rank, process=own, watched=None
    )


def gpu(index: int, *pids: int, busy: int = 100, power: float = 120.0) -> GpuUse:
    return GpuUse(index, UUID.format(index), (busy, busy), (power, power + 1), 700.0, None, pids)


def assigned(members: Sequence[Member], *gpus: GpuUse) -> dict[int, tuple[int, bool, bool]]:
    """Return index, by_pid and shared of each rank's GPU."""
    found = rank_gpus(members, {"n1": gpus})
    return {row.rank: (row.gpu.index, row.by_pid, row.shared) for row in found.values() if row.rank is not None}


def test_a_pid_proves_whose_gpu_it_is_although_gpu_0_has_a_context_of_every_rank() -> None:
    found = assigned([member(0), member(1)], gpu(0, 4000, 4001), gpu(1, 4001))
    assert found == {0: (0, True, False), 1: (1, True, False)}
    # a worker of the rank is no stranger, a process of another job is one
    worker = replace(member(0), helpers=(Helper(process=process(5000), watched=None),))
    assert assigned([worker, member(1)], gpu(0, 4000, 5000), gpu(1, 4001, 99)) == {
        0: (0, True, False),
        1: (1, True, True),
    }


@each(
    "visible, local_rank, index",
    [
        ((), 2, 2),
        (("3,2,1,0",), 0, 3),
        (("2",), 1, 2),  # each rank was given one GPU
        ((UUID.format(3)[:12],), 0, 3),
        (("1,2,3", "2,1"), 1, 2),  # ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES
        (("0,7,1",), 1, 0),  # CUDA ends the list at a GPU that does not exist
        (("",), 0, None),
        (("MIG-1111",), 0, None),
        ((), 4, None),
    ],
)
def test_without_pids_local_rank_and_visible_devices_make_a_gpu_likely(
    visible: tuple[str, ...], local_rank: int, index: int | None
) -> None:
    found = assigned([member(0, *visible, local_rank=local_rank)], *map(gpu, range(4)))
    assert found == ({} if index is None else {0: (index, False, False)})


def test_an_equal_pid_of_a_process_without_a_gpu_proves_nothing() -> None:
    """In a container an old driver lists the pids of the host."""
    on_cpu = member(1)
    assert on_cpu.process is not None
    assert assigned([replace(on_cpu, process=replace(on_cpu.process, gpu=False))], gpu(0), gpu(1, 4001)) == {}
    # amd-smi may list every process on every GPU: the local rank decides, and it is no proof
    both = (gpu(0, 4000, 4001), gpu(1, 4000, 4001))
    assert assigned([member(0), member(1)], *both) == {0: (0, False, False), 1: (1, False, False)}


def job(*gpus: GpuUse, by_pid: bool = True) -> dict[tuple[str, int], RankGpu]:
    return {("n1", 100 + rank): RankGpu(rank=rank, gpu=own, by_pid=by_pid) for rank, own in enumerate(gpus)}


def judged(*gpus: GpuUse) -> GpuVerdict:
    verdict = judge_gpus(job(*gpus))
    assert verdict is not None
    return verdict


SPINS = gpu(0)
IDLE = gpu(0, busy=0, power=74.0)
COMPUTES = gpu(0, busy=99, power=640.0)


def test_the_rank_with_the_idle_gpu_has_not_launched_the_collective() -> None:
    verdict = judged(*[SPINS] * 5, IDLE, *[SPINS] * 2)
    assert (verdict.kind, verdict.named, len(verdict.spinning)) == (GpuKind.ONE_IDLE, (("n1", 105),), 7)
    assert verdict.says == (
        "the GPU of rank 5 is idle, and 7 others are 100 % busy at low power, as in a collective that waits: rank 5 "
        "has not launched it"
    )
    assert verdict.evidence == (
        "ranks 0-4,6-7: 100 % busy, 120-121 W of 700 W",
        "rank 5: 0 % busy, 74-75 W of 700 W",
    )


def test_gpus_that_all_spin_are_all_idle_or_compute_accuse_no_rank() -> None:
    assert (judged(*[SPINS] * 8).kind, judged(*[SPINS] * 8).named) == (GpuKind.ALL_BUSY_LOW_POWER, ())
    assert (judged(*[IDLE] * 8).kind, judged(*[IDLE] * 8).named) == (GpuKind.ALL_IDLE, ())
    assert (judged(*[COMPUTES] * 8).kind, judged(*[COMPUTES] * 8).named) == (GpuKind.COMPUTING, ())
    # a single busy GPU among idle GPUs may itself have progressed
    assert (judged(SPINS, *[IDLE] * 3).kind, judged(SPINS, *[IDLE] * 3).named) == (GpuKind.MIXED, ())


def test_the_others_wait_for_a_gpu_that_computes() -> None:
    verdict = judged(SPINS, COMPUTES, IDLE)
    assert (verdict.kind, verdict.named) == (GpuKind.COMPUTING, (("n1", 101),))
    assert verdict.says.startswith("the GPU of rank 1 computes at high power, and 2 others wait: ")


@each(
    "unclear",
    [
        replace(SPINS, busy_percent=(100, 0)),
        replace(SPINS, busy_percent=(100,), power_w=(120.0,)),
        replace(SPINS, busy_percent=(100, None)),
        replace(SPINS, power_w=(120.0, 650.0)),
        replace(SPINS, power_w=(350.0, 350.0)),
        replace(SPINS, limit_w=None),
        replace(SPINS, limit_w=0.0),
    ],
)
def test_readings_that_do_not_agree_make_no_claim(unclear: GpuUse) -> None:
    assert judged(unclear, SPINS, SPINS).kind is GpuKind.MIXED
    assert judged(unclear, SPINS, IDLE).named == ()


def test_too_little_to_judge_is_none_or_not_sure() -> None:
    assert judge_gpus(job(SPINS)) is None
    assert judge_gpus(job(replace(SPINS, busy_percent=(None, None)), replace(SPINS, busy_percent=()))) is None
    likely = judge_gpus(job(SPINS, IDLE, by_pid=False))
    assert likely is not None
    assert (likely.kind, likely.is_sure) == (GpuKind.ONE_IDLE, False)
    assert likely.evidence[-1] == "ranks 0-1: which GPU is theirs is deduced from local ranks and visible devices"
    shared = {key: replace(row, shared=True) for key, row in job(SPINS, IDLE).items()}
    verdict = judge_gpus(shared)
    assert verdict is not None
    assert (verdict.kind, verdict.evidence[-1]) == (GpuKind.MIXED, "ranks 0-1: other processes use the same GPU")


@pytest.mark.parametrize(
    ("watts", "limit", "busy", "source"),
    [
        (152, 700, 100, "H100: NVIDIA/nccl#1550"),
        (77, 400, 100, "A100: pytorch/pytorch#118369"),
        (120, 600, 100, "RTX PRO 6000: local-inference-lab/rtx6kpro#15"),
    ],
)
def test_gpus_that_were_seen_to_hang_in_nccl_are_called_spinning(
    watts: float, limit: float, busy: int, source: str
) -> None:
    seen = GpuUse(0, "", (busy, busy), (watts, watts), limit)
    assert judged(seen, seen).kind is GpuKind.ALL_BUSY_LOW_POWER, source


def test_a_thousand_ranks_and_ranks_that_are_unknown_fit_a_line() -> None:
    verdict = judged(*[IDLE if rank % 7 == 0 else SPINS for rank in range(1000)])
    assert max(map(len, verdict.evidence)) < 160
    unknown = {key: replace(row, rank=None) for key, row in job(SPINS, SPINS, IDLE).items()}
    assert "pid 102 (n1)" in judge_gpus(unknown).says  # type: ignore[union-attr]


def test_only_the_variables_that_choose_gpus_are_read() -> None:
    entries = [b"CUDA_VISIBLE_DEVICES=0,1", b"HIP_VISIBLE_DEVICES=1", b"ROCR_VISIBLE_DEVICES=", b"CUDA_HOME=/secret"]
    assert set(procs.wanted(entries)) == {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
