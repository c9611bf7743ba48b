"""Set-ups as people have them -> the finding, its level and a fix that exists on that machine."""

from __future__ import annotations

import os
import re
import shlex
import sysconfig
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
from cuda_machines import Machine, found, judged
from loops import each

from distdiag.facts.cuda.driver import Gpu
from distdiag.report import Level, Report

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.commands.cuda_env.types import CudaEnv
    from distdiag.report import Finding

H100 = "NVIDIA H100 80GB HBM3:9.0"
EIGHT = ";".join([H100] * 8)
CU128 = "75 80 86 90 100 120 p120"


@pytest.fixture
def box(tmp_path: Path) -> Machine:
    """A machine with a compiler and nothing of NVIDIA's."""
    machine = Machine(tmp_path / "box")
    machine.compiler("gcc", "12.2.0")
    machine.compiler("gcc-12", "12.2.0")
    machine.compiler("c++", "12.2.0")
    machine.write(machine.bin / "ninja", "#!/bin/sh\n", mode=0o755)
    return machine


@pytest.fixture
def node(box: Machine) -> Machine:
    return healthy(box)


def healthy(box: Machine) -> Machine:
    """A healthy node: driver 570, one H100, toolkit 12.8 first on PATH, torch cu128."""
    box.driver("570.124.06", H100)
    box.torch("2.9.1+cu128", "12.8", archs=CU128, seen=1)
    toolkit = box.toolkit("12.8")
    box.path = [f"{toolkit}/bin"]
    return box


@dataclass
class Known:
    """A machine that was examined once, for cases that differ in a variable or in what the driver answers."""

    machine: Machine
    facts: CudaFacts

    def found(self, goal: str = "all", **variables: str) -> dict[str, Finding]:
        """Judge it with other variables that nothing reads but the judgement."""
        return found(judged(replace(self.facts, variables={**self.facts.variables, **variables}), goal=goal))

    def driven(self, monkeypatch: pytest.MonkeyPatch, goal: str = "run", **variables: str) -> dict[str, Finding]:
        """Judge it after its driver was asked again, under these variables."""
        return found(judged(self.machine.ask_driver(monkeypatch, self.facts, **variables), goal=goal))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """The healthy node, examined once."""
    return examined(healthy(Machine(tmp_path_factory.mktemp("known") / "box")))


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """A build node without a GPU, for CUDA 13.0, examined once."""
    machine = Machine(tmp_path_factory.mktemp("builder") / "box")
    machine.path = [f"{machine.toolkit('13.0')}/bin"]
    machine.torch("2.13.0+cu130", "13.0", archs="75 80 86 90 100 120 p120")
    return examined(machine)


def examined(machine: Machine) -> Known:
    machine.compiler("gcc", "12.2.0")
    machine.compiler("c++", "12.2.0")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return Known(machine, machine.examine(monkeypatch))


def paths_of_fixes_exist(report: Report[CudaEnv]) -> None:
    """Every absolute path in a printed command exists, except paths created by the command itself."""
    for finding in report.findings:
        for command in finding.fix.commands if finding.fix else ():
            for word in re.split(r"[\s:=]+", command.replace('"', "")):
                if word.startswith("/") and "ln -s" not in command and "dev/shm" not in word:
                    assert os.path.exists(shlex.split(word)[0]), f"{command}: {word} does not exist"


def test_a_healthy_node_has_nothing_to_mend(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    report = node.report(monkeypatch)
    assert [one.id for one in report.findings if one.level is not Level.INFO] == []
    assert (report.data.ready.run, report.data.ready.build) == (True, True)
    assert report.exit_code() == 0


def test_a_wrapper_makes_torch_take_usr_local(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = box.toolkit("13.0")
    box.torch("2.13.0+cu130", "13.0")
    local = box.root / "usr/local"
    box.write(local / "bin/nvcc", f'#!/bin/sh\nexec {toolkit}/bin/nvcc "$@"\n', mode=0o755)
    box.path = [f"{local}/bin"]
    report = box.report(monkeypatch, "build")
    finding = found(report)["toolkit.home"]
    assert finding.level is Level.FAIL
    assert str(local) in finding.title
    assert finding.fix is not None
    assert finding.fix.commands == (f"export CUDA_HOME={toolkit}",)
    paths_of_fixes_exist(report)


def test_a_linked_nvcc_answers_and_does_not_compile(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    link = node.folder / "mine/bin/nvcc"
    link.parent.mkdir(parents=True)
    link.symlink_to(node.root / "usr/local/cuda-12.8/bin/nvcc")
    node.path = [str(link.parent)]
    report = node.report(monkeypatch, "build")
    finding = found(report)["toolkit.nvcc-broken"]
    assert finding.level is Level.FAIL
    assert "symlink" in finding.title
    assert "cuda_runtime.h" in finding.evidence[0]
    paths_of_fixes_exist(report)


def test_a_cpu_torch_is_the_cause_and_not_cuda_home(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = box.toolkit("13.0")
    box.torch("2.13.0+cpu", None)
    box.env["CUDA_HOME"] = str(toolkit)
    report = box.report(monkeypatch, "build")
    finding = found(report)["torch.build"]
    assert (finding.level, found(report).get("toolkit.home")) == (Level.FAIL, None)
    assert f"Setting CUDA_HOME does not help (here it is {toolkit})" in finding.detail
    assert finding.fix is not None
    assert finding.fix.commands[0].endswith(
        "install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"
    )
    assert report.data.ready.build is False


def test_no_torch_at_all(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torch is not installed" in found(box.report(monkeypatch))["torch.build"].title


def test_a_rocm_torch_is_not_judged_by_cudas_rules(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.torch("2.9.1+rocm6.4", None, hip="6.4.1")
    report = box.report(monkeypatch)
    assert report.findings == ()
    assert "ROCm" in report.data.sections[0].line


def test_a_rocm_torch_on_an_nvidia_machine(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.torch("2.9.1+rocm6.4", None, hip="6.4.1")
    assert found(node.report(monkeypatch))["torch.build"].level is Level.FAIL


def test_an_older_toolkit_comes_first_on_path(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    old, right = node.toolkit("11.0"), node.root / "usr/local/cuda-12.8"
    node.compiler("gcc", "9.4.0")
    node.path = [f"{old}/bin", f"{right}/bin"]
    report = node.report(monkeypatch, "build")
    finding = found(report)["toolkit.torch-mismatch"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert finding.fix.commands == (f"export CUDA_HOME={right} PATH={right}/bin:$PATH",)
    paths_of_fixes_exist(report)


def test_the_same_major_version_is_only_a_remark(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.path = [f"{node.toolkit('12.4')}/bin"]
    node.env["CUDA_HOME"] = node.path[0][: -len("/bin")]
    report = node.report(monkeypatch, "build")
    assert found(report)["toolkit.torch-mismatch"].level is Level.INFO
    assert report.data.ready.build is True


def deepspeed(machine: Machine, *, minor_ok: str, built: str = "") -> None:
    """Install a DeepSpeed of a few lines."""
    folder = machine.python() / "deepspeed"
    machine.write(folder / "__init__.py", "")
    machine.write(
        folder / "ops/op_builder/builder.py", f"cuda_minor_mismatch_ok = {{\n    10: ['10.0', '10.1'],\n{minor_ok}}}\n"
    )
    machine.write(
        folder / "git_version_info_installed.py",
        "version='0.18.1'\ninstalled_ops={'cpu_adam': " + str(bool(built)) + ", 'async_io': False}\n"
        f"torch_info={{'version': '{built or '0.0'}', 'cuda_version': '12.4', 'nccl_version': '2.27'}}\n",
    )
    machine.package("deepspeed", "0.18.1")


def test_deepspeed_refuses_minor_versions_of_cuda_13(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.path = [f"{box.toolkit('13.0')}/bin"]
    box.torch("2.13.0+cu132", "13.2")
    deepspeed(box, minor_ok="    12: ['12.0', '12.4', '12.8'],\n")
    finding = found(box.report(monkeypatch, "build"))["deepspeed.cuda13"]
    assert finding.level is Level.WARN
    assert finding.fix is not None
    assert finding.fix.commands == ("export DS_SKIP_CUDA_CHECK=1",)


def test_a_deepspeed_that_knows_both_versions_is_content(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.path = [f"{node.toolkit('12.4')}/bin"]
    deepspeed(node, minor_ok="    12: ['12.0', '12.4', '12.8'],\n")
    report = node.report(monkeypatch, "build")
    assert not [id_ for id_ in found(report) if id_.startswith("deepspeed")]


def test_a_deepspeed_wheel_of_another_torch_is_rebuilt_in_the_words_of_pip_or_uv(
    node: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepspeed(node, minor_ok="    12: ['12.8'],\n", built="2.5")
    facts = node.examine(monkeypatch)
    finding = found(judged(facts))["deepspeed.wheel"]
    assert finding.level is Level.FAIL
    assert "2.5" in finding.title
    assert finding.fix is not None
    assert " -m pip install " in finding.fix.commands[0]
    assert " --force-reinstall " in finding.fix.commands[0]
    facts = replace(facts, python=replace(facts.python, pip=False), building=replace(facts.building, uv="/usr/bin/uv"))
    finding = found(judged(facts))["deepspeed.wheel"]
    assert finding.fix is not None
    (command,) = finding.fix.commands
    assert command.startswith("uv pip install ")
    assert " --reinstall " in command
    assert "--force-reinstall" not in command


@pytest.mark.parametrize(
    ("value", "word"),
    [
        *((":{}", "':'"), ("{}\n", "white space"), ('"{}"', "quotes"), ("~/cuda", "~"), ("/nope", "no such directory")),
    ],
)
def test_a_cuda_home_that_cannot_be_meant(
    node: Machine, monkeypatch: pytest.MonkeyPatch, value: str, word: str
) -> None:
    right = node.root / "usr/local/cuda-12.8"
    node.env["CUDA_HOME"] = value.format(right)
    node.write(node.home / ".bashrc", "# mine\nexport CUDA_HOME=$CUDA_HOME:/usr/local/cuda\n")
    report = node.report(monkeypatch, "build")
    finding = found(report)["toolkit.home"]
    assert (finding.level, word in finding.title) == (Level.FAIL, True), finding.title
    assert f"{node.home}/.bashrc:2" in finding.evidence[0]
    assert finding.fix is not None
    assert f"export CUDA_HOME={right}" in finding.fix.commands[0]


def test_builds_that_would_use_different_toolkits(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.env["CUDA_HOME"] = str(node.toolkit("12.1"))
    finding = found(node.report(monkeypatch, "build"))["toolkit.multiple"]
    assert finding.level is Level.WARN
    assert "torch extensions 12.1" in finding.title
    assert "CMake 12.8" in finding.title


def test_several_toolkits_are_a_remark_as_long_as_all_use_the_same(
    node: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.toolkit("12.4")
    assert found(node.report(monkeypatch, "build"))["toolkit.multiple"].level is Level.INFO


def test_a_link_to_a_toolkit_that_was_removed(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.root / "usr/local/cuda").symlink_to(node.root / "usr/local/cuda-11.7")
    node.path = []
    report = node.report(monkeypatch, "build")
    finding = found(report)["toolkit.found"]
    assert finding.level is Level.FAIL
    assert "is a dangling symlink" in finding.title
    assert finding.fix is not None
    assert f"export CUDA_HOME={node.root}/usr/local/cuda-12.8" in finding.fix.commands[0]
    paths_of_fixes_exist(report)


def test_a_toolkit_that_nobody_would_find(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.path = []
    finding = found(node.report(monkeypatch, "build"))["toolkit.found"]
    assert "cuda-12.8 has one" in finding.title


def test_pip_torch_without_a_toolkit_runs_and_does_not_build(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.driver("570.124.06", H100)
    box.torch("2.9.1+cu128", "12.8", archs=CU128, seen=1)
    report = box.report(monkeypatch)
    assert found(report)["toolkit.found"].level is Level.FAIL
    assert (report.data.ready.run, report.data.ready.build) == (True, False)
    assert box.report(monkeypatch, "run").exit_code() == 0


def test_nvcc_calls_a_compiler_that_its_header_refuses(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.compiler("c++", "13.3.0")
    node.compiler("gcc", "15.1.0")
    node.compiler("gcc-13", "13.3.0")
    report = node.report(monkeypatch, "build")
    finding = found(report)["cc.nvcc"]
    assert finding.level is Level.FAIL
    assert "gcc 15.1.0" in finding.title
    assert "gcc <= 14" in finding.title
    assert "will not warn" in finding.detail
    assert finding.fix is not None
    gcc, gxx = node.bin / "gcc-13", node.bin / "g++-13"
    assert finding.fix.commands == (f"export CC={gcc} CXX={gxx} NVCC_CCBIN={gxx}",)
    paths_of_fixes_exist(report)


def test_the_header_wins_over_torchs_table(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.path = [f"{box.toolkit('12.3')}/bin"]
    box.torch("2.4.0+cu123", "12.3")
    for name in ("gcc", "c++", "gcc-13"):
        box.compiler(name, "13.2.0")
    report = box.report(monkeypatch, "build")
    assert (found(report)["cc.nvcc"].level, "cc.torch" in found(report)) == (Level.FAIL, False)


def test_a_toolkit_that_torch_has_no_bounds_for(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.path = [f"{box.toolkit('13.1')}/bin"]
    box.torch("2.13.0+cu131", "13.1")
    for name in ("gcc", "c++"):
        box.compiler(name, "15.1.0")
    report = box.report(monkeypatch, "build")
    assert not [id_ for id_ in found(report) if id_.startswith("cc.")]


def test_torchs_own_compiler_is_too_new_for_its_table(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.compiler("c++", "15.1.0")
    by_setup = node.bin / sysconfig.get_config_var("CXX").split()[0]
    if by_setup.name != "g++":  # Debian's Python
        by_setup.symlink_to("g++-12")
    finding = found(node.report(monkeypatch, "build"))["cc.torch"]
    assert finding.level is Level.WARN  # setup.py builds call g++, which is 12
    assert "first use" in finding.detail
    node.env["CXX"] = "c++"
    finding = found(node.report(monkeypatch, "build"))["cc.torch"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert f"CXX={node.bin}/g++-12" in finding.fix.commands[0]


def test_there_is_no_compiler(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in node.bin.glob("*"):
        if path.name != "ninja":
            path.unlink()
    report = node.report(monkeypatch, "build")
    assert found(report)["cc.nvcc"].level is Level.FAIL
    assert found(report)["cc.torch"].level is Level.FAIL


def test_flags_that_switch_the_check_off(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.env["NVCC_APPEND_FLAGS"] = "-allow-unsupported-compiler"
    finding = found(node.report(monkeypatch, "build"))["cc.flags"]
    assert finding.level is Level.WARN
    assert finding.fix is not None
    assert finding.fix.commands == ("unset NVCC_APPEND_FLAGS",)


@each(
    "text, better",
    [
        *(("8.0,8.6", "8.0;8.6"), ("8.0;", "8.0"), ("sm_90", "9.0"), ("10.0f", "10.0"), ("80 86", "8.0;8.6")),
        *(("9.0A", "9.0a"), ("All", "7.5;8.0;8.6;9.0;10.0;12.0"), ("Hopper+PTX", "9.0+PTX")),
    ],
)
def test_an_arch_list_that_torch_does_not_read(builder: Known, text: str, better: str) -> None:
    finding = builder.found("build", TORCH_CUDA_ARCH_LIST=text)["archlist.syntax"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert finding.fix.commands == (f'export TORCH_CUDA_ARCH_LIST="{better}"',)


def test_an_arch_that_nvcc_no_longer_compiles(builder: Known) -> None:
    finding = builder.found("build", TORCH_CUDA_ARCH_LIST="7.0;8.0")["archlist.nvcc"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert finding.fix.commands == ('export TORCH_CUDA_ARCH_LIST="8.0"',)


@each(
    "text, gpus, level, better",
    [
        ("8.6", "A100:8.0;A10:8.6", Level.FAIL, "8.0;8.6"),
        *(("8.0", "A100:8.0;L40:8.9", None, ""), ("9.0a", "H100:9.0", None, ""), ("Ampere", "A100:8.0", None, "")),
        ("9.0a", "B200:10.0", Level.FAIL, "9.0a;10.0"),
        ("10.0a", "B300:10.3", Level.FAIL, "10.0a;10.3"),
        ("9.0+PTX", "NVIDIA GeForce RTX 5090:12.0", Level.WARN, "9.0+PTX;12.0"),
    ],
)
def test_an_arch_list_and_the_gpus_that_are_here(
    builder: Known, text: str, gpus: str, level: Level | None, better: str
) -> None:
    names = [gpu.split(":") for gpu in gpus.split(";")]
    there = tuple(Gpu(number, name, capability) for number, (name, capability) in enumerate(names))
    driver = replace(builder.facts.driver, answer=replace(builder.facts.driver.answer, present=there, visible=there))
    finding = (
        Known(builder.machine, replace(builder.facts, driver=driver))
        .found(TORCH_CUDA_ARCH_LIST=text)
        .get("archlist.gpus")
    )
    assert (finding.level if finding else None) is level
    if finding is not None:
        assert finding.fix is not None
        assert finding.fix.commands == (f'export TORCH_CUDA_ARCH_LIST="{better}"',)


def test_no_arch_list_and_no_gpu_to_take_it_from(builder: Known) -> None:
    finding = builder.found("build")["archlist.unset-nogpu"]
    assert finding.level is Level.WARN
    assert "IndexError" in finding.detail
    assert finding.fix is not None
    assert finding.fix.commands == ('export TORCH_CUDA_ARCH_LIST="7.5;8.0;8.6;9.0;10.0;12.0"',)


def test_the_table_of_builds_as_torch_2_12_has_it(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.path = [f"{box.toolkit('13.0')}/bin"]
    folder = box.torch("2.12.0+cu130", "13.0")
    box.write(
        folder / "cuda/__init__.py",
        "PYTORCH_RELEASES_CODE_CC: dict[str, set[int]] = {\n"
        '    "12.6": {50, 60, 70, 75, 80, 86, 90},\n    "13.0": {75, 80, 86, 90, 100, 110, 120},\n}\n',
    )
    facts = box.examine(monkeypatch, "build")
    assert facts.torch is not None
    assert facts.torch.releases["12.6"] == (50, 60, 70, 75, 80, 86, 90)
    finding = found(judged(facts, goal="build"))["archlist.unset-nogpu"]
    assert finding.fix is not None
    assert finding.fix.commands == ('export TORCH_CUDA_ARCH_LIST="7.5;8.0;8.6;9.0;10.0;12.0"',)


def test_an_old_gpu_under_a_new_torch(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.driver("580.65.06", cuda=13000)
    box.torch("2.13.0+cu130", "13.0", archs=CU128, seen=1)
    old = examined(box)
    for gpu in ("Tesla V100-SXM2-16GB:7.0", "NVIDIA GeForce GTX 1080:6.1"):
        finding = old.driven(monkeypatch, FAKE_GPUS=gpu)["arch.torch"]
        assert finding.level is Level.FAIL
        assert finding.fix is not None
        assert finding.fix.commands[0].endswith("cu126")


def test_a_new_gpu_under_an_old_torch(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.driver("580.65.06", "NVIDIA GeForce RTX 5090:12.0", cuda=13000)
    box.torch("2.5.1+cu124", "12.4", archs="50 60 70 75 80 86 90", seen=1)
    finding = found(box.report(monkeypatch, "run"))["arch.torch"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert re.search(r"cu(128|129|13\d)$", finding.fix.commands[0])


def test_a_driver_that_is_too_old_for_torch(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.driver("535.104.05", H100, cuda=12020)
    box.torch("2.13.0+cu130", "13.0", archs=CU128)
    finding = found(box.report(monkeypatch, "run"))["driver.min"]
    assert finding.level is Level.FAIL
    assert "580.65.06" in finding.title
    assert finding.fix is not None
    assert finding.fix.commands[0].endswith(("cu126", "cu129"))


def test_an_older_driver_of_the_same_major_version_is_enough(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.driver("535.104.05", H100, cuda=12020)
    box.torch("2.9.1+cu128", "12.8", archs=CU128, seen=1)
    assert box.report(monkeypatch, "run").exit_code() == 0


def test_a_compat_library_on_a_data_center_gpu_is_what_it_is_for(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.driver("535.104.05", H100, cuda=13000)
    box.torch("2.13.0+cu130", "13.0", archs=CU128, seen=1)
    compat = box.libcuda("580.65.06", box.root / "usr/local/cuda-13.0/compat")
    box.env["LD_LIBRARY_PATH"] = str(compat)
    report = box.report(monkeypatch, "run")
    assert found(report)["driver.compat-lib"].level is Level.INFO
    assert report.exit_code() == 0


@pytest.mark.parametrize(
    ("gpu", "kernel", "compat", "status", "word"),
    [
        ("NVIDIA GeForce RTX 4090:8.9", "535.104.05", "550.54.14", 804, "804"),
        (H100, "580.65.06", "550.54.14", 803, "803"),
    ],
)
def test_a_compat_library_that_does_not_fit(
    box: Machine, monkeypatch: pytest.MonkeyPatch, gpu: str, kernel: str, compat: str, status: int, word: str
) -> None:
    box.driver(kernel, gpu, init=status)
    box.torch("2.9.1+cu128", "12.8", archs=CU128)
    folder = box.libcuda(compat, box.root / "usr/local/cuda/compat")
    box.env["LD_LIBRARY_PATH"] = f"{folder}:{box.bin}"
    finding = found(box.report(monkeypatch, "run"))["driver.compat-lib"]
    assert (finding.level, word in finding.title) == (Level.FAIL, True)
    assert finding.fix is not None
    assert finding.fix.commands == (f"export LD_LIBRARY_PATH={box.bin}",)


def test_kernel_and_libraries_of_different_drivers(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.libcuda("575.51.03", node.folder / "upgraded")
    finding = found(node.report(monkeypatch, "run"))["driver.userland-kernel"]
    assert finding.level is Level.FAIL
    assert "570.124.06" in finding.title
    assert "575.51.03" in finding.title


def test_the_stub_is_taken_for_the_driver(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = node.libcuda("570.124.06", node.root / "usr/local/cuda-12.8/lib64/stubs")
    node.env |= {"LD_LIBRARY_PATH": f"{stubs}", "FAKE_INIT": "34"}
    finding = found(node.report(monkeypatch, "run"))["driver.stub"]
    assert finding.level is Level.FAIL


def test_a_container_that_was_given_no_gpu(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix is that of the container which this is, and is given only where a driver is missing."""
    box.torch("2.9.1+cu128", "12.8", archs=CU128)
    bare = examined(box)
    signs = {
        "/.dockerenv": "docker run --gpus all",
        "/run/.containerenv": "podman run --device nvidia.com/gpu=all",
        "container=lxc": "its GPU devices",
        "KUBERNETES_SERVICE_HOST=10.0.0.1": "nvidia.com/gpu: 1",
        "/.singularity.d": "apptainer exec --nv",
    }
    for hardware in (False, True):
        if hardware:
            box.write("/sys/bus/pci/devices/0000:17:00.0/vendor", "0x10de\n")
            box.write("/sys/bus/pci/devices/0000:17:00.0/class", "0x030200\n")
        for sign, fix in signs.items():
            name, _, value = sign.partition("=")
            if value:
                box.env[name] = value
            else:
                box.write(sign, "")
            finding = bare.driven(monkeypatch)["driver.present"]
            box.env.pop(name, None)
            (box.root / sign[1:]).unlink(missing_ok=True)
            assert finding.level is Level.FAIL
            assert ("this container has no GPU access" in finding.title) is hardware
            assert finding.fix is not None
            assert fix in finding.fix.text, sign
            others = [other for other in signs.values() if other != fix]
            assert not any(other in finding.fix.text for other in others), sign


def test_a_driver_that_never_answers(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.env["FAKE_HANG"] = "1"
    finding = found(node.report(monkeypatch, "run", timeout_s=5.0))["driver.hangs"]
    assert finding.level is Level.FAIL
    assert "cuInit" in finding.title


def test_a_driver_that_nobody_came_to_ask_is_not_called_hung(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = found(node.report(monkeypatch, "run", timeout_s=0.001))
    assert problems["driver.not-queried"].level is Level.UNKNOWN
    assert not {"driver.hangs", "driver.present"} & set(problems)


@pytest.mark.parametrize(
    ("status", "id_", "fix"),
    [("802", "gpu.fabric", ""), ("304", "driver.init", "modprobe nvidia_uvm"), ("999", "driver.init", "modprobe")],
)
def test_a_driver_that_does_not_start_says_nothing_of_what_is_visible(
    known: Known, monkeypatch: pytest.MonkeyPatch, status: str, id_: str, fix: str
) -> None:
    problems = known.driven(monkeypatch, FAKE_INIT=status, CUDA_VISIBLE_DEVICES="0")
    finding = problems[id_]
    assert (finding.level, "gpu.visible" in problems, finding.fix is not None) == (Level.FAIL, False, True)
    assert finding.fix is not None
    assert fix in "".join(finding.fix.commands[:1])


@pytest.mark.parametrize(
    ("value", "level", "better"),
    [
        *(("", Level.FAIL, ""), ("-1", Level.FAIL, ""), ("0,9", Level.WARN, ""), ("9,0", Level.FAIL, "")),
        *(("0", None, ""), ("0-3", Level.WARN, "0,1,2,3"), ("0;1", Level.WARN, "0,1")),
    ],
)
def test_gpus_that_the_variable_hides(
    known: Known, monkeypatch: pytest.MonkeyPatch, value: str, level: Level | None, better: str
) -> None:
    finding = known.driven(monkeypatch, CUDA_VISIBLE_DEVICES=value, FAKE_GPUS=EIGHT).get("gpu.visible")
    assert (finding.level if finding else None) is level
    if finding is not None and better:
        assert finding.fix is not None
        assert finding.fix.commands == (f"export CUDA_VISIBLE_DEVICES={better}",)


def wheels(machine: Machine, generation: str = "12", version: str = "12.8.93") -> None:
    """Install NVIDIA's wheels beside torch."""
    for name, library in (("nvjitlink", "libnvJitLink.so"), ("cusparse", "libcusparse.so"), ("cublas", "libcublas.so")):
        machine.package(f"nvidia-{name}-cu{generation}", version, (f"nvidia/{name}/lib/{library}.{generation}",))


def loader_folder(machine: Machine, name: str, *libraries: str) -> str:
    """Make a directory with libraries as a toolkit has them: a soname that links to the real file."""
    folder = machine.folder / name
    for library in libraries:
        soname = re.sub(r"(\.so\.\d+).*", r"\1", library)
        machine.write(folder / library, "")
        (folder / soname).symlink_to(library)
    return str(folder)


@pytest.mark.parametrize(
    ("libraries", "level"),
    [
        (("libnvJitLink.so.12.4.127", "libcublas.so.12.4.5"), Level.FAIL),
        (("libcublas.so.12.8.4",), Level.WARN),  # harmless
        (("libnvJitLink.so.13.0.39",), None),  # of a toolkit of another major version
    ],
)
def test_a_library_replaces_one_of_torchs(
    node: Machine, monkeypatch: pytest.MonkeyPatch, libraries: tuple[str, ...], level: Level | None
) -> None:
    wheels(node)
    node.env["LD_LIBRARY_PATH"] = loader_folder(node, "lib64", *libraries)
    finding = found(node.report(monkeypatch, "run")).get("libs.shadow")
    assert (finding.level if finding else None) is level
    if finding is not None and level is Level.FAIL:
        assert "libnvJitLink.so.12" in finding.title
        assert finding.fix is not None
        assert finding.fix.commands == ("unset LD_LIBRARY_PATH",)


def test_the_version_of_a_shadowing_cudnn_is_read(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file's name has the major one only: a wheel of another environment, or a copy in the toolkit's directory."""
    node.package("nvidia-cudnn-cu12", "9.10.2.21", ("nvidia/cudnn/lib/libcudnn.so.9",))
    other = node.folder / "other/lib/python3.11/site-packages"
    node.write(other / "nvidia/cudnn/lib/libcudnn.so.9", "")
    node.write(other / "nvidia_cudnn_cu12-9.1.0.70.dist-info/RECORD", "nvidia/cudnn/lib/libcudnn.so.9,,\n")
    node.env["LD_LIBRARY_PATH"] = str(other / "nvidia/cudnn/lib")
    finding = found(node.report(monkeypatch, "run"))["libs.shadow"]
    assert (finding.level, "libcudnn.so.9 (9.1.0.70) before" in finding.evidence[0]) == (Level.FAIL, True)
    copied = node.folder / "cuda"
    node.write(copied / "lib64/libcudnn.so.9", "")
    node.write(
        copied / "include/cudnn_version.h",
        "#define CUDNN_MAJOR 9\n#define CUDNN_MINOR 11\n#define CUDNN_PATCHLEVEL 0\n",
    )
    node.env["LD_LIBRARY_PATH"] = str(copied / "lib64")
    finding = found(node.report(monkeypatch, "run"))["libs.shadow"]
    assert (finding.level, "libcudnn.so.9 (9.11.0) before" in finding.evidence[0]) == (Level.WARN, True)
    (copied / "include/cudnn_version.h").unlink()
    assert found(node.report(monkeypatch, "run"))["libs.shadow"].level is Level.WARN


def test_odd_elements_of_ld_library_path(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.folder / "there").mkdir()
    node.env["LD_LIBRARY_PATH"] = f"{node.folder}/there::{node.folder}/gone"
    report = node.report(monkeypatch, "run")
    assert found(report)["libs.path-empty"].level is Level.WARN
    assert found(report)["libs.path-missing"].level is Level.INFO


def test_two_wheels_that_own_the_same_library(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for generation, version in (("12", "2.27.5"), ("13", "2.28.3")):
        node.package(f"nvidia-nccl-cu{generation}", version, ("nvidia/nccl/lib/libnccl.so.2",))
    finding = found(node.report(monkeypatch, "run"))["libs.duplicate-wheels"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    remove, again = finding.fix.commands
    assert remove.endswith("uninstall -y nvidia-nccl-cu13")
    assert again.endswith("--force-reinstall --no-deps nvidia-nccl-cu12==2.27.5")


def test_the_toolkit_of_the_wheels_has_nothing_to_link_against(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.torch("2.13.0+cu130", "13.0")
    home = box.toolkit("13.0", box.python() / "nvidia/cu13", lib="lib")
    (home / "lib/libcudart.so").rename(home / "lib/libcudart.so.13")
    box.path = [f"{home}/bin"]
    finding = found(box.report(monkeypatch, "build"))["toolkit.cudart-devlink"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert finding.fix.commands == (f"ln -s libcudart.so.13 {home}/lib/libcudart.so",)


def test_condas_headers_lie_where_torch_does_not_look(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.torch("2.4.0+cu124", "12.4")
    prefix = box.folder / "conda"
    box.toolkit("12.4", prefix, lib="lib")
    (prefix / "conda-meta").mkdir()
    (prefix / "targets/x86_64-linux").mkdir(parents=True)
    (prefix / "include").rename(prefix / "targets/x86_64-linux/include")
    box.env["CONDA_PREFIX"] = str(prefix)
    box.path = [f"{prefix}/bin"]
    report = box.report(monkeypatch, "build")
    finding = found(report)["toolkit.headers"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert f"CPATH={prefix}/targets/x86_64-linux/include" in finding.fix.commands[0]


@pytest.mark.parametrize(("version", "is_other"), [("12.4.1", True), ("12.8.1", False)])
def test_a_tree_of_two_versions(
    node: Machine, monkeypatch: pytest.MonkeyPatch, version: str, *, is_other: bool
) -> None:
    node.write(node.root / "usr/local/cuda-12.8/version.json", f'{{"cuda": {{"version": "{version}"}}}}')
    finding = found(node.report(monkeypatch, "build")).get("toolkit.version-sources")
    assert (finding.level if finding else None) is (Level.FAIL if is_other else None)


def test_an_image_for_running_only(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    top = node.root / "usr/local/cuda-12.8"
    (top / "bin/nvcc").unlink()
    (node.root / "usr/local/cuda").symlink_to(top)
    node.write("/.dockerenv", "")
    report = node.report(monkeypatch)
    finding = found(report)["toolkit.found"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert "-devel" in finding.fix.text
    assert (report.data.ready.run, report.data.ready.build) == (True, False)


def test_extensions_that_another_torch_left(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = node.home / ".cache/torch_extensions"
    tag = f"py{''.join(map(str, __import__('sys').version_info[:2]))}"
    node.write(cache / f"{tag}_cu118/fused_adam/build.ninja", "")
    report = node.report(monkeypatch, "build")
    assert found(report)["build.cache-stale"].level is Level.INFO
    node.write(cache / f"{tag}_cu128/fused_adam/build.ninja", "")
    os.utime(cache / f"{tag}_cu128", (1, 1))
    finding = found(node.report(monkeypatch, "build"))["build.cache-stale"]
    assert finding.level is Level.WARN
    assert finding.fix is not None
    assert finding.fix.commands == (f"rm -rf {cache}/{tag}_cu128",)


def test_no_ninja(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.bin / "ninja").unlink()
    assert found(node.report(monkeypatch, "build"))["build.ninja"].level is Level.WARN


def test_more_compilers_than_memory_carries(known: Known) -> None:
    finding = known.found("build", MAX_JOBS="4000")["build.jobs"]
    assert finding.level is Level.WARN
    assert finding.fix is not None
    assert re.fullmatch(r"export MAX_JOBS=\d+", finding.fix.commands[0])


def test_a_torch_that_cannot_be_imported(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write(
        node.python() / "torch/__init__.py",
        "raise ImportError('libtorch_cuda.so: undefined symbol: ncclCommResume')\n",
    )
    report = node.report(monkeypatch)
    finding = found(report)["torch.import"]
    assert (finding.level, "ncclCommResume" in finding.title) == (Level.FAIL, True)
    assert report.data.ready.run is False


def test_a_torch_whose_import_never_ends(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write(node.python() / "torch/__init__.py", "import time\ntime.sleep(1000)\n")
    report = node.report(monkeypatch, "run", timeout_s=5.0)
    assert found(report)["torch.import"].level is Level.UNKNOWN
    assert (report.data.ready.run, report.exit_code()) == (None, 3)


def test_nodes_that_are_not_alike_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "node")
    machine.driver("570.124.06", H100)
    machine.torch("2.9.1+cu128", "12.8", archs=CU128)
    machine.path = [f"{machine.toolkit('12.8')}/bin"]
    usual = examined(machine).facts
    first = machine.ask_driver(monkeypatch, usual, FAKE_GPUS="A100:8.0")
    machine.path = [f"{machine.toolkit('12.4')}/bin"]
    nodes = (first, usual, examined(machine).facts)
    report = judged(*(replace(facts, host=f"node{number}") for number, facts in enumerate(nodes)))
    finding = found(report)["nodes-differ"]
    assert finding.where.hosts == ("node2",)
    assert finding.evidence == ("toolkit: 12.4 on node2; 12.8 on node[0-1]",)
    assert report.data.arch_list == "8.0;9.0"
    assert [row.hosts for row in report.data.sections if row.name == "Driver"] == [("node0", "node1", "node2")]


def test_findings_can_be_chosen_and_ignored(known: Known) -> None:
    facts = replace(known.facts, variables={**known.facts.variables, "TORCH_CUDA_ARCH_LIST": "sm_90"})
    assert "build.ninja" in found(judged(facts))
    assert set(found(judged(facts, only=("archlist",)))) == {"archlist.syntax"}
    report = judged(facts, ignore=(("archlist.syntax", "we know"),))
    assert "archlist.syntax" not in found(report)
    assert [(one.id, one.reason) for one in report.data.silenced] == [("cuda-env.archlist.syntax", "we know")]


def test_the_compiler_is_judged_for_the_toolkit_that_will_be_used(
    node: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old toolkit is first; its view of the compilers is irrelevant once the fix is applied."""
    node.path = [f"{node.toolkit('11.0')}/bin"]
    report = node.report(monkeypatch, "build")
    assert "toolkit.torch-mismatch" in found(report)
    assert not [id_ for id_ in found(report) if id_.startswith("cc.")]
    node.compiler("gcc", "15.1.0")
    finding = found(node.report(monkeypatch, "build"))["cc.nvcc"]
    assert "nvcc 12.8 would use gcc (gcc 15.1.0) as its host compiler, but supports only gcc <= 14" in finding.title


def test_a_linux_driver_inside_wsl(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("/proc/version", "Linux version 5.15.167.4-microsoft-standard-WSL2\n")
    node.libcuda("535.104.05", node.root / "usr/lib/x86_64-linux-gnu")
    finding = found(node.report(monkeypatch, "run"))["driver.wsl"]
    assert finding.level is Level.FAIL
    assert finding.evidence == (f"{node.root}/usr/lib/x86_64-linux-gnu/libcuda.so.535.104.05",)


def test_libcuda_where_the_loader_does_not_look(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    box.torch("2.9.1+cu128", "12.8", archs=CU128)
    box.libcuda("570.124.06", box.root / "usr/local/nvidia/lib64")
    del box.env["LD_PRELOAD"]
    finding = found(box.report(monkeypatch, "run"))["driver.present"]
    assert finding.fix is not None
    assert finding.fix.commands[0].startswith(f"export LD_LIBRARY_PATH={box.root}/usr/local/nvidia/lib64")


def test_mig_instances_are_a_remark(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.env["FAKE_MIG"] = "1"
    node.env["CUDA_VISIBLE_DEVICES"] = "0"
    report = node.report(monkeypatch, "run")
    assert found(report)["gpu.mig"].level is Level.INFO
    assert report.exit_code() == 0


def test_kernel_and_libraries_differ_as_nvml_says_it(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "driver.userland-kernel" in known.driven(monkeypatch, FAKE_NVML="18", FAKE_INIT="803")


def test_a_hostile_environment_costs_nothing(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage where tables are looked for, a directory where a file should be, an nvcc that never ends."""
    node.write(node.python() / "torch/utils/cpp_extension.py", "CUDA_GCC_VERSIONS = {" * 1000)
    node.write(node.python() / "torch/cuda/__init__.py", "PYTORCH_RELEASES_CODE_CC = [1, 2]\n")
    node.write(node.root / "usr/local/cuda-12.8/version.json", '{"cuda": [1]}')
    (node.root / "usr/local/cuda-9.9").mkdir(parents=True)
    (node.bin / "clang-99").mkdir()
    assert found(node.report(monkeypatch)) is not None


def test_an_nvcc_that_torch_does_not_use_is_only_worth_a_warning(
    node: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = node.folder / "mine/bin/nvcc"
    link.parent.mkdir(parents=True)
    link.symlink_to(node.root / "usr/local/cuda-12.8/bin/nvcc")
    node.path = [str(link.parent)]
    node.env["CUDA_HOME"] = str(node.root / "usr/local/cuda-12.8")
    report = node.report(monkeypatch, "build")
    assert found(report)["toolkit.nvcc-broken"].level is Level.WARN
    assert report.data.ready.build is True


def test_an_nvcc_that_never_answers(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from distdiag.commands.cuda_env import collect

    monkeypatch.setattr(collect, "_QUICK_S", 1.0)  # the timeout itself is not under test
    node.write(node.root / "usr/local/cuda-12.8/bin/nvcc", "#!/bin/sh\nexec sleep 100\n", mode=0o755)
    node.path = [*node.path, "/usr/bin", "/bin"]
    finding = found(node.report(monkeypatch, "build"))["toolkit.nvcc-broken"]
    assert (finding.level, "does not respond" in finding.title) == (Level.FAIL, True)


def test_the_long_form_of_gccs_refusal_is_no_missing_compiler(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hint mentions "an unsupported host compiler"."""
    node.compiler("gcc", "15.1.0")
    header = node.root / "usr/local/cuda-12.8/include/crt/host_config.h"
    header.write_text(
        header.read_text().replace("this version check", "this version check; an unsupported host compiler")
    )
    assert "gcc <= 14" in found(node.report(monkeypatch, "build"))["cc.nvcc"].title


@pytest.mark.parametrize("name", ["CC", "NVCC_CCBIN"])
def test_a_host_compiler_that_is_not_there(node: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    node.env[name] = "/nope/gcc"
    finding = found(node.report(monkeypatch, "build"))["cc.nvcc"]
    assert f"{name}=/nope/gcc" in finding.title
    assert finding.fix is not None
    assert f"NVCC_CCBIN={node.bin}/g++-12" in finding.fix.commands[0]


def test_cc_decides_what_nvcc_calls_for_torch(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.compiler("gcc", "15.1.0")
    node.compiler("c++", "12.2.0")
    node.env |= {"CC": str(node.bin / "gcc-12"), "CXX": str(node.bin / "g++-12")}
    report = node.report(monkeypatch, "build")
    assert not [id_ for id_ in found(report) if id_.startswith("cc.")]


def test_flags_that_nvcc_does_not_know(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.env["NVCC_APPEND_FLAGS"] = "--bogus"
    report = node.report(monkeypatch, "build")
    assert found(report)["cc.flags"].level is Level.FAIL
    assert "toolkit.nvcc-broken" not in found(report)


def test_unchecked_and_too_new_gets_a_compiler_too(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.compiler("gcc", "15.1.0")
    node.env["NVCC_APPEND_FLAGS"] = "-allow-unsupported-compiler"
    finding = found(node.report(monkeypatch, "build"))["cc.flags"]
    assert finding.level is Level.FAIL
    assert finding.fix is not None
    assert finding.fix.commands[0] == "unset NVCC_APPEND_FLAGS"
    assert f"CC={node.bin}/gcc-12" in finding.fix.commands[1]


def test_a_compiler_in_a_wrapper(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write(node.bin / "ccache", "#!/bin/sh\necho ccache version 4.9\n", mode=0o755)
    node.env["CXX"] = "ccache g++"
    finding = found(node.report(monkeypatch, "build"))["cc.torch"]
    assert (finding.level, "ccache" in finding.title) == (Level.FAIL, True)


def test_a_wrapper_of_a_toolkit_in_no_usual_place(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = box.toolkit("12.8", box.folder / "weird/cuda")
    box.torch("2.9.1+cu128", "12.8")
    box.write(box.folder / "tools/bin/nvcc", f'#!/bin/sh\nexec {toolkit}/bin/nvcc "$@"\n', mode=0o755)
    box.path = [f"{box.folder}/tools/bin"]
    finding = found(box.report(monkeypatch, "build"))["toolkit.home"]
    assert finding.fix is not None
    assert finding.fix.commands == (f"export CUDA_HOME={toolkit}",)


def test_the_kernels_driver_without_libcuda_is_a_container_without_gpus(
    box: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`docker run` without --gpus: /proc is the host's, so the kernel's driver can be seen."""
    box.torch("2.9.1+cu128", "12.8", archs=CU128)
    box.driver("570.124.06", H100)
    del box.env["LD_PRELOAD"]
    box.write("/.dockerenv", "")
    report = box.report(monkeypatch, "run")
    assert "this container has no GPU access" in found(report)["driver.present"].title
    assert report.data.ready.run is False


def test_torch_sees_fewer_gpus_than_the_driver(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    node.env["FAKE_GPUS"] = EIGHT
    facts = node.examine(monkeypatch, "run")
    assert found(judged(facts, goal="run"))["gpu.torch"].level is Level.WARN
    none = replace(facts, imported=replace(facts.imported, available=False, count=0)) if facts.imported else facts
    assert found(judged(none, goal="run"))["gpu.torch"].level is Level.FAIL


def test_only_builds_that_exist_of_a_version_are_offered(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = box.torch("2.4.0+cpu", None)
    box.write(folder / "cuda/__init__.py", "")  # those versions have no table of their own
    facts = box.examine(monkeypatch, "build")
    assert facts.torch is not None
    for version, build in (("2.4.0", "cu124"), ("2.0.1", "cu118")):
        other = replace(facts, torch=replace(facts.torch, version=f"{version}+cpu"))
        finding = found(judged(other, goal="build"))["torch.build"]
        assert finding.fix is not None
        index = f"--index-url https://download.pytorch.org/whl/{build}"
        assert finding.fix.commands[0].endswith(f"torch=={version}+{build} {index}")


@pytest.mark.parametrize(
    ("status", "level", "words"),
    [
        (17, Level.INFO, "4 of 8 GPUs are usable here"),  # the device cgroup of a job or a container
        (4, Level.INFO, "4 of 8 GPUs are usable here"),
        (15, Level.FAIL, "GPU 4, 5, 6, 7 does not respond"),
        (999, Level.UNKNOWN, "GPU 4, 5, 6, 7 cannot be opened"),
    ],
)
def test_a_gpu_that_this_process_may_not_use_is_no_fault(
    known: Known, monkeypatch: pytest.MonkeyPatch, status: int, level: Level, words: str
) -> None:
    opens = {"FAKE_GPUS": EIGHT, "FAKE_OPEN": "4", "FAKE_HANDLE": str(status)}
    finding = known.driven(monkeypatch, CUDA_VISIBLE_DEVICES="0,1,2,3", **opens)["gpu.visible"]
    assert (finding.level, words in finding.title) == (level, True), finding.title


def test_a_build_is_judged_by_the_gpus_that_are_here(
    node: Machine, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a list torch builds for them: the driver is asked although nothing is to run."""
    assert "archlist.unset-nogpu" not in found(node.report(monkeypatch, "build"))
    finding = known.driven(monkeypatch, "build", FAKE_GPUS="")["archlist.unset-nogpu"]
    assert finding.fix is not None
    assert "distdiag cuda-env --goal build --gpu H100" in finding.fix.text


def test_there_is_no_gpu_and_no_driver_as_expected_of_a_build_node(builder: Known) -> None:
    finding = builder.found()["driver.present"]
    assert "no NVIDIA GPU and no driver found" in finding.title
    assert finding.fix is not None
    assert "container" not in finding.fix.text
    assert "on a login or build node this is expected: check builds only, with --goal build" in finding.fix.text


def test_a_compiler_that_is_there_by_two_folders_is_shown_once(box: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (box.folder / "again").symlink_to(box.bin)
    box.path = [str(box.folder / "again")]
    (section,) = (row for row in box.report(monkeypatch, "build").data.sections if row.name == "Compiler")
    names = [line.partition(":")[0].rpartition("/")[2] for line in section.details]
    assert sorted(names) == ["c++", "g++", "g++-12", "gcc", "gcc-12"]


def test_what_others_print_is_not_taken_for_an_answer(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    chatty = "import atexit\nprint('{\"about\": []}')\natexit.register(print, 'bye {}')\n"
    node.write(node.python() / "sitecustomize.py", chatty)
    report = node.report(monkeypatch)
    assert [one.id for one in report.findings if one.level is not Level.INFO] == []


def test_fixes_of_the_loaders_path_do_not_undo_each_other(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels(node)
    shadow = loader_folder(node, "old", "libnvJitLink.so.12.4.127")
    (node.folder / "mine").mkdir()
    node.env["LD_LIBRARY_PATH"] = f"{shadow}::{node.folder}/gone:{node.folder}/mine"
    report = node.report(monkeypatch, "run")
    values = {command for one in report.findings if one.fix for command in one.fix.commands if "LD_LIBRARY" in command}
    assert values == {f"export LD_LIBRARY_PATH={node.folder}/mine"}


def test_a_torch_whose_version_cannot_be_read_is_unknown(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.python() / "torch/version.py").unlink()
    assert found(node.report(monkeypatch, "run"))["torch.build"].level is Level.UNKNOWN


def test_nothing_is_written_into_the_environment(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(node.python().rglob("*"))
    node.report(monkeypatch)
    assert set(node.python().rglob("*")) == before


def test_a_temporary_directory_that_is_not_there(node: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (node.root / "usr/local/cuda-12.8/bin/nvcc").read_text()
    complain = (
        'test -d "${TMPDIR:-/tmp}" || { echo "nvcc fatal : Could not open output file $TMPDIR/tmpxft_1" >&2; exit 1; }'
    )
    node.write(
        node.root / "usr/local/cuda-12.8/bin/nvcc", text.replace("cc=gcc\n", f"cc=gcc\n{complain}\n"), mode=0o755
    )
    node.env["TMPDIR"] = "/nonexistent"
    finding = found(node.report(monkeypatch, "build"))["toolkit.nvcc-broken"]
    assert "temporary files in /nonexistent" in finding.title
    assert finding.fix is not None
    assert finding.fix.commands == ("export TMPDIR=/tmp",)


def test_the_versions_of_a_ticket_are_read_without_importing_anything(
    node: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.write("/etc/os-release", 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.2 LTS"\n')
    node.write("/proc/cpuinfo", "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\n")
    node.write(node.bin / "cmake", "#!/bin/sh\necho cmake version 3.28.3\n", mode=0o755)
    node.write("/usr/lib/x86_64-linux-gnu/libnccl.so.2.26.2", "")
    wheels = {"nvidia-cudnn-cu12": "9.10.2.21", "triton": "3.5.1", "flash-attn": "2.8.3", "deepspeed": "0.19.8"}
    for name, version in wheels.items():
        node.package(name, version)
    node.write(node.folder / "venv/conda-meta/cuda-nvcc-12.8.93-h8f0b736_1.json", "{}")
    first = node.examine(monkeypatch, "build")
    node.package("nvidia-nccl-cu12", "2.27.5")
    report = judged(first, replace(node.examine(monkeypatch, "build"), host="other"), goal="build")
    rows = [row for row in report.data.sections if row.name == "Versions"]
    assert [(row.level, row.hosts) for row in rows] == [("ok", (first.host,)), ("ok", ("other",))]
    words = rows[0].line
    assert words.startswith("Ubuntu 24.04.2 LTS, glibc ")
    for one in ("CMake 3.28.3", "cuDNN 9.10.2.21", "NCCL 2.26.2", "Triton 3.5.1", "DeepSpeed 0.19.8"):
        assert one in words
    assert "NCCL 2.27.5" in rows[1].line  # the wheel's, which torch loads, before the system's
    assert {"nvidia-cudnn-cu12 9.10.2.21", "cuda-nvcc 12.8.93 (conda)"} <= set(rows[0].details)
    versions = report.data.nodes[1].facts.versions
    assert versions.libraries == {"cuDNN": "9.10.2.21", "NCCL": "2.27.5"}
    assert (versions.conda, versions.processor) == ({"cuda-nvcc": "12.8.93"}, "AMD EPYC 9654 96-Core Processor")
