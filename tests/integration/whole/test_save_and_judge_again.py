"""--save DIR and --from DIR: the facts of a run, judged elsewhere, give the same report, valid by the schema."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobs import Job
from json_schema import check
from support import PROGRAM, Result, need, wait_until
from support_warm import distdiag, enough_of_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDED_LOGS = Path(__file__).parents[2] / "recorded" / "logs"
QUICK = ("--nproc", "2", "--device", "cpu", "--size", "1MiB", "--no-compute")


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Path]]:
    lines = tmp_path_factory.mktemp("lines")
    with Job("hangs_by_line", 2, wrap=(PROGRAM, "trace", "py", "--dir", str(lines), "--"), forked=True) as job:
        job.wait_still()
        yield job, lines


def again(
    folder: Path, command: tuple[str, ...], typed: tuple[str, ...], *more: str, env: dict[str, str] | None = None
) -> Result:
    """Save a run, judge it in another directory, and insist that the two documents are one."""
    kept, elsewhere = folder / "kept", folder / "elsewhere"
    elsewhere.mkdir(parents=True, exist_ok=True)
    first = distdiag(*command, *typed, "--save", str(kept), "--json", env=env)
    check(first.out, first.code)
    second = distdiag(*command, *more, "--from", str(kept), "--json", wrap=("env", "-C", str(elsewhere)))
    assert (second.code, second.out) == (first.code, first.out), second.err
    return second


ON_A_JOB = {
    "pyspy-all": (("pyspy-all",), ("--job", "JOB")),
    "hang": (("hang",), ("--job", "JOB")),
    "blocked": (("trace", "blocked"), ("--job", "JOB")),
    "fds": (("trace", "fds"), ("--job", "JOB", "--rank", "0")),
    "sys": (("trace", "sys"), ("--job", "JOB", "--for", "300ms")),
    "show": (("trace", "show"), ("LINES",)),
    "core-bt": (("core-bt",), ("--check-setup",)),
}


@pytest.mark.parametrize("name", ON_A_JOB)
def test_of_a_hung_job(name: str, hung: tuple[Job, Path], tmp_path: Path) -> None:
    if name == "sys":
        need("strace")
    job, lines = hung
    command, typed = ON_A_JOB[name]
    places = {"JOB": job.name, "LINES": str(lines)}
    if name == "show":  # lines have to be some seconds old before a rank counts as stuck
        wait_until(lambda: distdiag("trace", "show", str(lines)).code == 1, 60, lambda: "trace show names nobody")
    found = again(tmp_path, command, tuple(places.get(word, word) for word in typed))
    if name in ("pyspy-all", "hang", "blocked", "show"):
        assert found.report["verdict"] == "fail"
        assert distdiag(*command, "--from", str(tmp_path / "kept")).code == 1  # and for people


ON_RANKS = {  # of allreduce-bench: test_allreduce_bench
    "gpu-test": ((*QUICK, "--inject", "kill:1@connect"), ()),
    "isolate": ((*QUICK, "--isolate", "--inject", "block:0"), ("--isolate",)),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_of_ranks(name: str, tmp_path: Path) -> None:
    typed, more = ON_RANKS[name]
    env = enough_of_torch(tmp_path) if name == "gpu-test" else None
    found = again(tmp_path, ("gpu-test",), typed, *more, env=env)
    assert found.report["verdict"] == "fail", found.out


def test_of_nodes(tmp_path: Path) -> None:
    again(tmp_path / "ports", ("ports",), ("localhost:1",))
    again(tmp_path / "cuda-env", ("cuda-env",), ("--goal", "build"))
    again(tmp_path / "doctor", ("doctor",), ("--path", "/nonexistent"))
    logs = tmp_path / "some"
    logs.mkdir()
    for name in ("torchrun-raise.log.gz", "torchrun-oom.log.gz"):
        shutil.copy(RECORDED_LOGS / name, logs)
    again(tmp_path / "logs", ("logs",), (str(logs / "torchrun-raise.log.gz"),))
    again(tmp_path / "logs", ("logs",), (str(logs),))


def test_of_dumps(tmp_path: Path) -> None:
    dumps = Path(__file__).parents[2] / "recorded" / "nccl_h200" / "dumps"
    found = again(tmp_path / "kept", ("flight-recorder",), (str(dumps),))
    assert found.report["verdict"] == "fail"


def test_hosts_that_were_not_reached_are_kept(tmp_path: Path) -> None:
    hosts = ("--hosts", "a,b", "--via", "sh -c 'exit 7' {host}", "--env", "TOKEN=geheim")
    for command in (("cuda-env",), ("doctor",), ("pyspy-all",), ("hang",), ("trace", "blocked"), ("core-bt",)):
        found = again(tmp_path / command[-1], command, hosts)
        assert found.report["verdict"] == "unknown"
        assert {host for one in found.report["findings"] for host in one["where"]["hosts"]} == {"a", "b"}
    assert not [path for path in tmp_path.rglob("*.json") if "geheim" in path.read_text()]


def test_facts_of_another_command_are_named(tmp_path: Path) -> None:
    distdiag("core-bt", "--check-setup", "--save", str(tmp_path))
    done = distdiag("cuda-env", "--from", str(tmp_path))
    assert done.code == 2
    assert f"hint: what is there is read by distdiag core-bt --from {tmp_path}" in done.err


def test_a_report_beside_the_facts_is_passed_over(tmp_path: Path) -> None:
    first = distdiag("hang", "--user", "nobody", "--save", str(tmp_path), "--json")
    (tmp_path / "report.json").write_text(first.out)
    second = distdiag("hang", "--from", str(tmp_path), "--json").report
    assert second["findings"] == first.report["findings"]
    assert "report.json" not in json.dumps(second)
    assert distdiag("hang", "--from", str(tmp_path / "report.json")).code == 2


def test_of_two_folders_the_hosts_are_put_together(tmp_path: Path) -> None:
    for name in ("a", "b"):
        distdiag("core-bt", "--check-setup", "--save", str(tmp_path / name))
        (file,) = (tmp_path / name).iterdir()
        saved = json.loads(file.read_text())
        saved["facts"]["host"] = saved["host"] = name
        file.write_text(json.dumps(saved, separators=(",", ":")))
    done = distdiag("core-bt", "--from", str(tmp_path / "a"), "--from", str(tmp_path / "b"), "--json")
    assert {host for one in done.report["findings"] for host in one["where"]["hosts"]} == {"a", "b"}


def test_a_host_of_an_earlier_run_in_the_same_folder_is_left_out(tmp_path: Path) -> None:
    distdiag("core-bt", "--check-setup", "--save", str(tmp_path))
    (file,) = tmp_path.iterdir()
    saved = json.loads(file.read_text())
    saved["facts"]["host"] = saved["host"] = "oldnode"
    saved["at"] -= 7200
    (tmp_path / "core-bt.oldnode.json").write_text(json.dumps(saved, separators=(",", ":")))
    done = distdiag("core-bt", "--from", str(tmp_path), "--json")
    old = [one for one in done.report["findings"] if "oldnode" in json.dumps(one)]
    assert [one["level"] for one in old] == ["unknown"], old
    assert "is from an earlier run" in old[0]["title"]


@pytest.mark.parametrize("command", [("pyspy-all",), ("trace", "fds"), ("gpu-test",)])
def test_what_contradicts_saved_facts_is_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    for more in (("--save", "x"), ("--hosts", "a")):
        done = distdiag(*command, "--from", str(tmp_path), *more)
        assert (done.code, "--from cannot be combined with --save" in done.err) == (2, True)


def test_text_of_py_spy_is_led_to_pyspy_all(tmp_path: Path) -> None:
    dump = tmp_path / "dump.txt"
    dump.write_text(
        'Process 4242: python train.py\nPython v3.11.7 (/usr/bin/python3.11)\n\nThread 4242 (idle): "MainThread"\n'
    )
    done = distdiag("hang", "--from", str(dump))
    assert (done.code, f"distdiag pyspy-all --from {dump}" in done.err) == (2, True), done.err
