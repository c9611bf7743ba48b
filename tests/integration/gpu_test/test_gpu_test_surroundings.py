"""gpu-test on machines that are not as they should be, and on hands that type something else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import site
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cluster_netns import end_holder, line_of, start_holder
from support import PROGRAM, Running, need_mounts
from support_warm import distdiag, enough_of_torch, gpu_test

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    "arguments",
    [
        ("--backend", "mpi"),
        ("--backend", "nccl", "--device", "cpu"),
        ("--memory", "1.5"),
        ("--stall", "0"),
        ("--inject", "corrupt:1@memory"),
        ("--inject", "kill:2", "--nproc", "2"),
        ("--no-such-option",),
        ("--compute", "5s", "--no-compute"),
        ("--compute", "soon"),
        ("--isolate", "--compute", "5s", "--no-compute"),
        ("--no-compute", "--inject", "wrong-compute:1"),
        ("--isolate", "--no-compute", "--inject", "wrong-compute:1"),
        ("--isolate", "--inject", "slow-compute:1-2"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_reason_in_json(arguments: tuple[str, ...]) -> None:
    result = distdiag("gpu-test", *arguments, "--json")
    assert (result.code, result.report["exit_code"], result.report["error"]["id"]) == (2, 2, "usage")
    assert result.report["error"]["message"]


@pytest.mark.parametrize("arguments", [("--inject", "burn:1"), ("--size", "a lot"), ("--nproc", "0"), ("--bogus",)])
def test_wrong_usage_is_told_to_people_in_the_same_words(arguments: tuple[str, ...]) -> None:
    plain = distdiag("gpu-test", *arguments)
    assert (plain.code, plain.out, "Traceback" in plain.err) == (2, "", False)
    result = distdiag("gpu-test", *arguments, "--json")
    assert (result.code, result.report["exit_code"], result.report["error"]["id"]) == (2, 2, "usage")
    assert result.report["error"]["message"] in " ".join(plain.err.split())


def test_nccl_without_a_gpu_is_a_finding_with_a_way_out_to_ranks(broken_torch: dict[str, str]) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    result = gpu_test("--backend", "nccl", "--nproc", "2")
    assert result.code == 1
    assert list(result.findings) == ["too-few-gpus"]
    command = result.findings["too-few-gpus"]["fix"]["commands"][0].split()
    assert list(distdiag(*command[1:], "--json", env=broken_torch).findings) == ["no-torch"]


@pytest.fixture
def http_server(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A foreign web server: its port and pid."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--directory", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().split(" port ")[1].split()[0])
        # Its first answer is the slowest, and a port is not listened to for long.
        urllib.request.urlopen(f"http://127.0.0.1:{port}").close()
        yield port, server.pid
        server.kill()


def test_a_foreign_web_server_on_the_port_is_named_and_quoted(http_server: tuple[int, int]) -> None:
    port, pid = http_server
    result = gpu_test("--master-port", str(port))
    assert result.code == 1
    finding = result.findings["port-foreign"]
    assert finding["where"]["pids"] == [pid]
    assert "http.server" in finding["title"]
    assert "HTTP" in finding["title"] or "html" in finding["title"].lower()


def test_a_port_that_is_taken_is_named_with_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = gpu_test("--master-port", str(port))
    assert result.code == 1
    finding = result.findings["port-taken"]
    assert finding["where"]["pids"] == [os.getpid()]
    assert f"port {port}" in finding["title"]


@pytest.fixture
def broken_torch(tmp_path: Path) -> dict[str, str]:
    """What makes a torch that does not load the first on the path: the shortest way to a report."""
    (tmp_path / "torch.py").write_text("import ctypes\nctypes.CDLL('libcudart.so.12.not-there')\n")
    return {"PYTHONPATH": str(tmp_path)}


def test_a_torch_that_does_not_load_is_told_with_its_own_words(broken_torch: dict[str, str]) -> None:
    result = gpu_test(env=broken_torch)
    assert result.code == 1
    finding = result.findings["no-torch"]
    assert finding["where"]["ranks"] == [0, 1]
    assert "libcudart.so.12.not-there: cannot open shared object file" in finding["title"]


@pytest.fixture
def python_without_torch(tmp_path: Path) -> Path:
    """A virtual environment with all that distdiag needs but torch."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    target = tmp_path / "venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    for package in Path(site.getsitepackages()[0]).iterdir():
        if not package.name.startswith(("torch", "functorch")):
            (target / package.name).symlink_to(package)
    return tmp_path / "venv" / "bin" / "python"


def test_distdiag_works_where_there_is_no_torch(python_without_torch: Path) -> None:
    done = subprocess.run(
        [python_without_torch, "-m", "distdiag", "gpu-test", "--json"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    (finding,) = (one for one in json.loads(done.stdout)["findings"] if one["level"] == "fail")
    assert finding["id"] == "gpu-test.no-torch"
    assert finding["where"]["ranks"] == [0, 1]
    assert finding["fix"]["commands"] == [f"{python_without_torch} -m pip install torch"]


@contextlib.contextmanager
def apart(kind: str, script: str) -> Iterator[tuple[str, ...]]:
    """Hold namespaces that a script has changed; what to put before a command to run it there."""
    need_mounts()
    holder = start_holder(["unshare", kind, "sh", "-ec", f"{script}\necho ready; exec cat >/dev/null"])
    try:
        assert line_of(holder) == "ready"
        yield ("nsenter", "-t", str(holder.pid), kind, "--", "env", "-C", os.getcwd())
    finally:
        end_holder(holder)


@pytest.fixture
def small_shm_and_all_temporary_directories_read_only() -> Iterator[tuple[str, ...]]:
    places = [place for place in ("/tmp", "/var/tmp", "/usr/tmp", os.getcwd()) if os.path.isdir(place)]
    script = "mount -t tmpfs -o size=1m none /dev/shm\n" + "".join(
        f"mount --bind {place} {place}; mount -o remount,bind,ro {place}\n" for place in places
    )
    with apart("-m", script) as wrap:
        yield wrap


def test_one_changed_element_is_found_although_gloo_is_content_and_a_small_dev_shm_is_a_warning_beside_it(
    small_shm_and_all_temporary_directories_read_only: tuple[str, ...],
) -> None:
    """A read-only temporary directory matters only for logs."""
    wrap = small_shm_and_all_temporary_directories_read_only
    result = gpu_test("--nproc", "3", "--inject", "corrupt:2", wrap=wrap)
    assert (result.code, result.statuses) == (1, ["ok", "ok", "failed"])
    assert {one: found["level"] for one, found in result.findings.items()} == {
        "wrong-result": "fail", "shm-small": "warn",
    }  # fmt: skip
    finding = result.findings["wrong-result"]
    assert finding["where"]["ranks"] == [2]
    middle = 4 * 2**20 // 4 // 2
    assert f"1 wrong element, first at index {middle}" in finding["title"]
    assert f"1 of {2 * middle} elements, the first at index {middle}" in finding["detail"]
    assert result.report["data"]["computed"] == {}
    result = gpu_test("--nccl-debug", wrap=wrap)
    assert result.code == 3
    assert "TMPDIR=" in result.report["error"]["hint"]


def test_several_of_us_under_a_launcher_do_not_multiply() -> None:
    launched = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    result = gpu_test("--nproc", "2", env=launched)
    assert result.code == 2
    assert "Open MPI started 4 processes on this node" in result.report["error"]["message"]
    result = gpu_test("--hosts", "elsewhere", env=launched)
    assert result.code == 2
    assert "--hosts would make each of them start its own ranks" in result.report["error"]["message"]


@pytest.fixture
def stopped() -> Running:
    """A rank that is stopped before it has imported torch."""
    run = Running("gpu-test", "--json", "--nproc", "1", "--stall", "10", "--inject", "stop:0@start")
    run.wait_for("start: all ranks")
    return run


def test_ctrl_c_reports_what_is_known_and_leaves_nothing(stopped: Running) -> None:
    os.killpg(stopped.process.pid, signal.SIGINT)
    result = stopped.finish(timeout=20)
    assert (result.code, result.report["exit_code"], result.report["verdict"]) == (130, 130, "unknown")
    assert [rank["stage"] for rank in result.report["data"]["ranks"]] == ["start"]


def test_sigterm_is_ctrl_c_and_a_second_one_loses_nothing(tmp_path: Path) -> None:
    run = Running("gpu-test", "--json", "--nproc", "2", "--inject", "late:1@connect", env=enough_of_torch(tmp_path))
    run.wait_for("waiting for rank 1 in connect")
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGINT)
    result = run.finish(timeout=20)
    assert result.code == 130
    assert result.statuses == ["waiting", "missing"]
    assert "interrupted; rank 1 (" in result.report["summary"]


def pid_of_agent(run: Running) -> int:
    (agent,) = (line for line in run.left_behind() if "distdiag-agent" in line)
    return int(agent.partition(":")[0])


@pytest.fixture
def forked(tmp_path: Path) -> Running:
    """Two ranks of one fork server, of which one is stopped."""
    run = Running("gpu-test", "--json", "--nproc", "2", "--inject", "stop:1@connect", env=enough_of_torch(tmp_path))
    run.wait_for("connect: all ranks")
    return run


def test_a_distdiag_that_is_killed_leaves_no_rank_not_even_a_stopped_one(forked: Running) -> None:
    assert len(forked.left_behind()) == 3  # the agent and two ranks
    forked.process.kill()
    assert forked.finish().code == -signal.SIGKILL


def test_an_agent_that_is_killed_takes_its_ranks_along(forked: Running) -> None:
    os.kill(pid_of_agent(forked), signal.SIGKILL)
    result = forked.finish()
    assert (result.code, result.report["error"]["id"]) == (3, "distdiag.facts-failed")


def test_an_agent_that_is_stopped_is_not_taken_for_a_fault_of_the_ranks(stopped: Running) -> None:
    os.kill(pid_of_agent(stopped), signal.SIGSTOP)
    result = stopped.finish()
    assert result.code == 3
    assert "does not respond: it is stopped" in result.report["error"]["message"]


@pytest.mark.parametrize(
    ("redirect", "commands"),
    [
        ("2>/dev/full", {"--nproc 1 --size 1MiB": 1, "--inject x": 2, "--bogus": 2}),
        ("2>&-", {"--nproc 1 --size 1MiB": 1}),
        ("2> >(head -1 >/dev/null)", {"--nproc 1 --size 1MiB": 1}),
    ],
)
def test_a_stderr_that_nobody_reads_changes_nothing(
    redirect: str, commands: dict[str, int], broken_torch: dict[str, str]
) -> None:
    env = {**os.environ, **broken_torch}
    for arguments, code in commands.items():
        command = f"{PROGRAM} gpu-test --json {arguments} {redirect}"
        done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, json.loads(done.stdout)["exit_code"]) == (code, code)


def test_too_few_descriptors_is_no_fault_of_the_job() -> None:
    for limit in ("8", "12"):
        command = f"ulimit -n {limit}; exec {PROGRAM} gpu-test --json"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 3, done.stderr
        assert json.loads(done.stdout)["error"]["message"]


def test_a_machine_without_loopback_is_told_so(tmp_path: Path) -> None:
    with apart("-n", "") as wrap:
        result = gpu_test("--stall", "20", wrap=wrap, env=enough_of_torch(tmp_path))
    assert result.code == 1
    (finding,) = result.findings.values()
    assert finding["fix"]["commands"] == ["ip route show", "ip link set lo up"]


def test_a_working_directory_that_is_gone_is_told_before_torch_stumbles(tmp_path: Path) -> None:
    command = f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir {tmp_path}/gone && {PROGRAM} gpu-test"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert "working directory" in done.stderr


def test_a_reader_that_leaves_early_and_a_full_stderr_are_no_error(broken_torch: dict[str, str]) -> None:
    env = {**os.environ, **broken_torch}
    pipe = f"{PROGRAM} gpu-test --nproc 1 --size 1MiB 2>/dev/full | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["distdiag gpu-test: FAIL", "1"]
    assert done.stderr == ""


def test_a_stdout_that_is_closed_or_full_is_no_traceback(broken_torch: dict[str, str]) -> None:
    command = f"{PROGRAM} gpu-test --size 1MiB --nproc 1"
    env = {**os.environ, **broken_torch}
    closed = subprocess.run(
        ["bash", "-c", f"{command} >&-"], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert closed.returncode == 1
    assert "Traceback" not in closed.stderr
    full = subprocess.run(
        ["bash", "-c", f"{command} >/dev/full"], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert full.returncode == 3
    assert "No space left on device" in full.stderr


@pytest.mark.parametrize(
    "option",
    [
        ("--ifname", "nosuch0"),
        ("--master-addr", "10.0.0.1"),
        ("--python", "/nowhere"),
        ("--setup", "x"),
        ("--fanout", "2"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(option: tuple[str, str]) -> None:
    result = gpu_test("--nproc", "2", *option)
    assert result.code == 2
    assert f"{option[0]} would have no effect" in result.report["error"]["message"]


def test_what_the_environment_says_of_others_is_told_by_whoever_was_started() -> None:
    result = gpu_test("--hosts", "localhost", env={"RANK": "7", "WORLD_SIZE": "9"})
    assert result.code == 2
    assert "unset RANK" in result.report["error"]["hint"]


def test_more_ranks_than_any_node_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1000000000\n")
    for typed in (("--nproc", "1000000000"), ("--hostfile", str(tmp_path / "hosts"))):
        result = gpu_test(*typed)
        assert (result.code, "error" in result.report) == (2, True)
