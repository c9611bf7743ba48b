"""cuda-env as it is typed: the real torch, with or without CUDA, a real toolkit, real compilers, several nodes."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import support
import support_torch
from cluster import Network, need_network
from cuda_machines import GCC, Machine, is_for_cpu
from support_warm import distdiag
from toolkit import nvcc

from distdiag.facts.cuda.toolkits import ask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from support import Result

NAMES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CC", "CXX", "NVCC_CCBIN", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS")


def cuda_env(
    *arguments: str, path: str = "", env: Mapping[str, str] | None = None, run: Callable[..., Result] = distdiag
) -> Result:
    """Run it with only the given CUDA variables in the environment."""
    paths = [path] if path else []
    others = [one for one in os.environ["PATH"].split(":") if not (Path(one) / "nvcc").exists()]
    clean = [word for name in NAMES if name not in (env or {}) for word in ("-u", name)]
    environment = {"PATH": ":".join([*paths, *others]), **(env or {})}
    return run("cuda-env", *arguments, env=environment, wrap=("env", *clean))


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an nvcc that starts the real one, as administrators like to make them."""
    folder = tmp_path_factory.mktemp("wrapper") / "local/bin"
    folder.mkdir(parents=True)
    (folder / "nvcc").write_text(f'#!/bin/sh\nexec {nvcc()} "$@"\n')
    (folder / "nvcc").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def first(wrapper: Path) -> Result:
    """This machine with the wrapper on PATH, examined once; its facts are in the folder `facts` beside it."""
    return cuda_env("--json", "--save", str(wrapper / "facts"), path=str(wrapper))


@pytest.fixture
def saved(first: Result, wrapper: Path) -> tuple[str, str]:
    assert first.code == 1
    return "--from", str(wrapper / "facts")


def copied_toolkit(folder: Path, gcc_max: int) -> Path:
    """Copy the real toolkit by links, with another limit in a copy of its host_config.h."""
    real = nvcc().parent.parent
    include = next(path for path in (real / "include", *real.glob("targets/*/include")) if (path / "cuda.h").exists())
    folder.mkdir()
    for name in ("bin", "nvvm", "lib", "lib64"):
        if (real / name).exists():
            subprocess.run(["cp", "-rs", (real / name).resolve(), folder / name], check=True)
    # nvcc looks for its own files beside the file that it was started as, not beside what a link leads to.
    for name in ("nvcc", "nvcc.profile"):
        (folder / "bin" / name).unlink()
        (folder / "bin" / name).write_bytes((real / "bin" / name).read_bytes())
    (folder / "bin/nvcc").chmod(0o755)
    subprocess.run(["cp", "-r", include, folder / "include"], check=True)
    (folder / "targets/x86_64-linux").mkdir(parents=True)
    (folder / "targets/x86_64-linux/include").symlink_to(folder / "include")
    header = folder / "include/crt/host_config.h"
    text = header.read_text().replace("__GNUC__ > 15", f"__GNUC__ > {gcc_max}")
    header.write_text(text.replace("gcc versions later than 15", f"gcc versions later than {gcc_max}"))
    return folder


def test_a_cpu_torch_is_named_and_the_wrapper_trap_too(wrapper: Path, saved: tuple[str, str]) -> None:
    result = cuda_env("--goal", "build", "--json", *saved)
    assert result.code == 1
    findings = result.findings
    assert ("torch.build" in findings) == is_for_cpu(result)
    if is_for_cpu(result):
        assert "CUDA_HOME environment variable is not set" in findings["torch.build"]["detail"]
        python, _, rest = findings["torch.build"]["fix"]["commands"][0].partition(" ")
        assert (Path(python).samefile(sys.executable), rest.startswith("-m pip install")) == (True, True)
    trap = findings["toolkit.home"]
    assert (trap["level"], str(wrapper.parent) in trap["title"]) == ("warn" if is_for_cpu(result) else "fail", True)
    (command,) = trap["fix"]["commands"]
    home = command.partition("=")[2]
    assert (Path(home) / "include/cuda_runtime_api.h").exists()
    assert result.report["data"]["ready"] == {"run": None, "build": False}
    # The real nvcc writes a compiler that CC names with its folder in its plan as "/usr/bin"/gcc.
    again = cuda_env("--goal", "build", "--json", path=str(wrapper), env={"CUDA_HOME": home, "CC": GCC})
    assert "toolkit.home" not in again.findings
    nvccs = {nvcc["path"]: nvcc["compiler"] for nvcc in again.report["data"]["nodes"][0]["facts"]["nvccs"]}
    assert nvccs[f"{home}/bin/nvcc"] == GCC


def test_the_page_ends_with_what_will_work(saved: tuple[str, str]) -> None:
    result = cuda_env(*saved, env={"NO_COLOR": "1"})
    lines = result.out.splitlines()
    assert lines[0] == "distdiag cuda-env: FAIL"
    assert lines[-1] == "Build: NOT READY · Run: NOT READY"
    assert "\x1b" not in result.out
    # Only evidence, commands to paste, and paths are longer.
    wide = [line for line in lines if len(line) > 80 and not line.startswith(" " * 10)]
    assert all(max(map(len, line.split())) > 50 for line in wide), wide


def test_the_exports_are_for_eval_and_mend_what_they_can(first: Result, saved: tuple[str, str]) -> None:
    result = cuda_env("--goal", "build", "--export", *saved)
    assert result.code == 0
    assert all(line.startswith("export ") for line in result.out.splitlines())
    assert ("variables cannot fix cuda-env.torch.build" in result.err) == is_for_cpu(first)
    shell = subprocess.run(
        ["sh", "-c", f'{result.out}test -f "$CUDA_HOME/include/cuda_runtime_api.h" && echo "$TORCH_CUDA_ARCH_LIST"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shell.stdout.strip() == "7.5;8.0;8.6;9.0;10.0;12.0"


def test_gpus_elsewhere_need_no_driver_here(saved: tuple[str, str]) -> None:
    result = cuda_env("--gpu", "H100", "--export", *saved)
    assert 'export TORCH_CUDA_ARCH_LIST="9.0"' in result.out
    assert "driver" not in result.err


def test_nvcc_refuses_its_compiler_and_the_fix_makes_it_compile(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "box")  # a gcc that says it is 13, before the real one, which is 12
    machine.compiler("gcc", "13.2.0")
    major = int(subprocess.run([GCC, "-dumpversion"], capture_output=True, text=True, check=True).stdout.split(".")[0])
    toolkit = copied_toolkit(tmp_path / "toolkit", gcc_max=12)
    if major > 12:
        pytest.skip(f"needs a gcc up to 12, has {major}")
    path = f"{machine.bin}:{toolkit}/bin"
    result = cuda_env("--goal", "build", "--json", path=path, env={"CUDA_HOME": str(toolkit)})
    finding = result.findings["cc.nvcc"]
    assert finding["level"] == "fail"
    assert "gcc 13.2.0" in finding["title"]
    assert any("unsupported GNU version" in line for line in finding["evidence"])
    assert any(f"called: {machine.bin}/gcc" in line for line in finding["evidence"])
    (command,) = finding["fix"]["commands"]
    (tmp_path / "empty.cu").touch()
    compile_it = f"nvcc -E {tmp_path}/empty.cu -o /dev/null"
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    before = subprocess.run(["sh", "-c", compile_it], env=environment, capture_output=True, check=False)
    after = subprocess.run(["sh", "-c", f"{command}; {compile_it}"], env=environment, capture_output=True, check=False)
    assert before.returncode != 0
    assert after.returncode == 0, after.stderr


def test_a_variable_that_breaks_the_real_nvcc_is_found_by_trying_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stdlib.h").write_text("#error stands in the way\n")
    program = str(nvcc())
    variables = {"CPATH": str(tmp_path), "NVCC_APPEND_FLAGS": "-O3 -lineinfo -arch=sm_90"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (found,) = ask([program], {program: ()}, timeout_s=60.0, env=variables)
    assert found.broken_by == ("CPATH",)
    assert "stands in the way" in found.broken_how
    assert (found.complaint, found.top != "") == ("", True)


def test_flags_that_break_the_real_nvcc_are_unset_by_the_fix() -> None:
    """Each of them alone breaks it: with -E it succeeds, and leaves no object."""
    flags = {"NVCC_PREPEND_FLAGS": "-E", "NVCC_APPEND_FLAGS": "-std=c++14"}
    result = cuda_env("--goal", "build", "--json", path=str(nvcc().parent), env=flags)
    finding = result.findings["cc.flags"]
    assert (finding["level"], finding["fix"]["commands"]) == ("fail", ["unset NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS"])
    assert "NVCC_PREPEND_FLAGS and NVCC_APPEND_FLAGS break nvcc 13.0: " in finding["title"]
    assert "C++17" in finding["title"]
    assert not {"cc.nvcc", "toolkit.nvcc-broken"} & result.findings.keys()
    exports = result.report["data"]["exports"]
    assert (exports["NVCC_PREPEND_FLAGS"], exports["NVCC_APPEND_FLAGS"]) == ("", "")


def test_saved_facts_are_judged_elsewhere(first: Result, saved: tuple[str, str]) -> None:
    again = cuda_env("--json", *saved)
    assert again.report["findings"] == first.report["findings"]
    assert again.code == first.code


def test_nodes_with_other_toolkits_are_named_across_the_cluster(tmp_path: Path) -> None:
    need_network()
    with Network(3) as network:
        enter = tmp_path / "enter"
        homes = [Machine(tmp_path / version).toolkit(version) for version in ("12.4", "12.8")]
        for node, home in zip(network.nodes, [*homes, homes[1]], strict=True):
            (tmp_path / f"{node.name}.env").write_text(f"export CUDA_HOME={home} PATH={home}/bin:$PATH\n")
        enter_node = network.via.replace("{host}", '"$host"')
        enter.write_text(
            f'#!/bin/sh\nhost=$1; shift\n. "{tmp_path}/$host.env"\n'
            f'exec {enter_node} env CUDA_HOME="$CUDA_HOME" PATH="$PATH" "$@"\n'
        )
        enter.chmod(0o755)
        where = ("--hosts", network.hosts, "--via", f"{enter} {{host}}")
        words = ("--goal", "build", "--json", *where, "--save", str(tmp_path / "kept"))
        result = cuda_env(*words, env=network.client_env())
        assert result.code == 1, result.out + result.err
        (differ,) = [one for one in result.report["findings"] if one["id"] == "cuda-env.nodes-differ"]
        assert differ["where"]["hosts"] == ["node1"]
        assert [node["facts"]["host"] for node in result.report["data"]["nodes"]] == ["node1", "node2", "node3"]
        builds = [one for one in result.report["findings"] if one["id"] == "cuda-env.torch.build"]
        assert [one["where"]["hosts"] for one in builds] == [["node1", "node2", "node3"]] * is_for_cpu(result)
        text = cuda_env("--goal", "build", "--from", str(tmp_path / "kept"))
        assert "[node[2-3]]" in text.out


def test_the_prebuild_is_for_all_gpus_of_the_nodes(saved: tuple[str, str]) -> None:
    result = cuda_env("--prebuild", "--ops", "cpu_adam,aio", *saved)
    assert result.code == 0
    lines = [line for line in result.out.splitlines() if not line.startswith("#")]
    commands = [line for line in lines if "--no-binary deepspeed" in line]
    assert len(commands) == 2
    # No release is chosen by the day; what its import needs is installed before, and the import tried after.
    assert all("deepspeed==0." in command for command in commands)
    before, after = lines[lines.index(commands[0]) - 1], lines[lines.index(commands[0]) + 1]
    assert {"setuptools", "einops", "hjson", "py-cpuinfo", "'pydantic>=2'"} <= set(before.split())
    assert after.endswith("-c 'import deepspeed; print(deepspeed.__version__)'")
    for command in commands:
        assert "DS_BUILD_CPU_ADAM=1 DS_BUILD_AIO=1 MAX_JOBS=" in command
        assert "--no-build-isolation" in command
        assert "--global-option" not in command
        subprocess.run(["sh", "-n", "-c", command], check=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--only", "nonsense"), "'nonsense' is not a finding id of cuda-env"),
        (("--python", "/nope/python"), "program not found"),
        (("--from", "/nope"), "no such file or folder"),
        (("--explain", "/nope.log"), "No such file"),
        (("--prebuild", "--ops", "warp_drive"), "no op 'warp_drive'"),
        (("--goal", "fun"), "fun"),
        (("--goal", "run", "--gpu", "H100"), "--goal run builds nothing"),
        (("build.log",), "hint: to explain a log: distdiag cuda-env --explain build.log"),
        (("--explain",), "hint: distdiag cuda-env --explain build.log"),
    ],
)
def test_wrong_input_is_told_with_a_hint(arguments: tuple[str, ...], words: str) -> None:
    result = cuda_env(*arguments)
    assert (result.code, words in result.err) == (2, True), result.err


def test_files_that_are_no_facts(tmp_path: Path) -> None:
    for text in ('{"schema": "distdiag-stacks/1"', "hello", json.dumps({"schema": "other", "node": {}})):
        (tmp_path / "facts.json").write_text(text)
        result = cuda_env("--from", str(tmp_path / "facts.json"))
        assert (result.code, "hint:" in result.err) == (2, True), result.err


def test_an_interpreter_without_torch_can_be_examined(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True)
    result = cuda_env("--json", "--goal", "build", "--python", str(tmp_path / "venv/bin/python"))
    assert "torch is not installed" in result.findings["torch.build"]["title"]
    assert result.report["data"]["nodes"][0]["facts"]["python"]["executable"] == str(tmp_path / "venv/bin/python")


def test_it_answers_quickly_and_without_importing_torch(wrapper: Path) -> None:
    def used_s() -> float:
        """Return the processor time of all children so far: a busy machine makes them late, not costlier."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    costs: list[float] = []
    while min(costs, default=9.0) >= 1.5 and len(costs) < 3:
        before = used_s()
        cuda_env("--goal", "build", "--json", path=str(wrapper), run=support.distdiag)  # not the child of a server
        costs.append(used_s() - before)
    assert min(costs) < 1.5, costs


BUILD_LOG = (
    "Processing /home/user/flash-attention\n"
    "  /opt/cuda/include/crt/host_config.h:143:2: error: #error -- unsupported GNU version! "
    "gcc versions later than 12 are not supported!\n"
    "  ninja: build stopped: subcommand failed.\n"
    "  ERROR: Failed building wheel for flash-attn\n"
)


def test_a_log_is_explained_causes_apart_from_what_follows(tmp_path: Path, saved: tuple[str, str]) -> None:
    (tmp_path / "build.log").write_text(BUILD_LOG)
    result = cuda_env("--json", "--explain", str(tmp_path / "build.log"), *saved)
    assert result.code == 1
    levels = {one["id"].removeprefix("cuda-env.log."): one["level"] for one in result.report["findings"]}
    assert levels["gcc-too-new-for-nvcc"] == "fail"
    assert levels["wheel-failed"] == "info"
    assert result.report["data"]["log"] == {"lines": 4, "causes": 1, "others": 2}
    text = cuda_env("--explain", str(tmp_path / "build.log"), *saved).out
    assert "related lines, not causes:" in text
    assert text.splitlines()[-1] == "FAIL: 1 cause found in the log (4 lines)"


def test_a_log_is_explained_by_what_this_machine_has(first: Result, saved: tuple[str, str]) -> None:
    """The words say CUDA_HOME; the cause is a torch without CUDA, if it is one, and so is the fix."""
    words = "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.\n"
    done = subprocess.run(
        [sys.executable, "-m", "distdiag", "cuda-env", "--json", "--explain", "-", *saved],
        input=words,
        capture_output=True,
        text=True,
        check=False,
    )
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["id"] == "cuda-env.log.cuda-home-unset"
    assert ("was built without CUDA" in finding["detail"]) == is_for_cpu(first)
    assert ("--index-url" in finding["fix"]["commands"][0]) == is_for_cpu(first)


def test_a_log_of_which_nothing_is_known(tmp_path: Path, saved: tuple[str, str]) -> None:
    log = tmp_path / "build.log"
    log.write_text("warp core: error 47\n")
    result = cuda_env("--json", "--explain", str(log), *saved)
    assert (result.code, result.report["verdict"]) == (3, "unknown")
    for text, code in (("Successfully installed x-1.0\n", 0), ("", 2)):
        log.write_text(text)
        assert cuda_env("--explain", str(log), *saved).code == code


def test_folders_without_facts_and_facts_that_make_no_sense(tmp_path: Path, saved: tuple[str, str]) -> None:
    (tmp_path / "empty").mkdir()
    result = cuda_env("--from", str(tmp_path / "empty"))
    assert (result.code, "no facts from cuda-env in" in result.err) == (2, True)
    shutil.copytree(saved[1], tmp_path / "kept")
    (file,) = (tmp_path / "kept").iterdir()
    facts = json.loads(file.read_text())
    (tmp_path / "kept/again.json").write_text(json.dumps(facts))
    nodes = cuda_env("--json", "--from", str(tmp_path / "kept")).report["data"]["nodes"]
    assert sorted(node["facts"]["host"] for node in nodes) == [facts["host"], facts["host"] + "#2"]
    facts["facts"]["uses"] = {}
    file.write_text(json.dumps(facts))
    result = cuda_env("--from", str(file))
    assert (result.code, "was not written by --save" in result.err) == (2, True)


def test_the_page_holds_what_torchs_own_report_says_of_this_machine(tmp_path: Path, saved: tuple[str, str]) -> None:
    script, said = tmp_path / "report.py", tmp_path / "said"
    script.write_text("import torch\nfrom torch.utils.collect_env import main\nmain()\n")
    command, env = [sys.executable, str(script)], {**os.environ, "OMP_NUM_THREADS": "1"}
    with said.open("w") as output:
        program = support_torch.start(command, env, output=output) or subprocess.Popen(command, stdout=output)
        assert program.wait(60) == 0, said.read_text()
    lines = said.read_text().splitlines()
    reported = dict(line.split(": ", 1) for line in lines if ": " in line)
    page = " ".join(cuda_env("-v", *saved).out.split())
    libc = reported["Libc version"].replace("-", " ")
    system = reported["OS"].rpartition(" (")[0]
    wanted = [system, libc, reported["PyTorch version"], reported["Python version"].split()[0], os.uname().release]
    wanted += [reported[name].split()[-1] for name in ("GCC version", "CMake version") if reported[name][0] != "C"]
    wanted += [" ".join(line.split()[1].split("==")) for line in lines if line.startswith("[pip3] n")]
    assert len(wanted) > 6
    assert [each for each in wanted if each not in page] == []
