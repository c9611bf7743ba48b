"""core-bt on cores of real crashes: right signal, thread, line and sentence; clear answers where there is none."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from cluster import Network, need_network
from cores import PROGRAMS, cores_in, make_core
from support import PROGRAM, need, need_mounts, wait_until
from support_warm import distdiag

from distdiag.facts import machine
from distdiag.facts.core.source_lines import has_debug_information

if TYPE_CHECKING:
    from pathlib import Path

    from support import Result


@pytest.fixture(scope="module")
def segv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_core("dies_by_segv", tmp_path_factory.mktemp("segv"), "--token=hf_abcdefghijklmnop")


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the cores of a job of torch; rank 2 died by SIGSEGV in a hook of autograd."""
    return make_core("ranks_of_which_one_crashes", tmp_path_factory.mktemp("ranks")).parent.parent


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where the programs find their library of C++, which the first one builds."""
    return str(tmp_path_factory.mktemp("native"))


def core_bt(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return distdiag("core-bt", "--json", *arguments, env=env)


def only(result: Result) -> dict[str, Any]:
    (core,) = result.report["data"]["cores"]
    assert isinstance(core, dict)
    return core


def python_frames(core: dict[str, Any]) -> list[str]:
    return [frame["function"] for frame in core["crash_thread"]["frames"] if frame["language"] == "python"]


def test_a_segfault_in_ctypes(segv: Path) -> None:
    result = core_bt(str(segv))
    core = only(result)
    assert (result.code, core["signal_name"], core["truncated"]) == (1, "SIGSEGV", False)
    # The kernel keeps 80 bytes of it, and this may be a deep directory.
    assert core["cmdline"].startswith(f"{sys.executable} {PROGRAMS / 'dies_by_segv.py'}"[:79])
    assert core["crash_thread"]["frames"][0]["language"] == "c"
    frames = python_frames(core)
    assert len(frames) >= 3
    assert frames[-1] == "<module>"
    finding = result.findings["crash"]
    assert finding["where"]["pids"] == [core["pid"]]
    assert "SIGSEGV" in finding["title"]
    assert "dies_by_segv.py:" in finding["title"]


def test_an_abort_in_a_thread_of_cpp_while_python_sleeps(native: str, tmp_path: Path) -> None:
    result = core_bt(str(make_core("dies_in_cpp_thread", tmp_path, native)))
    core = only(result)
    assert core["signal_name"] == "SIGABRT"
    assert core["crash_thread"]["tid"] != core["pid"]
    assert any("abort" in frame["function"] for frame in core["crash_thread"]["frames"])
    assert not python_frames(core)
    assert result.findings["crash"]["title"].partition(" died with ")[2].startswith("SIGABRT in check_batch() ")
    main = next(thread for thread in core["threads"] if thread["tid"] == core["pid"])
    assert any(frame["language"] == "python" for frame in main["frames"])


def test_processes_that_aborted_in_different_functions_are_different_crashes(tmp_path: Path) -> None:
    for folder, function in {"1": "load_batch", "2": "save_weights", "3": "load_batch"}.items():
        (tmp_path / folder).mkdir()
        make_core("dies_by_abort", tmp_path / folder, function)
    titles = [finding["title"].partition(" pid ")[2] for finding in core_bt(str(tmp_path)).report["findings"]]
    loading, saving = sorted(titles, key=lambda title: "save_weights" in title)
    assert re.match(r"\d+\) and 1 more died with SIGABRT at load_batch dies_by_abort.py:8, in C: (os_)?abort", loading)
    assert re.match(r"\d+\) died with SIGABRT at save_weights dies_by_abort.py:12, in C: (os_)?abort", saving)


def test_a_stack_overflow(native: str, tmp_path: Path) -> None:
    result = core_bt(str(make_core("dies_by_stack_overflow", tmp_path, native)))
    assert only(result)["signal_name"] == "SIGSEGV"
    assert "stack" in result.findings["crash"]["detail"].lower()


def test_faulthandler_does_not_hide_the_crash(tmp_path: Path) -> None:
    result = core_bt(str(make_core("dies_with_faulthandler", tmp_path)))
    core = only(result)
    assert core["signal_name"] == "SIGSEGV"
    assert "raise" not in result.findings["crash"]["title"]
    assert python_frames(core)


def test_of_three_ranks_the_one_that_crashed_is_told_from_those_that_followed(three_ranks: Path) -> None:
    result = core_bt(str(three_ranks))
    cores = result.report["data"]["cores"]
    assert len(cores) >= 2, result.out
    assert cores[0]["signal_name"] == "SIGSEGV"
    assert cores[0]["rank"] is not None
    assert {core["signal_name"] for core in cores[1:]} == {"SIGABRT"}
    first = next(one for one in result.report["findings"] if one["id"] == "core-bt.crash")
    assert first["where"]["ranks"] == [cores[0]["rank"]]


LARGEST_CHILD = """
import os, resource, subprocess, sys
subprocess.run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000, file=sys.stderr)
"""
"""Run from a small process: the kernel counts as a program's memory what it had before exec, its parent's."""


def test_a_torch_program(three_ranks: Path) -> None:
    path = str(cores_in(three_ranks / "rank-2")[0])
    measure = [sys.executable, "-S", "-c", LARGEST_CHILD, PROGRAM, "core-bt", "--json", path]
    done = subprocess.run(measure, capture_output=True, text=True, check=True)
    assert float(done.stderr.split()[-1]) < 100
    (core,) = json.loads(done.stdout)["data"]["cores"]
    assert core["signal_name"] == "SIGSEGV"
    assert python_frames(core)
    assert core["crash_thread"]["frames"][0]["language"] == "c"
    assert any("torch" in frame["module"] for frame in core["crash_thread"]["frames"])


def test_tools_that_are_not_there(segv: Path, tmp_path: Path) -> None:
    path = str(segv)
    empty = tmp_path / "bin"
    empty.mkdir()
    # An unimportable module of that name simulates a missing pystack.
    (tmp_path / "pystack.py").write_text("raise ModuleNotFoundError(\"No module named 'pystack'\", name='pystack')")
    without_pystack = core_bt(path, env={"PYTHONPATH": str(tmp_path), "PATH": str(empty)})
    pystack, said = only(without_pystack)["tools"]
    assert "pystack" in pystack
    assert "pip install" in pystack
    frames = only(without_pystack)["crash_thread"]["frames"]
    assert [frame["language"] for frame in frames] == ["c"] * len(frames)
    assert "ffi_call" in [frame["function"] for frame in frames]
    assert said.startswith("distdiag: C frames only")
    (crash,) = (one for one in without_pystack.report["findings"] if one["id"] == "core-bt.crash")
    assert "its Python frames are missing" in crash["evidence"]


def test_on_other_hosts(segv: Path) -> None:
    need_network()
    with Network(1) as network:
        where = ("--hosts", network.hosts, "--via", network.via)
        command = ("core-bt", "--json", *where, str(segv))
        result = distdiag(*command, wrap=tuple(network.client.command()), env=network.client_env())
        assert (result.code, only(result)["host"]) == (1, network.nodes[0].name), result.out
        assert python_frames(only(result))


@pytest.mark.parametrize("percent", [10, 90])
def test_a_core_that_was_cut_off_still_names_signal_and_thread(segv: Path, tmp_path: Path, percent: int) -> None:
    whole = segv.read_bytes()
    cut = tmp_path / "core.cut"
    cut.write_bytes(whole[: len(whole) * percent // 100])
    result = core_bt(str(cut))
    core = only(result)
    assert (result.code, core["signal_name"], core["truncated"]) == (1, "SIGSEGV", True)
    assert "truncated" in result.findings
    # Where it crashed is known from the registers, which come first.
    innermost = core["crash_thread"]["frames"][0]
    assert "libc" in innermost["module"]
    assert "strlen" in innermost["function"] or not has_debug_information(innermost["module"])


@pytest.mark.parametrize("content", [b"", b"no core at all\n" * 100])
def test_what_is_no_core_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "core"
    path.write_bytes(content)
    result = core_bt(str(path))
    assert (result.code, list(result.findings)) == (3, ["unreadable"])


def test_a_program_is_no_core_and_a_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    result = core_bt(sys.executable)
    assert (result.code, len(result.report["data"]["unread"])) == (3, 1)
    assert core_bt(sys.executable, str(tmp_path / "absent")).code == 2


def test_packed_cores_are_read(segv: Path, tmp_path: Path) -> None:
    packed = tmp_path / "core.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(segv.read_bytes())
    core = only(core_bt(str(packed), env={"TMPDIR": str(tmp_path)}))
    assert core["signal_name"] == "SIGSEGV"
    assert python_frames(core)
    assert list(tmp_path.iterdir()) == [packed]


def test_a_large_packed_core_is_whole_and_one_without_its_end_is_not(tmp_path: Path) -> None:
    """Larger than what is unpacked before its headers are asked how large it is."""
    need("zstd")
    packed = tmp_path / "core.zst"
    subprocess.run(["zstd", "-q1", make_core("dies_by_segv", tmp_path, "24"), "-o", packed], check=True)
    core = only(core_bt(str(packed)))
    assert (core["truncated"], core["size_bytes"]) == (False, core["whole_bytes"])
    assert python_frames(core)
    with packed.open("r+b") as file:
        file.truncate(packed.stat().st_size // 8)
    result = core_bt(str(packed))
    core = only(result)
    assert (core["truncated"], core["signal_name"], "truncated" in result.findings) == (True, "SIGSEGV", True)
    unpacked = subprocess.run(["zstd", "-dcq", packed], stdout=subprocess.PIPE, check=False).stdout
    assert core["size_bytes"] == len(unpacked)
    assert core["crash_thread"]["frames"][0]["language"] == "c"


def test_a_packed_core_of_gcore_which_has_its_notes_at_the_end(tmp_path: Path) -> None:
    need("gcore", "zstd")
    program = "import time\nblock = b'x' * 50_000_000\nprint('ready', flush=True)\ntime.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            subprocess.run(["gcore", "-o", tmp_path / "core", str(process.pid)], check=True, stdout=subprocess.DEVNULL)
        finally:
            process.kill()
    packed = tmp_path / "core.zst"
    subprocess.run(["zstd", "-q1", tmp_path / f"core.{process.pid}", "-o", packed], check=True)
    core = only(core_bt(str(packed)))
    assert (core["pid"], core["truncated"]) == (process.pid, False)
    assert "<module>" in python_frames(core)


def test_without_the_program(segv: Path, tmp_path: Path) -> None:
    result = core_bt(str(segv), "--exe", str(tmp_path / "gone"))
    functions = [frame["function"] for frame in only(result)["crash_thread"]["frames"]]
    assert (result.code, "ffi_call" in functions) == (1, True)
    assert "not on this machine" in json.dumps(result.findings["crash"])


def test_the_newest_core_here_is_taken_and_none_is_said(segv: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(segv.parent)
        assert only(core_bt())["path"] == str(segv)
        patch.chdir(tmp_path)
        result = core_bt(str(tmp_path))
        assert (result.code, list(result.findings)) == (3, ["none"])
        assert "--check-setup" in result.findings["none"]["fix"]["commands"][0]


def test_secrets_stay_out_of_every_report(segv: Path) -> None:
    assert b"--token=hf_abcdefghijklmnop" in segv.read_bytes()
    shown = core_bt(str(segv))
    page = distdiag("core-bt", "--markdown", str(segv))
    assert "SIGSEGV" in page.out
    assert "abcdefghij" not in page.out + shown.out


def test_secrets_among_the_arguments_of_a_process_are_not_shown() -> None:
    arguments = ("-", "--token", "sesame", "--tokenizer", "gpt2", "--api-key=sesame")
    with subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE) as process:
        wait_until(lambda: "token" in machine.command_line(process.pid), 10, lambda: "it is not started")
        assert machine.command_line(process.pid).endswith(" - --token *** ...")
        process.kill()


def test_setup_says_what_keeps_cores_away() -> None:
    need_mounts()
    need("prlimit")
    # It is about the ranks that are here, so those of other tests would count.
    limited = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "prlimit", "--core=0:0")
    result = distdiag("core-bt", "--json", "--check-setup", wrap=limited)
    assert any(name.startswith("setup-limit") for name in result.findings), result.out
    assert os.path.exists("/proc/sys/kernel/core_pattern")


@pytest.mark.parametrize("arguments", [("4711",), ("core", "--check-setup")])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert core_bt(*arguments).code == 2


def test_a_table_for_people(segv: Path) -> None:
    result = distdiag("core-bt", str(segv), env={"NO_COLOR": "1"})
    lines = result.out.splitlines()
    assert lines[0] == "distdiag core-bt: FAIL"
    assert any(line.startswith("  crashed thread: ") for line in lines)
    assert any(line.startswith("    py ") for line in lines)
    assert "\x1b" not in result.out
