"""A log and the machine it is explained on: its origin, its end, and unknown parts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cuda_machines import Machine, found, judged
from loops import each

from distdiag.cluster.targets import Cluster
from distdiag.commands.cuda_env.explain import judge
from distdiag.commands.cuda_env.log_fixes import toolkit_of
from distdiag.commands.cuda_env.types import Request
from distdiag.report import Level
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from distdiag.commands.cuda_env.collect import CudaFacts
    from distdiag.commands.cuda_env.types import CudaEnv
    from distdiag.report import Report

RECORDED = Path(__file__).parents[2] / "recorded/cuda_logs"
UNSET = "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.\n"
ROCM = "/opt/rocm-6.3.4/bin/hipcc -I/opt/rocm-6.3.4/include -D__HIP_PLATFORM_AMD__=1 -c flash_api_hip.hip\n"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> CudaFacts:
    """A machine with a CUDA torch, and a toolkit outside all search paths."""
    machine = Machine(tmp_path_factory.mktemp("explain") / "box")
    machine.compiler("gcc", "12.2.0")
    machine.torch("2.9.1+cu128", "12.8")
    machine.toolkit("12.8")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return machine.examine(monkeypatch, "build")


def explained(text: str, facts: CudaFacts, *gpus: str) -> Report[CudaEnv]:
    return judge(Request(cluster=Cluster(), gpus=gpus), (text, ""), Gathered(facts=[facts]))


def recorded(name: str) -> str:
    """Return a recorded log without its two lines of ours."""
    return "\n".join((RECORDED / f"{name}.txt").read_text().split("\n")[2:])


def ids(report: Report[CudaEnv]) -> list[str]:
    return [one.id.removeprefix("cuda-env.log.") for one in report.findings]


def commands(report: Report[CudaEnv]) -> str:
    return "\n".join(command for one in report.findings for command in (one.fix.commands if one.fix else ()))


def test_a_log_of_this_machine_gets_its_toolkit(facts: CudaFacts) -> None:
    report = explained(UNSET, facts)
    assert (ids(report), report.exit_code()) == (["cuda-home-unset"], 1)
    assert "export CUDA_HOME=/" in commands(report)
    assert "/usr/local/cuda-12.8" in commands(report)


@each(
    "more, sign",
    [
        ("Torch 2.0.1+cu118\n", "torch 2.0.1+cu118"),
        (
            '  File "/home/kim/.local/lib/python3.10/site-packages/torch/utils/cpp_extension.py", line 2506\n',
            "/home/kim/",
        ),
        ("bin C:\\Users\\mustf\\anaconda3\\envs\\py310\\lib\n", "C:\\Users"),
        (ROCM, "ROCm (/opt/rocm-6.3.4)"),
    ],
)
def test_nothing_of_this_machine_gets_into_the_log_of_another(facts: CudaFacts, more: str, sign: str) -> None:
    report = explained(more + UNSET, facts)
    assert ids(report) == ["cuda-home-unset", "elsewhere"]
    assert sign in report.findings[-1].title
    assert "cuda-12.8" not in commands(report)
    assert facts.python.executable not in commands(report)
    assert ("CUDA_HOME" not in commands(report)) or more != ROCM


@each("passing", ["/tmp/pip-build-env-x1/overlay/lib/python3.11/site-packages/torch/x.py", ""])
def test_an_environment_of_the_build_itself_is_no_other_machine(facts: CudaFacts, passing: str) -> None:
    assert "elsewhere" not in ids(explained(f"{passing}\n{UNSET}", facts))


@each(
    "text",
    [
        "Successfully built flash-attn\nSuccessfully installed flash-attn-2.8.3\n",
        f"{UNSET}WARNING: Retrying: Temporary failure in name resolution\nSuccessfully installed x-1\n",
        "cc1plus: all warnings being treated as errors is off\n[ 50%] Building\n[100%] Built target ops\n",
        "  -- Performing Test HAS_X - Failed\nSuccessfully installed x-1.0\nWARNING: Running pip as root; this fails\n",
    ],
)
def test_a_log_that_succeeded_is_ok(facts: CudaFacts, text: str) -> None:
    report = explained(text, facts)
    assert (ids(report)[0], report.exit_code()) == ("success", 0)
    assert all(one.level is Level.INFO for one in report.findings)


@each(
    "text",
    [
        f"Successfully installed x-1.0\n{UNSET}",
        "Successfully built a\nFailed to build b\nERROR: Could not build wheels for b\n",
        "Successfully installed torch-2.9.1\nTraceback (most recent call last):\nValueError: no such shard\n",
    ],
)
def test_what_failed_after_a_success_is_no_success(facts: CudaFacts, text: str) -> None:
    report = explained(text, facts)
    assert "success" not in ids(report)
    assert report.exit_code() in (1, 3)


def test_a_log_of_consequences_alone_is_unknown(facts: CudaFacts) -> None:
    report = explained((RECORDED / "object_missing.txt").read_text(), facts)
    assert (ids(report)[0], report.exit_code()) == ("unknown", 3)
    assert report.findings[0].fix is not None


def test_a_command_that_changes_nothing_here_is_left_out(facts: CudaFacts) -> None:
    report = explained((RECORDED / "cudnn_version.txt").read_text(), facts)
    assert report.exit_code() == 1
    assert "unset LD_LIBRARY_PATH" not in commands(report)


def test_a_refused_gcc_is_joined_with_the_toolkits_and_compilers_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's toolkit, ./tk, takes gcc up to 11; here is gcc 12, and a toolkit that takes it."""
    machine = Machine(tmp_path / "box")
    for name in ("gcc", "gcc-12", "c++"):
        machine.compiler(name, "12.2.0")
    toolkit = machine.toolkit("12.8")
    machine.torch("2.9.1+cu128", "12.8")
    facts = machine.examine(monkeypatch, "build")
    (finding,) = explained(recorded("gcc_too_new"), facts).findings
    assert "the build used the toolkit in ./tk, which was not found on this machine" in finding.detail
    assert f"gcc 12.2.0 only; the toolkit in {toolkit} (12.8) supports gcc up to 14" in finding.detail
    assert finding.fix is not None
    assert "install gcc 11 with its g++" in finding.fix.text
    machine.paste(finding.fix.commands)
    again = found(judged(machine.examine(monkeypatch, "build"), goal="build"))
    assert not {"cc.nvcc", "cc.torch", "toolkit.found"} & again.keys()
    machine.compiler("gcc-11", "11.4.0")
    (finding,) = explained(recorded("gcc_too_new"), machine.examine(monkeypatch, "build")).findings
    assert finding.fix is not None
    assert finding.fix.commands[0].startswith(f"export CC={machine.bin}/gcc-11 CXX={machine.bin}/g++-11 ")


@each(
    "name, fix",
    [
        ("cxx_too_new_for_torch", "use the installed gcc 12.2.0"),
        ("cxx_too_old_for_torch", "use the installed gcc 12.2.0"),
        ("clang_too_new", "use the installed gcc 12.2.0"),
        ("gcc_headers_unreadable", "install gcc 10 with its g++"),
    ],
)
def test_a_compiler_is_chosen_by_what_the_log_allows(facts: CudaFacts, name: str, fix: str) -> None:
    (finding,) = explained(recorded(name), facts).findings
    assert finding.fix is not None
    assert finding.fix.text.startswith(fix)


@each("path", sorted(RECORDED.glob("*.txt")))
def test_no_command_names_what_is_not_here(facts: CudaFacts, path: Path) -> None:
    report = explained(recorded(path.stem), facts)
    if "elsewhere" in ids(report):
        return
    there = {compiler.path for compiler in facts.compilers.found}
    for command in commands(report).splitlines():
        for compiler in re.findall(r"\b(?:CC|CXX|NVCC_CCBIN|CUDAHOSTCXX)=(\S+)", command):
            assert compiler in there, command
        assert "/usr/local/cuda" not in command.replace(str(facts.toolkits[0].root), ""), command
        assert not re.search(r"torch(==[\d.]+)? --index-url", command), command
        assert not re.search(r"(?<![\w/.-])python", command), command


def test_the_gpus_that_are_named_are_used_or_said_to_be_unused(facts: CudaFacts) -> None:
    syntax = "ValueError: Unknown CUDA arch (9.0f) or GPU not supported\n"
    assert 'export TORCH_CUDA_ARCH_LIST="9.0"' in commands(explained(syntax, facts, "9.0"))
    assert "TORCH_CUDA_ARCH_LIST" not in commands(explained(syntax, facts))
    report = explained(recorded("gcc_too_new"), facts, "9.0")
    assert "--gpu (9.0) was not used" in report.findings[-1].title


@each(
    "text, sign",
    [
        ("AssertionError: Torch not compiled with CUDA enabled\n", "a torch without CUDA"),
        ("The detected CUDA version (11.8) mismatches the version that was used to compile\nPyTorch (12.4).\n", "12.4"),
    ],
)
def test_a_log_of_another_torch_is_of_another_environment(facts: CudaFacts, text: str, sign: str) -> None:
    assert sign in explained(text, facts).findings[-1].title
    assert ids(explained(text, facts))[-1] == "elsewhere"
    cpu = replace(facts, torch=replace(facts.torch, version="2.9.1+cpu", cuda="")) if facts.torch else facts
    assert ("elsewhere" in ids(explained(text, cpu))) == (sign == "12.4")


@each(
    "header, root",
    [
        ("./tk/bin/../targets/x86_64-linux/include/crt/host_config.h", "./tk"),
        ("/usr/local/cuda/include/crt/host_config.h", "/usr/local/cuda"),
        ("/usr/include/crt/host_config.h", "/usr"),
        ("host_config.h", ""),
    ],
)
def test_a_header_says_which_toolkit_a_build_used(header: str, root: str) -> None:
    assert toolkit_of(header) == root
