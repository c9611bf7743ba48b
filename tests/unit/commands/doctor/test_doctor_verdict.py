"""doctor: GPU health from recorded texts, the odd node out, and the verdict; on facts alone."""

from __future__ import annotations

import io
import re
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loops import each
from rich.console import Console

import distdiag.commands.doctor
from distdiag.cluster.targets import Cluster
from distdiag.commands.doctor.collect import Clock, Disks, Gpus, Jobs, KernelLog, Limit, NodeNetwork, Software, System
from distdiag.commands.doctor.diagnose import diagnose
from distdiag.commands.doctor.subcommand import _with_clock
from distdiag.commands.doctor.types import NodeDoctor, NodePaths, Request
from distdiag.commands.doctor.view import doctor_view
from distdiag.diagnosis.finding_ids import checks
from distdiag.diagnosis.hosts.drift import grouped
from distdiag.facts.cuda.driver import Answer, Driver, Gpu
from distdiag.facts.gpu import gpu_health
from distdiag.facts.gpu.gpu_health import GpuHealth, GpuProcess, Health
from distdiag.facts.host import kernel_signs
from distdiag.facts.host.cgroups import Cgroup
from distdiag.facts.host.file_systems import Space
from distdiag.facts.logs.line_patterns import Patterns
from distdiag.facts.network import link_counters
from distdiag.facts.network.interfaces import Names
from distdiag.facts.network.link_counters import Counter, Counters
from distdiag.facts.network.nics import IbPort, Nic
from distdiag.knowledge import xids
from distdiag.knowledge.known_lines import for_kernels
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from distdiag.commands.doctor.types import Doctor
    from distdiag.report import Finding, Report

RECORDED = Path(__file__).parents[3] / "recorded" / "gpu_health"
GIB = 2**30
ASKED = Request(program="distdiag", cluster=Cluster())


def text(name: str) -> str:
    return (RECORDED / name).read_text()


def system(**more: object) -> System:
    limits = (Limit("memlock", None, None), Limit("nofile", 65536, 65536), Limit("core", None, None))
    plain = System(
        kernel="6.8.0",
        arch="x86_64",
        product="",
        up_s=1e5,
        limits=limits,
        may_lock=False,
        in_step=True,
        cpus=64,
        cpus_online=64,
        memory_bytes=503 * GIB,
        available_bytes=400 * GIB,
        cgroup=Cgroup(),
        shm=Space("/dev/shm", 250 * GIB, 250 * GIB),
    )
    return replace(plain, **more)  # type: ignore[arg-type]


def network(**more: object) -> NodeNetwork:
    eth0 = Nic("eth0", "ethernet", ("10.0.0.1/24",), True, True, 1500, 10**10, True)
    names = Names("n", ("10.0.0.1",), "", "n")
    plain = NodeNetwork((eth0,), (), names, Counters(), None, "32768-60999")
    return replace(plain, **more)  # type: ignore[arg-type]


def gpus(health: Health, *, hardware: int | None = None, answer: Answer | None = None) -> Gpus:
    count = len(health.gpus)
    present = tuple(Gpu(gpu.index, gpu.name, "9.0") for gpu in health.gpus)
    driver = Driver(
        kernel="565.57.01",
        kernel_file="",
        library="",
        library_path="",
        hardware=count if hardware is None else hardware,
        devices=count,
        container="",
        wsl=False,
        installed=(),
        fabric_manager="active",
        answer=answer or Answer(nvml_status=0, cuda_status=0, cuda_count=count, present=present, visible=present),
    )
    return Gpus(driver, health, 20.0)


DISKS = Disks((Space("/tmp", 100 * GIB, 50 * GIB, 1000, 900, "ext4", "/dev/sda1"),), ("/tmp",))


def node(host: str = "node1", **more: object) -> NodeDoctor:
    plain = NodeDoctor(
        host=host,
        clock=Clock(0.0, 0.001),
        system=system(),
        disks=DISKS,
        network=network(),
        software=Software("python3", python="3.12.1", torch="2.9.1+cu128", cuda="12.8", nccl="2.27.5", glibc="2.39"),
        gpus=gpus(Health()),
        kernel=KernelLog(()),
    )
    return replace(plain, **more)  # type: ignore[arg-type]


def judged(*nodes: NodeDoctor, request: Request = ASKED) -> Report[Doctor]:
    return diagnose(request, Gathered(facts=list(nodes)))


def found(report: Report[Doctor]) -> dict[str, Finding]:
    """All that is no remark, by id without the command's name."""
    return {finding.id.removeprefix("doctor."): finding for finding in report.findings if finding.level != "info"}


def test_paths_that_were_not_tested_are_not_fit() -> None:
    report = judged(node("a"), node("b"))
    assert report.data.unchecked[0].startswith("connections between the nodes: distdiag ports")
    tried = judged(
        node("a", paths=NodePaths(address="10.0.0.1", peers=("b",))),
        node("b", paths=NodePaths(address="10.0.0.2", peers=("a",))),
    )
    assert tried.verdict == "unknown"
    assert found(tried)["paths-untested"].title == "no result for 2 paths between a,b"
    assert not tried.data.unchecked[0].startswith("connections")


def test_a_healthy_node_is_fit() -> None:
    for nodes in ((node(),), (node("a"), node("b"), node("c"))):
        report = judged(*nodes)
        assert (report.verdict, report.data.fit, found(report)) == ("ok", "fit", {})


def remarks(report: Report[Doctor]) -> dict[str, Finding]:
    return {finding.id.removeprefix("doctor."): finding for finding in report.findings if finding.level == "info"}


def shown(report: Report[Doctor], *, verbose: bool = False) -> str:
    screen = io.StringIO()
    for part in doctor_view(report, verbose=verbose):
        Console(file=screen, width=80).print(part)
    return screen.getvalue()


def test_a_host_name_that_is_loopback_is_a_remark_of_one_node_and_a_warning_of_several() -> None:
    lo = Nic("lo", "loopback", ("127.0.0.1/8",), True, True, 65536, None, False)
    local = network(nics=(lo, *network().nics), names=Names("vm", ("127.0.0.1",), "", "vm"))
    alone = judged(node(network=local))
    remark = remarks(alone)["gloo-ifname"]
    assert remark.title == "Gloo would use lo, which reaches no other node: the host name vm resolves to 127.0.0.1"
    several = judged(node("a", network=local), node("b"))
    warning = found(several)["gloo-ifname"]
    assert (warning.level, warning.title) == ("warn", "a: Gloo would use lo: only loopback: it reaches no other node")
    for finding in (remark, warning):
        assert finding.fix is not None
        assert "/etc/hosts" in finding.fix.text
        assert finding.fix.commands == ("export NCCL_SOCKET_IFNAME='=eth0' GLOO_SOCKET_IFNAME=eth0",)


def test_nodes_without_a_gpu_are_fit_for_cpu_jobs_only() -> None:
    without = replace(gpus(Health(error="no NVIDIA driver")), driver=replace(gpus(Health()).driver, kernel=""))
    report = judged(node(gpus=without))
    assert report.summary == "1 node fit; no NVIDIA GPU here: checked for CPU and Gloo only"
    assert report.data.unchecked == ("Gloo under load: distdiag gpu-test",)
    report = judged(node("a", gpus=gpus(h100())), request=replace(ASKED, cluster=Cluster(hosts="a,b[1-2]")))
    assert report.summary == "1 node fit"
    assert report.data.unchecked == ("GPUs and NCCL under load: distdiag gpu-test --hosts 'a,b[1-2]'",)


def test_what_the_kernel_killed_and_what_runs_is_said_in_words_and_details_by_verbose() -> None:
    line = kernel_signs.KernelLine("oom", "Memory cgroup out of memory: Killed process 7 (python) total-vm:9kB", 2404.0)
    report = judged(node(kernel=KernelLog((line,)), jobs=Jobs((11, 12), 3.14)))
    killed, runs = remarks(report)["log.oom"], remarks(report)["job-running"]
    assert killed.title == "the OOM killer killed a process 40 min ago: pid 7 (python), in a memory cgroup"
    assert runs.title.startswith("2 ranks are running here (pids 11, 12), load 3.1 on 64 CPUs")
    assert (report.data.fit, "dmesg" in shown(report), "dmesg" in shown(report, verbose=True)) == ("fit", False, True)
    assert "-v: details and fixes of these" in shown(report)


# GPU health, from texts of real machines.


def h100(*changes: tuple[str, str], count: int = 1) -> Health:
    """The recorded H100, as several GPUs; with changes the last of them is a generated text."""
    head, _, body = text("h100_healthy.txt").partition("GPU 00000000:18:00.0\n")
    last = body
    for old, new in changes:
        assert old in last
        last = last.replace(old, new, 1)
    bodies = [*[body] * (count - 1), last]
    blocks = (f"GPU 00000000:{0x18 + number:02X}:00.0\n{own}\n" for number, own in enumerate(bodies))
    return gpu_health.parse(head + "".join(blocks))


def test_a_healthy_h100_is_read_whole_and_fit() -> None:
    (gpu,) = h100().gpus
    assert (gpu.name, gpu.address, gpu.recovery) == ("NVIDIA H100 80GB HBM3", "00000000:18:00.0", "None")
    assert (gpu.uncorrectable, gpu.slowdowns, gpu.fabric) == (0, (), "Completed, Success")
    assert (gpu.power_limit_w, gpu.pcie_width, gpu.temperature_c, gpu.processes) == (700.0, "16x", 30, ())
    assert (gpu.pcie_width_max, gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_replays) == ("16x", 5, 5, 7)
    assert (gpu.clock_mhz, gpu.max_clock_mhz, gpu.power_w) == (345, 1980, 100.89)
    assert judged(node(gpus=gpus(h100(count=8)))).verdict == "ok"


SHIM = """#!/bin/sh
case "$*" in
"-q") cat "{folder}/h100_healthy.txt";;
"nvlink -s") sed 's/GPU 3/GPU 0/' "{folder}/nvlink_v100.txt";;
"nvlink -e") exit 3;;
esac
"""


def test_nvidia_smi_is_asked_and_one_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu_health.read(5.0).error == "nvidia-smi is not on this node's PATH"
    program.write_text(SHIM.format(folder=RECORDED))
    program.chmod(0o755)
    (gpu,) = gpu_health.read(20.0).gpus
    assert (gpu.name, gpu.links, gpu.inactive_links) == ("NVIDIA H100 80GB HBM3", 6, (3, 5))
    program.write_text("#!/bin/sh\nsleep 60\n")
    assert gpu_health.read(0.5).error == "nvidia-smi did not answer within 0.5 s"
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert gpu_health.read(20.0).error == "nvidia-smi: No devices were found"


def test_a_row_that_waits_for_a_reset_is_a_warning() -> None:
    health = gpu_health.parse(text("a100_remap_pending.txt"))
    finding = found(judged(node(gpus=gpus(health))))["gpu.remap-pending"]
    assert "GPU 0 (0000:10:1c.0, local rank 0)" in finding.title
    assert finding.fix is not None
    assert finding.fix.commands == ("sudo nvidia-smi --gpu-reset -i 0",)


@each(
    "change, id_, level",
    [  # generated: one line of the recorded text changed
        (("GPU Recovery Action                   : None", "GPU Recovery Action : Reset"), "gpu.reset-required", "fail"),
        (("Remapping Failure Occurred        : No", "Remapping Failure Occurred : Yes"), "gpu.remap-failed", "fail"),
        (("DRAM Uncorrectable            : 0", "DRAM Uncorrectable            : 2"), "gpu.ecc", "warn"),
        (("HW Thermal Slowdown           : Not Active", "HW Thermal Slowdown : Active"), "gpu.throttled", "warn"),
        (("State                             : Completed", "State : In Progress"), "gpu.fabric", "fail"),
        (("Current                   : 16x", "Current : 8x"), "gpu.pcie-width", "warn"),
        (("Replays Since Reset               : 7", "Replays Since Reset : 70123"), "gpu.pcie-replays", "warn"),
    ],
)
def test_what_nvidia_smi_says_of_one_of_eight(change: tuple[str, str], id_: str, level: str) -> None:
    report = judged(node("a"), node("b", gpus=gpus(h100(change, count=8))), node("c", gpus=gpus(h100(count=8))))
    finding = found(report)[id_]
    assert (finding.level, finding.where.hosts) == (level, ("b",))
    assert "GPU 7 (0000:1f:00.0, local rank 7" in finding.title
    assert report.data.exclude == ("b" if level == "fail" else "")


BUSY = (
    ("Gpu                               : 0 %", "Gpu : 100 %"),
    ("SM                                : 345 MHz", "SM : 1980 MHz"),
)
LOW = {
    "maximum SM clock": ("SM                                : 1980 MHz", "SM : 1755 MHz"),
    "application clock": ("Applications Clocks\n        Graphics                          : 1980 MHz",
                          "Applications Clocks\n        Graphics : 1410 MHz"),
    "power limit": ("Current Power Limit               : 700.00 W", "Current Power Limit : 500.00 W"),
}  # fmt: skip


@pytest.mark.parametrize(("label", "change"), LOW.items())
def test_a_limit_below_that_of_the_others_names_the_gpu_and_the_node(label: str, change: tuple[str, str]) -> None:
    others = [node(host, gpus=gpus(h100(count=8))) for host in "bc"]
    report = found(judged(node("a", gpus=gpus(h100(change, count=8))), *others))
    assert report["gpu.slower"].where.hosts == ("a",)
    assert f"GPU 7 (0000:1f:00.0, local rank 7): {label} is " in report["gpu.slower"].title
    assert (report["differs.gpus"].where.hosts, label in report["differs.gpus"].title) == (("a",), True)
    whole = found(judged(node("a", gpus=gpus(h100(change))), *(node(host, gpus=gpus(h100())) for host in "bc")))
    assert (whole["differs.gpus"].where.hosts, "gpu.slower" in whole) == (("a",), False)


def test_the_clock_of_a_busy_gpu_is_compared_with_that_of_busy_ones() -> None:
    def loaded(*clocks: int, percent: int = 100, watts: float = 300.0) -> Health:
        gpu = h100(*BUSY).gpus[0]
        gpu = replace(gpu, busy_percent=percent, power_w=watts)
        return Health(tuple(replace(gpu, index=at, clock_mhz=mhz) for at, mhz in enumerate(clocks)))

    low = found(judged(node("a", gpus=gpus(loaded(1980, 1935, 1200, 1980)))))["gpu.slower"]
    assert "GPU 2 (" in low.title
    assert "SM clock under load is 1200 MHz, but 1958 MHz on the other GPUs" in low.title
    for health in (loaded(1980, 1700, 1980), loaded(1980, 1200, 1980, percent=50), loaded(1980, 1200, 1980, watts=690)):
        assert not found(judged(node("a", gpus=gpus(health))))
    three = found(
        judged(*(node(host, gpus=gpus(loaded(mhz))) for host, mhz in (("a", 1980), ("b", 1200), ("c", 1950))))
    )
    assert three["differs.gpus"].where.hosts == ("b",)


def test_the_rank_of_a_gpu_is_told_where_every_node_has_as_many() -> None:
    bad = h100(("HW Thermal Slowdown           : Not Active", "HW Thermal Slowdown : Active"), count=8)
    report = judged(node("a", gpus=gpus(h100(count=8))), node("b", gpus=gpus(bad)))
    assert "local rank 7, rank 15" in found(report)["gpu.throttled"].title
    hidden = system(variables={"CUDA_VISIBLE_DEVICES": "7,6"})
    report = judged(node("a", gpus=gpus(bad), system=hidden))
    assert "GPU 7 (0000:1f:00.0, local rank 0)" in found(report)["gpu.throttled"].title


def test_words_of_a_driver_that_deprecated_them_want_no_reset() -> None:
    health = gpu_health.parse("GPU 00000000:18:00.0\n" + text("recovery_none.txt"))
    assert health.gpus[0].recovery == "None"
    assert not found(judged(node(gpus=gpus(health))))


def test_an_inactive_nvlink_is_judged_beside_the_other_gpus() -> None:
    v100 = Health(tuple(GpuHealth(index, f"00000000:1{index}:00.0", name="V100") for index in range(4)))
    own = text("nvlink_v100.txt")
    others = "".join(  # generated: the other GPUs of that machine, with all links
        own.replace("GPU 3", f"GPU {index}").replace("<inactive>", "25.781 GB/s") for index in range(3)
    )
    finding = found(judged(node(gpus=gpus(gpu_health.with_links(v100, others + own, "")))))["gpu.nvlink"]
    assert "GPU 3 (0000:13:00.0, local rank 3): NVLink 3, 5: inactive" in finding.title
    alone = gpu_health.with_links(v100, own.replace("GPU 3", "GPU 0"), "")
    assert "gpu.nvlink" not in found(judged(node(gpus=gpus(Health(alone.gpus[:1])))))
    # Cards without a bridge print this too: no fault unless some GPU has a link.
    b200 = Health(v100.gpus[:3])
    assert not found(judged(node(gpus=gpus(gpu_health.with_links(b200, text("nvlink_b200.txt"), "")))))


def test_a_gpu_that_does_not_answer_or_is_missing() -> None:
    lost = Answer(nvml_status=0, lost=(3,), present=(Gpu(0, "H100", "9.0"),))
    in_a_job = found(judged(node(gpus=gpus(h100(), answer=lost))))["gpu.missing"]
    assert (in_a_job.level, in_a_job.title) == ("unknown", "GPU 3 does not respond, or is not for this job")
    broken = found(judged(node(gpus=gpus(h100(), answer=replace(lost, broken=(3,))))))["gpu.missing"]
    assert (broken.level, broken.title) == ("fail", "GPU 3 does not respond")
    seven = gpus(h100(count=7), hardware=8)
    assert found(judged(node(gpus=seven, system=system(in_step=False))))["gpu.missing"].level == "fail"
    silent = gpus(Health(error="nvidia-smi did not answer within 20 s"), hardware=8, answer=Answer(stuck="cuInit"))
    assert {id_: finding.level for id_, finding in found(judged(node(gpus=silent))).items()} == {"gpu.hangs": "fail"}
    impatient = replace(silent, asked_s=2.0)
    assert found(judged(node(gpus=impatient)))["gpu.hangs"].level == "unknown"


def test_a_share_of_the_gpus_is_no_fault() -> None:
    """Of a job, or of a container: the bus has all of them, and NVML may open some."""
    two = gpus(h100(count=2), hardware=8)
    assert not found(judged(node(gpus=two)))
    others = Answer(nvml_status=0, lost=(2, 3), blocked=(2, 3), present=two.driver.answer.present)
    none = gpus(Health(error="nvidia-smi is not on this node's PATH"), hardware=8, answer=Answer())
    assert not found(judged(node(gpus=none)))
    shared = gpus(h100(count=2), hardware=8, answer=others)
    assert not found(judged(node(gpus=shared, system=system(in_step=False))))


def test_gpus_without_a_driver_are_a_warning() -> None:
    bare = gpus(Health(error="no NVIDIA driver"), hardware=8, answer=Answer())
    bare = replace(bare, driver=replace(bare.driver, kernel="", devices=0))
    assert set(found(judged(node(gpus=bare)))) == {"gpu.no-driver"}
    assert not found(judged(node(gpus=replace(bare, driver=replace(bare.driver, hardware=0)))))


def test_health_that_is_not_known_is_not_shown_as_fine() -> None:
    silent = "nvidia-smi did not answer within 20 s"
    answers = h100(count=8)
    known = gpus(answers)
    assert found(judged(node(gpus=replace(known, health=Health(error=silent)))))["gpu.smi"].level == "unknown"
    nothing = gpus(Health(error=silent), hardware=8, answer=Answer(nvml_status=9))
    nothing = replace(nothing, driver=replace(nothing.driver, devices=8))
    assert found(judged(node(gpus=nothing)))["gpu.smi"].level == "fail"
    absent = Health(error="nvidia-smi is not on this node's PATH")
    assert found(judged(node(gpus=replace(known, health=absent))))["gpu.smi"].level == "warn"
    login_node = gpus(Health(error="nvidia-smi: No devices were found"), answer=Answer(nvml_status=0, cuda_status=100))
    assert not found(judged(node(gpus=login_node)))


def test_who_computes_on_a_gpu_is_named_and_who_draws_is_not() -> None:
    (gpu,) = h100().gpus
    left = GpuProcess(4711, "/usr/bin/python3", "C", "bob")
    xorg = GpuProcess(99, "/usr/lib/xorg/Xorg", "G", "root")
    report = judged(node(gpus=gpus(Health((replace(gpu, processes=(xorg, left)),)))))
    assert "pid 4711 of bob (python3)" in found(report)["gpu.busy"].title
    assert not found(judged(node(gpus=gpus(Health((replace(gpu, processes=(xorg,)),))))))


def test_processes_are_read_with_their_kind() -> None:
    # generated in the form of NVIDIA's tool: the recorded GPU has none
    several = "Processes\n" + "".join(
        f"        Process ID : {pid}\n            Type : {kind}\n            Name : {name}\n"
        f"            Used GPU Memory : {memory}\n"
        for pid, kind, name, memory in ((4711, "C", "python", "4000 MiB"), (99, "G", "Xorg", "4 MiB"))
    )
    (gpu,) = h100(("Processes                             : None", several)).gpus
    assert gpu.processes == (GpuProcess(4711, "python", "C"), GpuProcess(99, "Xorg", "G"))


# The kernel's log.


def log(*lines: str, age_s: float = 7200.0) -> KernelLog:
    parsed = [kernel_signs.parse(f"4,1,1,-;{line}", Patterns(for_kernels())) for line in lines]
    return KernelLog(tuple(replace(line, age_s=age_s) for line in parsed if line is not None))


RECORDED_LINES = [line for line in text("xids.txt").splitlines() if not line.startswith("#")]


def test_recorded_lines_of_the_kernel_are_all_recognised() -> None:
    kinds = [line.kind for line in log(*RECORDED_LINES).lines]
    assert kinds.count("xid") == 8
    assert kinds.count("gpu-lost") == 1
    codes = [read.xid.code for line in RECORDED_LINES if (read := xids.read_line(line)) is not None]
    assert codes == [13, 109, 63, 79, 149, 145, 94, 154]
    assert all(xids.table()[code].means for code in codes)


@each("code, level", [(13, "info"), (109, "warn"), (79, "warn"), (149, "warn"), (154, "warn")])
def test_an_xid_blames_the_gpu_or_the_program(code: int, level: str) -> None:
    line = next(line for line in RECORDED_LINES if f": {code}," in line)
    report = judged(node(kernel=log(line), gpus=gpus(h100())))
    (finding,) = (finding for finding in report.findings if finding.id == "doctor.log.xid")
    assert finding.level == level
    assert f"Xid {code}" in finding.title
    assert xids.SOURCE in finding.evidence


def test_what_the_driver_wants_after_an_xid_is_told() -> None:
    line = next(line for line in RECORDED_LINES if ": 154," in line)
    assert "OS Reboot" in found(judged(node(kernel=log(line), gpus=gpus(h100()))))["log.xid"].title


def test_a_memory_error_that_a_reset_has_mended_is_a_remark() -> None:
    line = next(line for line in RECORDED_LINES if ": 63," in line)
    mended = h100().gpus[0]
    mended = replace(mended, address="00000000:10:1c.0")
    assert not found(judged(node(kernel=log(line), gpus=gpus(Health((mended,))))))
    pending = gpu_health.parse(text("a100_remap_pending.txt"))
    finding = found(judged(node(kernel=log(line), gpus=gpus(pending))))["log.xid"]
    assert "GPU 0 (0000:10:1c.0, local rank 0): Xid 63" in finding.title


# Links.


def test_counters_of_an_infiniband_port_as_sys_has_them(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_1/ports/1/counters"
    port.mkdir(parents=True)
    names = text("ib_counters.txt").split("=== ./")[1:]
    for block in names:
        name, _, value = block.partition(" ===\n")
        (port / name).write_text(value)
    iwarp = tmp_path / "sys/class/infiniband/i40iw0/ports/1/counters"
    iwarp.mkdir(parents=True)
    for line in text("iwarp_counters.txt").splitlines():
        path, _, value = line.partition(":N/A")
        (iwarp / path.rpartition("/")[2].partition(":")[0]).write_text("N/A" + value)
    read = {(counter.link, counter.name): counter.value for counter in link_counters.sample(0.0, str(tmp_path)).links}
    assert read[("mlx5_1:1", "link_downed")] == 255
    assert read[("mlx5_1:1", "excessive_buffer_overrun_errors")] == 15
    assert not [link for link, _ in read if link.startswith("i40iw0")]


def test_counters_warn_where_they_grow_and_not_for_what_was() -> None:
    was = Counter("mlx5_1:1", "link_downed", 255, 0)
    grows = Counter("mlx5_1:1", "symbol_error", 300, 3)
    quiet = network(counters=Counters(1.0, (was,), tcp_sent=10_000, tcp_resent=20))
    assert not found(judged(node(network=quiet)))
    loud = network(counters=Counters(1.0, (was, grows), tcp_sent=10_000, tcp_resent=900))
    assert set(found(judged(node(network=loud)))) == {"link-errors", "retransmits"}


def test_a_link_that_flaps_is_named_beside_the_other_nodes() -> None:
    def downs(host: str, count: int) -> NodeDoctor:
        counters = Counters(1.0, (Counter("mlx5_1:1", "link_downed", count, 0),))
        return node(host, network=network(ib_ports=ports("ACTIVE", "ACTIVE"), counters=counters))

    finding = found(judged(downs("a", 1), downs("b", 255), downs("c", 2)))["link-flaps"]
    assert finding.where.hosts == ("b",)
    assert "mlx5_1:1 went down 255 times" in finding.title
    assert not found(judged(downs("a", 12), downs("b", 14), downs("c", 11)))  # the whole fabric was serviced
    assert not found(judged(downs("a", 255)))  # alone: a remark


def test_retries_of_a_busy_fabric_are_no_warning() -> None:
    busy = network(counters=Counters(1.0, (Counter("mlx5_1:1", "out_of_sequence", 9000, 40),)))
    assert not found(judged(node(network=busy)))


def ports(*states: str) -> tuple[IbPort, ...]:
    physical = {"ACTIVE": "LinkUp", "INIT": "LinkUp", "DOWN": "Polling"}
    return tuple(
        IbPort(f"mlx5_{number}", 1, state, physical[state], "InfiniBand", 400 * 10**9, ())
        for number, state in enumerate(states)
    )


@pytest.mark.parametrize(
    ("states", "warned"),
    [
        (("ACTIVE",) * 8, False),
        (("ACTIVE",) * 7 + ("DOWN",), True),
        (("ACTIVE", "DOWN"), False),
        (("ACTIVE", "INIT"), True),
    ],
)
def test_a_port_that_is_down_among_many_is_a_fault_and_an_unused_second_one_is_not(
    states: tuple[str, ...], warned: bool
) -> None:
    assert ("rdma-down" in found(judged(node(network=network(ib_ports=ports(*states)))))) is warned


def test_ports_that_are_down_on_all_nodes_are_not_cabled() -> None:
    unused = network(ib_ports=ports(*("ACTIVE",) * 8, "DOWN"))
    assert not found(judged(*(node(host, network=unused) for host in "abc")))
    assert found(judged(node("a", network=unused), node("b"), node("c")))["rdma-down"].where.hosts == ("a",)


@pytest.mark.parametrize(
    ("soft", "may_lock", "in_step", "level"),
    [
        (8 * 2**20, False, True, "fail"),
        (8 * 2**20, False, False, "warn"),  # of a login: a job's may be another
        (GIB, False, True, "warn"),
        (8 * 2**20, True, True, None),
    ],
)
def test_locked_memory_matters_to_rdma(soft: int, may_lock: bool, in_step: bool, level: str | None) -> None:
    limited = system(limits=(Limit("memlock", soft, soft),), may_lock=may_lock, in_step=in_step)
    assert "memlock" not in found(judged(node(system=limited)))
    finding = found(judged(node(system=limited, network=network(ib_ports=ports("ACTIVE"))))).get("memlock")
    assert (finding.level if finding is not None else None) == level


# The odd node out.


def test_numbers_that_are_nearly_equal_are_the_same() -> None:
    sizes = {"a": 503.1, "b": 503.2, "c": 503.1, "d": 251.6}
    names = grouped(sizes, 0.02, lambda number: f"{number} GiB")
    assert names == {
        "a": "503.1 GiB to 503.2 GiB",
        "b": "503.1 GiB to 503.2 GiB",
        "c": "503.1 GiB to 503.2 GiB",
        "d": "251.6 GiB",
    }


def memory(*sizes: float) -> list[NodeDoctor]:
    return [node(f"n{number}", system=system(memory_bytes=int(size * GIB))) for number, size in enumerate(sizes)]


def test_a_node_with_half_the_memory_is_named() -> None:
    assert not found(judged(*memory(503.1, 503.2, 503.1)))
    finding = found(judged(*memory(503.1, 503.2, 251.6, 503.1)))["differs.memory"]
    assert (finding.where.hosts, finding.level) == (("n2",), "warn")
    assert "n2: memory is 251.6 GiB" in finding.title


def test_of_two_nodes_none_is_accused() -> None:
    report = judged(node("a"), node("b", software=Software("python3", python="3.12.1", torch="2.8.0", cuda="12.8")))
    finding = found(report)["differs.torch"]
    assert finding.where.hosts == ()
    assert finding.title.startswith("nodes differ: torch: ")
    assert {row.fit for row in report.data.nodes} == {"fit"}


def test_what_harms_most_comes_first() -> None:
    odd = node(
        "c",
        software=Software("python3", python="3.12.1", torch="2.9.1+cu128", cuda="12.8", nccl="2.26.2", glibc="2.35"),
        system=system(kernel="5.15.0", variables={"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    )
    report = judged(node("a"), node("b"), odd)
    order = [finding.id.removeprefix("doctor.differs.") for finding in report.findings if "differs" in finding.id]
    assert order == ["debug", "nccl", "environment", "system"]
    assert (report.verdict, report.data.exclude) == ("fail", "c")


def test_interfaces_with_other_names_are_one_difference_and_not_one_for_each_of_their_facts() -> None:
    other = Nic("ens3", "ethernet", ("10.0.0.3/24",), True, True, 9000, 10**11, True)
    names = Names("n", ("10.0.0.3",), "", "n")
    report = judged(node("a"), node("b"), node("c", network=network(nics=(other,), names=names)))
    assert [row.fact for row in report.data.differences] == ["interfaces with an address"]


def test_a_library_that_was_copied_in_part_is_found_beside_a_node_with_another_torch() -> None:
    whole = Software("python3", python="3.12.1", torch="2.9.1", libraries={"libtorch.so": 1000})
    nodes = [node(name, software=whole) for name in "abcd"]
    half = node("e", software=replace(whole, libraries={"libtorch.so": 9}))
    other = node("f", software=replace(whole, torch="2.8.0", libraries={"libtorch.so": 900}))
    findings = found(judged(*nodes, half, other))
    assert findings["differs.files"].where.hosts == ("e",)
    assert findings["differs.torch"].where.hosts == ("f",)
    assert "differs.files" not in found(judged(nodes[0], half, other)), "of two, either may be the one"


def test_a_part_that_did_not_come_is_no_difference_and_not_fine() -> None:
    report = judged(node("a"), node("b"), node("c", disks=None, late=("disks",)))
    assert (report.verdict, set(found(report)), report.data.exclude) == ("unknown", {"incomplete"}, "c")


# Clocks.


def test_the_clock_that_is_off_is_named_and_not_those_beside_an_asker_who_is() -> None:
    assert not found(judged(*(node(name, clock=Clock(7.0, 0.01)) for name in "abc")))
    off = judged(node("a"), node("b"), node("c", clock=Clock(-3.0, 0.01)))
    assert (found(off)["clock"].where.hosts, found(off)["clock"].level) == (("c",), "warn")
    assert "3.0 s behind" in found(off)["clock"].title
    assert found(judged(node("a"), node("b"), node("c", clock=Clock(40.0, 0.01))))["clock"].level == "fail"
    assert not found(judged(node("a"), node("b", clock=Clock(1.5, 0.9)), node("c")))  # within the uncertainty


def test_half_the_round_trip_is_the_uncertainty() -> None:
    from distdiag.commands.doctor.collect import Part

    clock = _with_clock(Part(time_s=1000.25), 1000.0, 1000.1).clock
    assert clock is not None
    assert (round(clock.offset_s, 6), round(clock.uncertainty_s, 6)) == (0.2, 0.05)


# The verdict.


def full(host: str) -> NodeDoctor:
    return node(host, disks=Disks((Space("/tmp", 100 * GIB, 0, 1000, 900, "ext4", "/dev/sda1"),), ("/tmp",)))


def test_nodes_to_leave_out_are_folded_as_slurm_takes_them() -> None:
    report = judged(*(node(f"node{number}") for number in range(1, 6)), full("node7"), full("node8"))
    assert report.data.exclude == "node[7-8]"
    assert report.summary.endswith("start without: --exclude=node[7-8]")
    assert judged(full("a"), full("b")).data.exclude == ""  # no node would be left


def test_many_nodes_with_the_same_fault_are_one_finding_of_bounded_length() -> None:
    def nearly_full(number: int) -> NodeDoctor:
        space = Space("/tmp", 100 * GIB, (100 + number) * 2**20, 1000, 900, "ext4", "/dev/sda1")
        return node(f"n{number}", disks=Disks((space,), ("/tmp",)))

    report = judged(*map(nearly_full, range(64)))
    finding = found(report)["disk-full"]
    assert (len(finding.where.hosts), len(finding.evidence)) == (64, 9)
    assert finding.title.startswith("n[0-63]: /tmp is nearly full: ")
    assert report.data.exclude == ""


def test_only_and_ignore_choose_findings() -> None:
    report = judged(full("a"), node("b"), request=replace(ASKED, ignore=(("disk-full", "known"),)))
    assert (report.verdict, report.data.silenced[0].reason) == ("ok", "known")
    assert judged(full("a"), node("b"), request=replace(ASKED, only=("clock",))).verdict == "ok"


def test_a_full_mount_that_no_job_writes_to_is_no_fault() -> None:
    data = Space("/data", 100 * GIB, 0, 0, 0, "nfs4", "filer:/data", read_only=True)
    assert not found(judged(node(disks=Disks((data,), ()))))
    private = Space("/home/bob/remote", error="Permission denied", kind="fuse.sshfs", source="bob@host:")
    assert not found(judged(node(disks=Disks((private,), ()))))
    assert "disk-error" in found(judged(node(disks=Disks((private,), ("/home/bob/remote",)))))


def test_every_symptom_can_be_chosen_and_every_row_is_used() -> None:
    table = tomllib.loads(resources.files("distdiag.knowledge").joinpath("doctor_symptoms.toml").read_text("utf-8"))
    assert {row.get("id", row["name"]) for row in table["symptom"]} <= checks("doctor").keys()
    folder = Path(distdiag.commands.doctor.__file__).parent
    source = "".join(file.read_text() for file in folder.glob("*.py"))
    unused = [row["name"] for row in table["symptom"] if f'"{row["name"]}"' not in source]
    assert all(name.startswith(("log.", "differs.")) for name in unused)
    made = re.findall(r'id="([a-z.-]+)"', source)
    assert set(made) <= checks("doctor").keys()


def test_lo_that_is_down_is_a_fault_and_one_that_is_up_is_none() -> None:
    up = Nic("lo", "loopback", ("127.0.0.1/8",), True, True, 65536, None, False)
    for lo, ids in ((up, set()), (replace(up, up=False, running=False, addresses=()), {"loopback-down"})):
        report = judged(node(network=network(nics=(*network().nics, lo))))
        assert {id_ for id_, finding in found(report).items() if finding.level == "fail"} == ids


@pytest.mark.parametrize(("mib", "level"), [(64, "warn"), (1024, None)])
def test_the_shm_of_a_container_is_a_warning_on_all_nodes(mib: int, level: str | None) -> None:
    small = system(shm=Space("/dev/shm", mib << 20, mib << 20))
    report = judged(*(node(f"node{number}", system=small) for number in range(3)))
    assert (found(report)["shm"].level if level else None) == level
    assert ("shm" in found(report)) == (level is not None)


# Settings that slow jobs down or break them.


@pytest.mark.parametrize("switch", ["CUDA_LAUNCH_BLOCKING=1", "NCCL_P2P_DISABLE=1", "NCCL_DEBUG=TRACE"])
def test_a_switch_for_debugging_that_is_left_on_everywhere_is_a_warning(switch: str) -> None:
    name, _, value = switch.partition("=")
    own = system(variables={name: value})
    finding = found(judged(node("a", system=own), node("b", system=own)))["debug-switch"]
    assert (finding.level, finding.where.hosts) == ("warn", ("a", "b"))
    assert finding.fix is not None
    assert finding.fix.commands == (f"unset {name}",)
    assert "debug-switch" not in found(judged(node(system=system(variables={"NCCL_DEBUG": "INFO"}))))


@each("no_proxy, level", [("", "warn"), ("example.com", "warn"), ("10.0.0.0/8", ""), ("node1", ""), ("*", "")])
def test_a_proxy_is_said_unless_the_node_is_excepted(no_proxy: str, level: str) -> None:
    own = replace(system(), proxies=("https_proxy",), no_proxy=no_proxy)
    assert [finding.level for id_, finding in found(judged(node(system=own))).items() if id_ == "proxy"] == (
        [level] if level else []
    )


def test_a_node_that_started_after_the_ranks_of_the_others_has_lost_its_own() -> None:
    ranks = Jobs((11,), 8.0, 7200.0)
    late = replace(system(), up_s=600.0)
    report = judged(node("a", jobs=ranks), node("b", jobs=ranks), node("c", jobs=Jobs((), 0.1), system=late))
    finding = found(report)["rebooted"]
    assert (finding.level, finding.where.hosts) == ("warn", ("c",))
    assert "10 min ago" in finding.title
    spare = replace(system(), up_s=86400.0)
    assert "rebooted" not in found(judged(node("a", jobs=ranks), node("c", jobs=Jobs((), 0.1), system=spare)))


def test_a_node_whose_cores_others_use_is_a_warning_beside_free_nodes_only() -> None:
    busy = node("b", jobs=Jobs((), 200.0))
    assert found(judged(node("a", jobs=Jobs((), 1.0)), busy))["load"].where.hosts == ("b",)
    assert "load" not in found(judged(busy))
    assert "load" in remarks(judged(busy))
    assert "load" not in found(judged(node("a", jobs=Jobs((), 180.0)), busy))


def test_gpus_of_an_nvlink_domain_need_a_channel_and_one_list() -> None:
    uuid = ("ClusterUUID                       : 00000000-", "ClusterUUID : 5a6b7c8d-")
    domain = gpus(h100(uuid, count=4))
    assert found(judged(node(gpus=domain)))["gpu.imex"].level == "warn"
    ready = replace(domain, imex_channels=1, imex_nodes=("10.0.0.1", "10.0.0.2"))
    other = replace(ready, imex_nodes=("10.0.0.1",))
    assert "gpu.imex" not in found(judged(node(gpus=ready)))
    finding = found(judged(node("a", gpus=ready), node("b", gpus=ready), node("c", gpus=other)))["differs.imex"]
    assert finding.where.hosts == ("c",)


def _gpu(**more: object) -> NodeDoctor:
    health = h100()
    return node(gpus=gpus(replace(health, gpus=(replace(health.gpus[0], **more),))))  # type: ignore[arg-type]


def _of_driver(**answer: object) -> NodeDoctor:
    found = gpus(h100())
    return node(gpus=replace(found, driver=replace(found.driver, answer=replace(found.driver.answer, **answer))))  # type: ignore[arg-type]


def _logged(kind: str, age_s: float = 60.0) -> NodeDoctor:
    return node(kernel=KernelLog((kernel_signs.KernelLine(kind, f"a line of {kind}", age_s),)))


def test_each_of_these_facts_of_a_node_has_its_id() -> None:
    table = {
        ("doctor.gpu.driver-mismatch", "fail"): _of_driver(nvml_status=18),
        ("doctor.gpu.init", "fail"): _of_driver(cuda_status=3),
        ("doctor.gpu.nvlink-errors", "warn"): _gpu(link_errors={"link 3": 50}),
        ("doctor.gpu.persistence", "info"): _gpu(persistence="Disabled"),
        ("doctor.gpu.power-limit", "info"): _gpu(power_limit_w=500.0, default_limit_w=700.0),
        ("doctor.gpu.share", "info"): node(gpus=gpus(h100(), hardware=4)),
        ("doctor.log.gpu-lost", "warn"): _logged("gpu-lost"),
        ("doctor.log.hardware", "warn"): _logged("hardware"),
        ("doctor.log.link", "warn"): _logged("link"),
        ("doctor.log.nvlink", "warn"): _logged("nvlink"),
        ("doctor.log.storage", "info"): _logged("storage", 7200.0),
        ("doctor.log.sxid", "warn"): _logged("sxid"),
        ("doctor.log.unread", "info"): node(kernel=KernelLog((), "Operation not permitted")),
        ("doctor.cpu-limit", "info"): node(system=system(cgroup=Cgroup(cpus=2.0))),
        ("doctor.pids-limit", "warn"): node(system=system(cgroup=Cgroup(pids=100, pids_used=90))),
        ("doctor.memory-limit", "info"): node(system=system(cgroup=Cgroup(memory_bytes=64 * GIB))),
        ("doctor.oom", "info"): node(system=system(cgroup=Cgroup(oom_kills=2))),
    }
    made = {key: {(one.id, str(one.level)) for one in judged(own).findings} for key, own in table.items()}
    assert {key: ids for key, ids in made.items() if key not in ids} == {}


def test_each_of_these_facts_of_two_nodes_has_its_id() -> None:
    driver = replace(gpus(h100()).driver, kernel="550.54.14")
    port = IbPort("mlx5_0", 1, "ACTIVE", "LinkUp", "InfiniBand", 4 * 10**11, ())
    mount = Space("/data", 100 * GIB, 50 * GIB, 1000, 900, "nfs4", "server:/data")
    table = {
        ("doctor.advisory", "info"): node("b"),
        ("doctor.differs.driver", "warn"): node("b", gpus=replace(gpus(h100()), driver=driver)),
        ("doctor.differs.mounts", "warn"): node("b", disks=replace(DISKS, spaces=(*DISKS.spaces, mount))),
        ("doctor.differs.rdma", "warn"): node("b", network=network(ib_ports=(port,))),
        ("doctor.differs.system", "info"): node("b", system=system(kernel="5.15.0")),
        ("doctor.name-slow", "warn"): node("b", network=network(names=None)),
        ("doctor.nccl-ifname", "fail"): node("b", system=system(variables={"NCCL_SOCKET_IFNAME": "=ib7"})),
    }
    plain = node("a", gpus=gpus(h100()))
    made = {key: {(one.id, str(one.level)) for one in judged(plain, own).findings} for key, own in table.items()}
    assert {key: ids for key, ids in made.items() if key not in ids} == {}
