"""Every printed fix is pasted into a real shell, and the machine examined again: the problem is gone."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from cuda_machines import Machine, found, judged
from loops import each

from distdiag.commands.cuda_env.archs import capability
from distdiag.commands.cuda_env.check import exports
from distdiag.commands.cuda_env.prebuild import commands
from distdiag.errors import UsageError
from distdiag.report import Level

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.report import Finding

CU128 = "75 80 86 90 100 120 p120"
RTX_5090 = "NVIDIA GeForce RTX 5090:12.0"


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    """A machine with a driver, a new GPU, compilers, and a torch that has code for it."""
    machine = Machine(tmp_path / "node")
    for name in ("gcc", "c++"):
        machine.compiler(name, "12.2.0")
    machine.write(machine.bin / "ninja", "#!/bin/sh\n", mode=0o755)
    machine.driver("570.124.06", RTX_5090)
    machine.torch("2.9.1+cu128", "12.8", archs=CU128, seen=1)
    return machine


def fixed(machine: Machine, monkeypatch: pytest.MonkeyPatch, id_: str) -> Finding:
    """Give the finding, after its fix was pasted and it is gone."""
    first = found(machine.report(monkeypatch))
    finding = first[id_]
    assert finding.fix is not None
    assert finding.fix.commands, finding.fix.text
    machine.paste(finding.fix.commands)
    again = found(machine.report(monkeypatch))
    assert id_ not in again or again[id_].level is Level.INFO, again[id_]
    assert not {one for one in again if again[one].level is Level.FAIL} - first.keys()
    return finding


@pytest.mark.parametrize("archs", ["12.0", None])
def test_an_nvcc_that_is_too_old_for_the_gpu_is_given_what_it_compiles(
    node: Machine, monkeypatch: pytest.MonkeyPatch, archs: str | None
) -> None:
    node.path = [f"{node.toolkit('12.4')}/bin"]
    if archs is not None:
        node.env["TORCH_CUDA_ARCH_LIST"] = archs
    finding = fixed(node, monkeypatch, "archlist.nvcc")
    assert "nvcc 12.4 cannot compile for 12.0" in finding.title
    assert finding.fix is not None
    assert finding.fix.commands[0].endswith('9.0+PTX"')


def test_an_nvcc_that_is_too_old_beside_one_that_is_not(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    new = node.toolkit("12.8")
    node.path = [f"{node.toolkit('12.4')}/bin"]
    finding = fixed(node, monkeypatch, "archlist.nvcc")
    assert finding.fix is not None
    assert finding.fix.commands == (f"export CUDA_HOME={new} PATH={new}/bin:$PATH",)


def test_no_list_is_printed_that_this_nvcc_compiles_nothing_of(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list without the local GPU is never replaced by one nvcc refuses."""
    node.path = [f"{node.toolkit('12.4')}/bin"]
    node.env["TORCH_CUDA_ARCH_LIST"] = "8.0;9.0"
    finding = fixed(node, monkeypatch, "archlist.gpus")
    assert finding.fix is not None
    assert finding.fix.commands == ('export TORCH_CUDA_ARCH_LIST="8.0;9.0;9.0+PTX"',)


@pytest.mark.parametrize("another", [True, False])
def test_an_nvcc_that_hangs_is_not_chosen_again(
    node: Machine, monkeypatch: pytest.MonkeyPatch, *, another: bool
) -> None:
    hung = node.toolkit("12.8")
    node.write(hung / "bin/nvcc", "#!/bin/sh\nexec sleep 60\n", mode=0o755)
    node.path, node.env["CUDA_HOME"] = [f"{hung}/bin"], str(hung)
    whole = node.toolkit("12.4") if another else None
    began = time.monotonic()
    report = node.report(monkeypatch, "build", timeout_s=2.0)
    took = time.monotonic() - began
    finding = found(report)["toolkit.nvcc-broken"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert f"CUDA_HOME={hung}" not in str(finding.fix.commands)
    assert (f"CUDA_HOME={whole}" in str(finding.fix.commands)) == another
    assert took < 40  # twice the given time and a busy machine's overhead; nvcc sleeps for 60 s


def test_the_toolkit_of_the_wheels_works_after_one_run_of_export(
    node: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node.torch("2.13.0+cu130", "13.0", archs=CU128, seen=1)
    home = node.toolkit("13.0", node.python() / "nvidia/cu13", lib="lib")
    (home / "lib/libcudart.so").rename(home / "lib/libcudart.so.13")
    lines = exports(node.report(monkeypatch, "build"))
    steps = [line.strip() for line in capsys.readouterr().err.splitlines() if line.startswith("    ")]
    assert steps == [f"ln -s libcudart.so.13 {home}/lib/libcudart.so"]
    node.paste([*lines, *steps])
    again = node.report(monkeypatch, "build")
    assert [one for one in again.findings if one.level is Level.FAIL] == []
    assert exports(again) == []


def test_condas_headers_once_shown_are_no_fault(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = node.folder / "conda"
    node.toolkit("12.8", prefix, lib="lib")
    (prefix / "conda-meta").mkdir()
    (prefix / "targets/x86_64-linux").mkdir(parents=True)
    (prefix / "include").rename(prefix / "targets/x86_64-linux/include")
    node.env["CONDA_PREFIX"] = str(prefix)
    node.path = [f"{prefix}/bin"]
    fixed(node, monkeypatch, "toolkit.headers")


def test_a_cmake_that_was_told_of_another_toolkit(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.path = [f"{node.toolkit('12.8')}/bin"]
    node.env["CUDACXX"] = f"{node.toolkit('12.4')}/bin/nvcc"
    fixed(node, monkeypatch, "toolkit.multiple")


@pytest.mark.parametrize(
    ("kernel", "inside", "word"),
    [("570.86.15", "570.124.06", "reboot the host"), ("570.124.06", "570.86.15", "restart the container")],
)
def test_in_a_container_the_host_loads_the_newer_module(
    node: Machine, monkeypatch: pytest.MonkeyPatch, kernel: str, inside: str, word: str
) -> None:
    node.driver(kernel, RTX_5090)
    node.libcuda(inside, node.folder / "injected")
    node.write("/.dockerenv", "")
    finding = found(node.report(monkeypatch, "run"))["driver.userland-kernel"]
    assert finding.fix is not None
    assert word in finding.fix.text
    assert finding.fix.commands == ()


@pytest.mark.parametrize("works", [True, False])
def test_a_toolkit_on_path_that_was_removed(node: Machine, monkeypatch: pytest.MonkeyPatch, *, works: bool) -> None:
    gone = f"{node.root}/usr/local/cuda-12.6/bin"
    node.path = [gone, *([f"{node.toolkit('12.8')}/bin"] if works else [])]
    finding = found(node.report(monkeypatch, "build"))["toolkit.path-missing"]
    assert (finding.level, gone in finding.title) == (Level.INFO if works else Level.WARN, True)


def test_cmakes_host_compiler_is_not_nvccs(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.path = [f"{node.toolkit('12.8')}/bin"]
    node.env["CUDAHOSTCXX"] = str(node.compiler("gcc-13", "13.2.0"))
    finding = found(node.report(monkeypatch))["cc.flags"]
    assert "only CMake reads CUDAHOSTCXX" in finding.title
    assert finding.fix is not None
    node.paste(finding.fix.commands)
    assert "cc.flags" not in found(node.report(monkeypatch))


def test_a_build_on_a_login_node_is_for_the_gpus_that_are_named(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.env["FAKE_GPUS"] = ""
    node.path = [f"{node.toolkit('12.8')}/bin"]
    facts = replace(node.examine(monkeypatch, "build"), meant=("8.6", "9.0"))
    finding = found(judged(facts, goal="build"))["archlist.unset-nogpu"]
    assert finding.fix is not None
    assert finding.fix.commands == ('export TORCH_CUDA_ARCH_LIST="8.6;9.0"',)
    lines = commands([facts], ("aio",))
    assert any('TORCH_CUDA_ARCH_LIST="8.6;9.0" DS_BUILD_AIO=1' in line for line in lines)
    assert not any("libaio" in line for line in commands([facts], ("cpu_adam",)))
    bare = replace(facts, building=replace(facts.building, aio_header="", package_tool="apt-get"))
    assert any(line.endswith("apt-get install -y libaio-dev") for line in commands([bare], ("aio",)))


@each(
    "name, arch",
    [
        *(("RTX 3090", "8.6"), ("NVIDIA GeForce RTX 4090", "8.9"), ("NVIDIA H100 80GB HBM3", "9.0"), ("GH200", "9.0")),
        *(("NVIDIA A100-SXM4-80GB", "8.0"), ("A10G", "8.6"), ("RTX A6000", "8.6"), ("L40S", "8.9"), ("B200", "10.0")),
        *(("Tesla V100-SXM2-16GB", "7.0"), ("Tesla T4", "7.5"), ("GeForce RTX 2080 Ti", "7.5"), ("GB300", "10.3")),
        *(("NVIDIA RTX 6000 Ada Generation", "8.9"), ("NVIDIA RTX PRO 6000 Blackwell", "12.0"), ("GTX 1080 Ti", "6.1")),
        *(("NVIDIA GeForce RTX 5090", "12.0"), ("Quadro RTX 8000", "7.5"), ("NVIDIA GB10", "12.1"), ("Orin", "8.7")),
        *(("8.6", "8.6"), ("sm_90", "9.0"), ("120", "12.0"), ("P100-PCIE", "6.0"), ("A30", "8.0"), ("L4", "8.9")),
    ],
)
def test_a_gpus_name_tells_its_architecture(name: str, arch: str) -> None:
    assert capability(name) == arch


def test_a_gpu_that_nobody_knows_is_not_guessed() -> None:
    with pytest.raises(UsageError, match="unknown GPU"):
        capability("Voodoo 2")
