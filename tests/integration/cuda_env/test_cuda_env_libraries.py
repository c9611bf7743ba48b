"""Libraries that are really compiled, preloaded and mapped: which one loads, and whether that is the right one."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from cuda_machines import GCC, Machine, found, judged
from loops import each

from distdiag.facts.cuda.libraries import Extension
from distdiag.facts.cuda.requirements import Unmet, fits
from distdiag.report import Level

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.report import Finding


@pytest.fixture
def node(tmp_path: Path) -> Machine:
    """A machine with a driver and torch for CUDA 13.0."""
    machine = Machine(tmp_path / "node")
    machine.driver("580.65.06", "NVIDIA H100 80GB HBM3:9.0", cuda=13000)
    machine.torch("2.13.0+cu130", "13.0", archs="75 80 86 90 100 120", seen=1)
    return machine


def library(path: Path, soname: str, *options: str, functions: str = "", needs: tuple[str, ...] = ()) -> Path:
    """Compile a shared library with these functions that needs others, by their sonames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in functions.split()))
    stubs = []
    for need in needs:
        stub = path.parent / "stubs" / need
        stub.parent.mkdir(exist_ok=True)
        subprocess.run([GCC, "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", stub, f"-Wl,-soname,{need}"], check=True)
        stubs.append(str(stub))
    link = ["-Wl,--no-as-needed", *stubs, f"-Wl,-soname,{soname}", *options]
    subprocess.run([GCC, "-shared", "-fPIC", source, "-o", path, *link], check=True)
    source.unlink()
    return path


def bitsandbytes(machine: Machine, *cuda: str) -> None:
    """Install a bitsandbytes: a library for each CUDA."""
    home = machine.python()
    for one in cuda:
        name = f"libbitsandbytes_cuda{one}.so"
        library(home / "bitsandbytes" / name, name, needs=(f"libcudart.so.{one[:2]}",))
    machine.package("bitsandbytes", "0.50.2", tuple(f"bitsandbytes/libbitsandbytes_cuda{one}.so" for one in cuda))


def test_of_a_library_for_each_cuda_the_one_that_loads_is_judged(
    node: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bitsandbytes(node, "118", "128", "129", "130", "132")
    facts = node.examine(monkeypatch, "run")

    def judge(*cuda: str, **variables: str) -> Finding | None:
        kept = tuple(one for one in facts.extensions if any(f"cuda{number}" in one.path for number in cuda))
        there = replace(facts, extensions=kept, variables={**facts.variables, **variables})
        return found(judged(there, goal="run")).get("libs.ext-soname")

    assert [judge("118", "128", "130"), judge("128", "132"), judge("118", "129", "130", "132")] == [None] * 3
    lacking = judge("118", "128")
    assert lacking is not None
    assert (lacking.level, "has no library for CUDA 13" in lacking.title) == (Level.FAIL, True)
    assert lacking.fix is not None
    assert lacking.fix.commands[0].endswith("--upgrade --no-deps bitsandbytes")
    asked = judge("128", "130", BNB_CUDA_VERSION="128")
    assert asked is not None
    assert asked.title.startswith("BNB_CUDA_VERSION=128 makes bitsandbytes 0.50.2 load")
    assert asked.fix is not None
    assert asked.fix.commands == ("unset BNB_CUDA_VERSION",)


def test_a_runtime_of_its_own_beside_torchs_is_no_fault(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    home = node.python()
    library(home / "jax_plugins/xla.so", "xla.so", "-Wl,-rpath,$ORIGIN/stubs", needs=("libcudart.so.12",))
    node.package("jax-cuda12-pjrt", "0.9", ("jax_plugins/xla.so",))
    assert "libs.ext-soname" not in found(node.report(monkeypatch, "run"))
    (home / "jax_plugins/stubs/libcudart.so.12").unlink()
    assert found(node.report(monkeypatch, "run"))["libs.ext-soname"].level is Level.WARN


def test_an_extension_of_torch_for_another_cuda(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    library(node.python() / "apex_C.so", "apex_C.so", needs=("libc10.so", "libcudart.so.12"))
    node.package("apex", "0.1", ("apex_C.so",))
    finding = found(node.report(monkeypatch, "run"))["libs.ext-soname"]
    assert finding.level is Level.FAIL
    assert "apex 0.1 was built for another CUDA: it needs libcudart.so.12, torch 2.13.0+cu130 ships" in finding.title


def test_a_file_for_one_kind_of_gpu_is_no_fault_of_its_package(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vllm ships them: _vllm_fa3_C for Hopper, _qutlass_C for Blackwell, beside code for all."""
    whole = Extension("/s/vllm/_C.abi3.so", "vllm 0.33.0", ("75", "80", "90", "100f"), ("90",), (), complete=True)
    blackwell = Extension("/s/vllm/_qutlass_C.abi3.so", "vllm 0.33.0", ("100f",), (), (), complete=True)
    facts = node.examine(monkeypatch, "run")
    assert "arch.ext" not in found(judged(replace(facts, extensions=(blackwell, whole)), goal="run"))
    finding = found(judged(replace(facts, extensions=(blackwell,)), goal="run"))["arch.ext"]
    assert (finding.level, "vllm 0.33.0 has no code for the GPU of 9.0" in finding.title) == (Level.FAIL, True)


def nccl(node: Machine, preloaded: Path) -> None:
    """Install NCCL's wheel, let torch load it, and put another library, under any file name, before it."""
    package = "nvidia/nccl/lib/libnccl.so.2"
    library(node.python() / package, "libnccl.so.2", functions="ncclGetVersion ncclCommResume")
    node.package("nvidia-nccl-cu13", "2.28.3", (package,))
    init = node.python() / "torch/__init__.py"
    load = f"import ctypes\nctypes.CDLL({str(node.python() / package)!r})\n"
    init.write_text(load + init.read_text())
    library(preloaded, "libnccl.so.2", functions="ncclGetVersion")
    if preloaded.name == "hook.so":
        with preloaded.open("ab") as file:
            file.write(b"\0NCCL version 2.21.5+cuda12.4\0")
    node.env["LD_PRELOAD"] += f" {preloaded}"


@pytest.mark.parametrize(("name", "level"), [("libnccl.so.2.30.1", Level.WARN), ("hook.so", Level.FAIL)])
def test_a_preloaded_library_is_known_by_its_soname(
    node: Machine, monkeypatch: pytest.MonkeyPatch, name: str, level: Level
) -> None:
    other = node.folder / "efa" / name
    driver = node.env["LD_PRELOAD"]
    nccl(node, other)
    finding = found(node.report(monkeypatch, "run"))["libs.shadow"]
    assert finding.level is level
    assert finding.title.startswith("LD_PRELOAD loads libnccl.so.2")
    assert finding.title.endswith("before torch's own 2.28.3: 2 copies of libnccl.so.2 are loaded")
    assert finding.fix is not None
    node.paste(finding.fix.commands)
    assert node.env["LD_PRELOAD"].split(":") == driver.split()
    assert "libs.shadow" not in found(node.report(monkeypatch, "run"))


def test_a_preloaded_library_that_breaks_the_import_is_named(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl(node, node.folder / "old/libnccl.so")
    core = library(node.python() / "torch/lib/libtorch_cuda.so", "libtorch_cuda.so", functions="use")
    source = core.with_suffix(".c")
    source.write_text("int ncclCommResume(void); int use(void) { return ncclCommResume(); }\n")
    wheel = node.python() / "nvidia/nccl/lib/libnccl.so.2"
    subprocess.run([GCC, "-shared", "-fPIC", source, "-o", core, wheel, f"-Wl,-rpath,{wheel.parent}"], check=True)
    init = node.python() / "torch/__init__.py"
    init.write_text(f"import ctypes, os\nctypes.CDLL({str(core)!r}, mode=os.RTLD_NOW)\n" + init.read_text())
    report = node.report(monkeypatch, "run")
    finding = found(report)["torch.import"]
    assert "torch cannot be imported because of LD_PRELOAD: OSError: " in finding.title
    assert "undefined symbol: ncclCommResume" in finding.title
    assert finding.fix is not None
    assert finding.fix.commands == ("unset LD_PRELOAD",)


def test_what_torch_and_others_ask_of_each_other_is_read(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str, version: str, *lines: str) -> None:
        more = "".join(f"Requires-Dist: {line}\n" for line in lines)
        node.write(node.package(name, version) / "METADATA", f"Name: {name}\nVersion: {version}\n{more}\nIt needs: x\n")

    linux = "platform_system == 'Linux'"
    requires(
        *(
            "torch",
            "2.13.0+cu130",
            f"nvidia-cudnn-cu13 (==9.20.0.48) ; {linux}",
            'triton>=99; extra == "x"',
            "sympy>=99",
        ),
        *(f'nvidia-nccl-cu13==2.29.7; {linux} and platform_machine == "nosuch"', "cuda-toolkit[cublas]==13.0.3"),
    )
    requires("cuda-toolkit", "13.0.3", 'nvidia-cublas==13.1.*; extra == "cublas"')
    for name, version in {
        "nvidia-cudnn-cu13": "9.10.2",
        "nvidia-nccl-cu13": "2.1.0",
        "nvidia-cublas": "13.0.9",
    }.items():
        requires(name, version)
    requires("triton", "3.7.0")
    requires("sympy", "1.14.0")
    requires("torchvision", "0.27.1", "torch==2.12.1", "numpy")
    requires("xformers", "0.0.35", "torch>=2.10")
    facts = node.examine(monkeypatch, "run")
    reported = {(one.package, one.name, one.wants, one.has) for one in facts.unmet}
    assert reported == {
        ("torch 2.13.0+cu130", "nvidia-cudnn-cu13", "==9.20.0.48", "9.10.2"),
        ("cuda-toolkit 13.0.3", "nvidia-cublas", "==13.1.*", "13.0.9"),
        ("torchvision 0.27.1", "torch", "==2.12.1", "2.13.0+cu130"),
    }

    def judge(package: str, name: str, wants: str, has: str) -> Finding:
        one = Unmet(package, name, wants, has, compiled=True)
        return found(judged(replace(facts, unmet=(one,)), goal="run"))["libs.versions"]

    of_torch, fitting = "torch 2.13.0+cu130", ("nvidia-cudnn-cu13", "==9.20.0.48")
    assert judge(of_torch, *fitting, "9.10.2").level is Level.FAIL
    assert judge(of_torch, *fitting, "9.28.1.4").level is Level.INFO
    assert judge(of_torch, "nvidia-nccl-cu13", "==2.29.7", "2.21.5").level is Level.WARN  # it was imported all the same
    assert judge("torchvision 0.28.0", "torch", "==2.13.1", "2.13.0+cu130").level is Level.WARN
    assert judge("vllm 0.33.0", "torch", "==2.12.0", "2.13.0+cu130").level is Level.WARN
    vision = judge("torchvision 0.27.1", "torch", "==2.12.1", "2.13.0+cu130")
    assert (vision.level, vision.fix is not None) == (Level.FAIL, True)
    index = "https://download.pytorch.org/whl/cu130"
    assert vision.fix is not None
    assert vision.fix.commands[0].endswith(f" --upgrade torchvision torch==2.13.0+cu130 --index-url {index}")


@each(
    "version, wants, is_met",
    [
        *(("2.13.0+cu130", "==2.13.0", True), ("2.13.0", "(==2.13)", True), ("2.13.1", "==2.13", False)),
        *(("2.13.0", ">=1.13,!=2.13.0", False), ("2.13.0", "~=2.10", True), ("3.0", "~=2.10", False)),
        *(
            ("9.20.1", "==9.20.*", True),
            ("2.9.1", "<3,>=2.4", True),
            ("2.13.0", "==2.12.0rc1", None),
            ("2.9.0a0", ">2", None),
        ),
    ],
)
def test_a_version_fits_or_it_is_not_known(version: str, wants: str, is_met: bool | None) -> None:
    assert fits(version, wants.strip("()")) is is_met
