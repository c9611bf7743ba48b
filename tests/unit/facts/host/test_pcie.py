"""ACS and IOMMU: read from directory trees as /sys has them, and judged on bare metal alone."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from loops import each
from support import need_mounts
from support_warm import enough_of_torch, gpu_test

from distdiag.cluster.checked_json import read_json
from distdiag.commands.allreduce_bench.types import Request as BenchRequest
from distdiag.commands.gpu_test.types import Request
from distdiag.facts.host import pcie
from distdiag.facts.host.pcie import redirects
from distdiag.facts.host.pcie_types import Pcie
from distdiag.launch.environment_checks import pcie_findings
from distdiag.launch.record import NodeSlot
from distdiag.launch.types import Device, Gpus, NodeFacts

if TYPE_CHECKING:
    from pathlib import Path

ON, SOURCE_ONLY = 0x001D, 0x0001
"""ACSCtl of the bridges of NVIDIA/nccl#2079, which hung, and of those of NVIDIA/nccl#606."""
ABOVE = ("0000:40:03.1", "0000:60:03.1")


def bridge_config(control: int) -> bytes:
    """Write the configuration space of an AMD GPP bridge: its extended capabilities are at 100, 270 and 2a0."""
    config = bytearray(4096)
    for place, id_, after in ((0x100, 0x000B, 0x270), (0x270, 0x0019, 0x2A0), (0x2A0, 0x000D, 0)):
        config[place : place + 4] = (after << 20 | 1 << 16 | id_).to_bytes(4, "little")
    config[0x2A6:0x2A8] = control.to_bytes(2, "little")
    return bytes(config)


def a_machine(root: Path, *, control: int = ON, readable: int = 4096, domain: str = "DMA-FQ") -> None:
    """Make the tree of two GPUs, each below a root port of its own as in NVIDIA/nccl#2079."""
    listed = root / "sys/bus/pci/devices"
    listed.mkdir(parents=True)
    groups = root / "sys/kernel/iommu_groups"
    for number, bridge in enumerate(ABOVE):
        gpu = f"0000:{bridge[5]}1:00.0"
        folder = root / f"sys/devices/pci0000:{bridge[5:7]}" / bridge / gpu
        folder.mkdir(parents=True)
        (folder.parent / "config").write_bytes(bridge_config(control)[:readable])
        for place, vendor, class_ in ((folder.parent, "0x1022", "0x060400"), (folder, "0x10de", "0x030000")):
            (place / "vendor").write_text(vendor + "\n")
            (place / "class").write_text(class_ + "\n")
            (listed / place.name).symlink_to(f"../../../devices/{place.relative_to(root / 'sys/devices')}")
        (groups / str(number)).mkdir(parents=True)
        (groups / str(number) / "type").write_text(domain + "\n")
        (folder / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{number}")
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu vme de\n\n")


def look(root: Path) -> Pcie | None:
    """Read a tree, and decode it as the facts of a node are."""
    return read_json(json.dumps(pcie.look(str(root)), default=vars).encode(), Pcie | None)  # type: ignore[arg-type]


def test_bridges_and_the_iommu_of_a_machine_that_hung(tmp_path: Path) -> None:
    a_machine(tmp_path)
    expected = Pcie(
        gpus=("0000:41:00.0", "0000:61:00.0"), nvswitches=0, virtual=False, redirecting=ABOVE, translated="DMA-FQ"
    )
    assert look(tmp_path) == expected


@pytest.mark.parametrize(("control", "readable"), [(0, 4096), (SOURCE_ONLY, 4096), (ON, 256), (ON, 64), (ON, 0)])
def test_what_is_off_or_not_to_be_read_is_not_told(tmp_path: Path, control: int, readable: int) -> None:
    a_machine(tmp_path, control=control, readable=readable, domain="identity")
    seen = look(tmp_path)
    assert seen is not None
    assert (seen.redirecting, seen.translated) == ((), "")


def test_a_card_below_a_switch_counts_as_well_and_an_nvswitch_is_counted(tmp_path: Path) -> None:
    a_machine(tmp_path, control=0)
    folder = tmp_path / "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0/0000:82:02.0/0000:83:00.0"
    folder.mkdir(parents=True)
    (folder.parent / "config").write_bytes(bridge_config(ON))
    listed = tmp_path / "sys/bus/pci/devices"
    (listed / "0000:82:02.0").symlink_to(folder.parent)
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/device").symlink_to(folder)
    (listed / "0000:90:00.0").mkdir()
    (listed / "0000:90:00.0/class").write_text("0x068000\n")
    (listed / "0000:90:00.0/vendor").write_text("0x10de\n")
    seen = look(tmp_path)
    assert seen is not None
    assert (seen.redirecting, seen.nvswitches) == (("0000:82:02.0",), 1)


def test_a_machine_without_gpus_is_not_looked_at(tmp_path: Path) -> None:
    assert look(tmp_path) is None


@pytest.mark.parametrize(
    "config", [b"\xff" * 4096, bridge_config(ON)[:0x2A4], b"\0" * 0x100 + b"\x01\x00\x01\x10" * 960]
)
def test_a_device_that_is_asleep_cut_off_or_leads_in_circles_tells_nothing(config: bytes) -> None:
    assert not redirects(config)


def node(seen: Pcie | None, rdma: int | None = None) -> NodeSlot:
    facts = NodeFacts("n", "6.1", "python3", Gpus(True, 2), None, 2**33, 2**33, 2**33, pcie=seen, rdma_bits_per_s=rdma)
    return NodeSlot(node="n", host="n", slots=None, facts=facts)


HUNG = Pcie(gpus=("a", "b"), nvswitches=0, virtual=False, redirecting=ABOVE, translated="DMA-FQ")


@each(
    "seen, rdma, levels",
    [
        (HUNG, None, ["warn", "warn"]),
        (replace(HUNG, virtual=True), None, []),
        (replace(HUNG, virtual=None), None, []),
        (replace(HUNG, redirecting=()), None, ["warn"]),
        (replace(HUNG, redirecting=(), translated=""), None, []),
        (replace(HUNG, nvswitches=4), None, ["info", "info"]),
        (replace(HUNG, nvswitches=4), 400 * 10**9, ["warn", "warn"]),
        (None, None, []),
    ],
)
def test_only_bare_metal_is_judged_and_never_a_fault(seen: Pcie | None, rdma: int | None, levels: list[str]) -> None:
    found = pcie_findings(Request(), [node(seen, rdma)])
    assert [finding.level for finding in found] == levels
    assert pcie_findings(Request(device=Device.CPU), [node(seen, rdma)]) == []


def test_the_command_that_turns_it_off_names_each_bridge() -> None:
    acs, iommu = pcie_findings(Request(), [node(HUNG)])
    assert acs.fix is not None
    assert acs.fix.commands == tuple(f"sudo setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in ABOVE)
    assert "DMA-FQ" in iommu.title
    assert [acs.id, iommu.id] == ["gpu-test.acs", "gpu-test.iommu"]
    same = pcie_findings(BenchRequest(), [node(HUNG)])
    assert [found.id for found in same] == ["allreduce-bench.acs", "allreduce-bench.iommu"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86 tells whether it is bare metal")
def test_gpu_test_tells_it_of_the_machine_that_it_runs_on(tmp_path: Path) -> None:
    need_mounts()
    a_machine(tmp_path)
    mounts = (f"{tmp_path}/sys /sys", f"{tmp_path}/proc/cpuinfo /proc/cpuinfo")
    script = "".join(f"mount --bind {mount} && " for mount in mounts) + 'exec "$@"'
    if subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", "true"], check=False).returncode:
        pytest.skip("no right to mount over /sys and /proc/cpuinfo")
    wrap = ("unshare", "-m", "sh", "-c", script, "sh")
    result = gpu_test("--nproc", "1", wrap=wrap, env=enough_of_torch(tmp_path))
    assert {"acs", "iommu"} <= result.findings.keys()
