"""trace py and trace show on real programs: the lines kept when they die, an undisturbed job, and the stuck rank."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import support_torch
from cluster import Network, need_network
from jobs import PROGRAMS, Job, states
from support import PROGRAM, need_mounts, wait_until
from support_warm import distdiag

from distdiag.facts.recorder import line_trace_file
from distdiag.training import site

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support import Result

LINES = str(PROGRAMS / "lines.py")


def _pythons() -> list[str]:
    """List this interpreter and newer ones of this machine; they need nothing installed."""
    newer = [shutil.which(f"python3.{minor}") or "" for minor in (12, 13, 14)]
    newer += glob.glob(os.path.expanduser("~/.pyenv/versions/3.1[234]*/bin/python"))
    return [sys.executable, *dict.fromkeys(path for path in newer if path and "/shims/" not in path)]


def _name(python: str) -> str:
    return python.rpartition("versions/")[2]


@pytest.fixture(params=_pythons(), ids=_name)
def python(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[_pythons()[0], *_pythons()[1:][-1:]], ids=_name)
def tracer(request: pytest.FixtureRequest) -> str:
    """A Python for each tracer: sys.settrace, and sys.monitoring from 3.12 on."""
    return str(request.param)


def run(folder: Path, *command: str, options: Sequence[str] = (), env: dict[str, str] | None = None) -> Result:
    return distdiag("trace", "py", "--dir", str(folder), *options, "--", *command, env=env)


def kept(folder: Path) -> list[line_trace_file.RingFile]:
    found = [line_trace_file.read(str(path)) for path in folder.glob("*.lines")]
    return sorted(found, key=lambda one: one.about.began_s)


def place(record: line_trace_file.Record) -> tuple[str, int]:
    return os.path.basename(record.code.file), record.line


def marked(mark: str) -> int:
    with open(LINES, encoding="utf-8") as file:
        (number,) = (number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))
    return number


def lines_of(ring: line_trace_file.RingFile) -> list[line_trace_file.Record]:
    return [record for record in ring.threads[0].records if not record.back]


@pytest.mark.parametrize(
    ("how", "status"),
    [
        (("ends_by_signal", "SIGKILL"), -signal.SIGKILL),
        (("crashes",), -signal.SIGSEGV),
        (("ends_at_once",), 7),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_the_last_line_is_there_however_it_ended(
    tmp_path: Path, tracer: str, how: tuple[str, ...], status: int
) -> None:
    done = run(tmp_path, tracer, LINES, *how)
    assert done.code == status, done.err
    (ring,) = kept(tmp_path)
    last = ring.threads[0].records[-1]
    function = how[0]
    expected = {
        "ends_by_signal": "os.kill",
        "crashes": "string_at",
        "ends_at_once": "os._exit",
    }[function]
    with open(LINES, encoding="utf-8") as file:
        source = file.read().splitlines()[last.line - 1]
    assert (last.code.function, last.back) == (function, False)
    assert expected in source
    assert ring.ended_s is None


def test_the_job_does_not_notice(tmp_path: Path, tracer: str) -> None:
    bare = subprocess.run([tracer, LINES, "prints", "a b"], capture_output=True, check=False, timeout=60)
    traced = [PROGRAM, "trace", "py", "--dir", str(tmp_path), "--", tracer, LINES, "prints", "a b"]
    done = subprocess.run(traced, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (3, bare.stdout) == (bare.returncode, bare.stdout)
    (ring,) = kept(tmp_path)
    assert ring.ended_s is not None, "it came to its own end"


def test_modules_and_commands_are_traced_as_python_runs_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(LINES, tmp_path / "mymodule.py")
    for command in (("-m", "mymodule", "turns"), ("-c", "import mymodule; mymodule.turns()"), ("mymodule.py", "turns")):
        folder = tmp_path / f"kept {command[0]}"
        assert run(folder, sys.executable, *command).code == 0
        (ring,) = kept(folder)
        assert "turns" in {record.code.function for record in ring.threads[0].records[-1:]} | {
            record.code.function for record in ring.threads[0].records[-3:]
        }


def test_another_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.was_customized = True\n")
    code = "import sys; print(sys.was_customized, sys.modules['sitecustomize'].__file__)"
    done = run(tmp_path / "kept", "-c", code, env={"PYTHONPATH": str(tmp_path)})
    assert done.out.split() == ["True", str(tmp_path / "sitecustomize.py")]
    assert next(iter(site.__path__)) not in done.out


def test_threads_of_every_kind_have_rings_of_their_own(tmp_path: Path, tracer: str) -> None:
    run(tmp_path, tracer, LINES, "threads")
    (ring,) = kept(tmp_path)
    names = [thread.name for thread in ring.threads]
    assert names[0] == "MainThread"
    assert set(names[1:]) == {"a thread not started by threading", *(f"counts {number}" for number in range(6))}
    for thread in ring.threads[1:]:
        assert thread.ended_s is not None
        assert {record.code.function for record in thread.records} <= {"count", "threads.<locals>.raw", "raw"}


def test_a_ring_is_used_again_when_there_are_more_threads_than_room(tmp_path: Path, tracer: str) -> None:
    run(tmp_path, tracer, LINES, "threads", options=("--max-threads", "2"))
    (ring,) = kept(tmp_path)
    assert [thread.name for thread in ring.threads] == ["MainThread", "counts 5"]
    assert ring.untold_threads == 0


def test_an_alarm_ends_what_it_is_to_end(tmp_path: Path, python: str) -> None:
    """A signal handler's exception is the job's, wherever in the tracer the signal came."""
    if "3.13.0" in subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("3.13.0 itself lets a signal handler's exception out of a `try` around a loop, traced or not")
    done = run(tmp_path, python, LINES, "is_alarmed")
    assert "recording of process" not in done.err
    assert "Exception ignored" not in done.err
    assert done.out == "missed 0\n"


def test_threads_do_not_see_how_tracing_begins_and_ends(tmp_path: Path, python: str) -> None:
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [python, LINES, "is_traced_now_and_then", str(tmp_path)],
        capture_output=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert (done.returncode, done.stdout) == (0, b"seen []\n"), done.stderr


def test_a_fork_writes_into_a_file_of_its_own(tmp_path: Path, tracer: str) -> None:
    run(tmp_path, tracer, "-W", "ignore", LINES, "forks")
    parent, child = kept(tmp_path)
    assert child.about.parent == parent.about.pid
    assert place(lines_of(parent)[-1])[1] == marked("PARENT")
    assert place(lines_of(child)[-1])[1] == marked("CHILD")
    assert "count" in {record.code.function for record in child.threads[0].records}


def test_a_worker_of_a_forkserver_is_its_ranks(tmp_path: Path) -> None:
    """Its parent is the server, which may have kept no line, and is no rank."""
    done = run(tmp_path, sys.executable, LINES, "forkserves", env={"RANK": "3", "WORLD_SIZE": "4"})
    result = distdiag("trace", "show", "--json", "--count", "total", str(tmp_path))
    rings_of = {one["pid"]: one for one in result.report["data"]["rings"]}
    assert {one["rank"] for one in rings_of.values()} == {3}
    worker, *others = [one for one in rings_of.values() if one["thread"]["count"]] or [None]
    assert worker is not None, (done, result.out)
    assert not others
    assert (worker["thread"]["count"], worker["full"], worker["thread"]["name"]) == (9, False, "MainThread")
    assert worker["thread"]["kept"] >= 17
    text = distdiag("trace", "show", "--count", "total", str(tmp_path)).out
    assert f"{worker['pid']} (its child)" in text


def test_a_helper_that_begins_after_its_rank_has_ended_is_no_newer_run(tmp_path: Path) -> None:
    """Its parent is pid 1 by then; the tracker of multiprocessing can be as late."""
    code = f"""
import os, subprocess
wait = f"while [ -d /proc/{{os.getpid()}} ]; do sleep 0.02; done; exec {sys.executable} -c 'late = 1'"
subprocess.Popen(["sh", "-c", wait])
"""
    run(tmp_path, sys.executable, "-c", code, env={"RANK": "3", "WORLD_SIZE": "4"})
    rank, late = kept(tmp_path)
    assert late.about.parent != rank.about.pid
    shown = distdiag("trace", "show", "--json", str(tmp_path)).report["data"]
    assert ([one["pid"] for one in shown["rings"]], shown["older_runs"]) == ([rank.about.pid, late.about.pid], 0)


def test_a_module_of_the_standard_library_is_included_by_its_name(tmp_path: Path) -> None:
    code = "import json, textwrap\nfor i in range(30): json.dumps({'a': [i]}, indent=1); textwrap.dedent('a')\n"
    words = ("--lines", "20", "--include", "json,math")
    done = run(tmp_path, "-c", code, options=words)
    (ring,) = kept(tmp_path)
    files = {one.code.file for one in ring.threads[0].records if one.code.kind == "stdlib"}
    assert {os.path.basename(os.path.dirname(file)) for file in files} == {"json"}
    assert done.code == 0
    text = distdiag("trace", "show", "--count", "dumps", str(tmp_path)).out
    assert "more than the last 20 lines, which were recorded: earlier lines are not counted" in " ".join(text.split())


def test_a_program_that_is_started_is_traced_too(tmp_path: Path, tracer: str) -> None:
    run(tmp_path, tracer, LINES, "runs_another")
    _, below = kept(tmp_path)
    assert [place(record) for record in below.threads[0].records] == [("<string>", 1), ("<string>", 2)]


def test_code_without_a_file_generators_and_async_code(tmp_path: Path, python: str) -> None:
    run(tmp_path, python, LINES, "in_turn")
    (ring,) = kept(tmp_path)
    places = list(map(place, lines_of(ring)))
    assert [line for file, line in places if file == "<made up>"] == [1, 2]
    lines = [line for _, line in places]
    assert lines.index(marked("GENERATED")) < lines.index(marked("AWAITED"))
    assert marked("AWAITED") in [record.line for record in ring.threads[0].records[-5:]]


def test_the_ring_goes_round_and_keeps_exactly_the_last_lines_in_order(tmp_path: Path, tracer: str) -> None:
    run(tmp_path, tracer, LINES, "turns", options=("--lines", "64"))
    (ring,) = kept(tmp_path)
    records = ring.threads[0].records
    assert len(records) == 64
    times = [record.at_s for record in records]
    assert times == sorted(times)
    inside = [record.line for record in records if record.code.function == "count"][:-2]
    assert inside[:-1:2] == inside[0:1] * len(inside[:-1:2]), "the two lines of the loop in turn"
    assert len(set(inside)) == 2


def test_a_call_that_returned_into_the_line_that_hangs(tmp_path: Path, tracer: str) -> None:
    run(tmp_path, tracer, LINES, "hangs_after_a_call")
    (ring,) = kept(tmp_path)
    last = ring.threads[0].records[-1]
    assert (last.line, last.back) == (marked("CALLER"), True)


def test_a_signal_handler_may_raise_in_the_tracer(tmp_path: Path, python: str) -> None:
    _survives(tmp_path, python, "is_interrupted")


def test_the_tracer_may_have_the_last_frame_there_is_room_for(tmp_path: Path, tracer: str) -> None:
    _survives(tmp_path, tracer, "recurses")


def _survives(tmp_path: Path, python: str, how: str) -> None:
    # With so many lines, work per ring takes long.
    done = run(tmp_path, python, LINES, how, options=("--lines", "20000", "--max-threads", "2"))
    assert (done.code, done.err.count("Traceback")) == (-signal.SIGKILL, 0), done.err
    (ring,) = kept(tmp_path)
    (main,) = (thread for thread in ring.threads if thread.tid == ring.about.pid)
    assert main.records[-1].line == marked("END")


def test_disk_use_is_constant_and_packages_are_chosen(tmp_path: Path, tracer: str) -> None:
    code = "import json\nfor i in range(300): json.dumps({'a': [i]}, indent=1)\n"
    run(tmp_path / "user", tracer, "-c", code)
    run(tmp_path / "stdlib", tracer, "-c", code, options=("--include", "stdlib"))
    (user,), (stdlib,) = kept(tmp_path / "user"), kept(tmp_path / "stdlib")
    assert {record.code.kind for record in user.threads[0].records} == {"user"}
    assert "stdlib" in {record.code.kind for record in stdlib.threads[0].records}
    sizes = {path.stat().st_size for folder in ("user", "stdlib") for path in (tmp_path / folder).glob("*.lines")}
    assert sizes == {line_trace_file.size_of(32, 1000)}


def test_a_full_disk_is_told_and_the_job_runs(tmp_path: Path) -> None:
    need_mounts()
    script = (
        f"mount -t tmpfs -o size=64k none {tmp_path} && {PROGRAM} trace py --dir {tmp_path}/x -- {LINES} prints; "
        f"echo status $?; ls {tmp_path}/x | wc -l"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, check=False, timeout=60)
    assert b"cannot record lines in" in done.stderr
    assert b"No space left on device" in done.stderr
    assert b"argv []" in done.stdout.replace(b"['prints']", b"[]")
    assert done.stdout.endswith(b"status 3\n0\n")


def test_a_folder_that_cannot_be_made_is_told_and_the_job_runs(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(tmp_path / "file" / "below", LINES, "raises")
    assert done.code == 5
    assert "cannot record lines" in done.err


def test_a_debugger_or_coverage_goes_first(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.settrace(lambda *a: None)\n"
        f"from distdiag import trace_lines\nwith trace_lines({str(tmp_path)!r}) as traced: x = 1\nprint(traced.path)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    if sys.version_info < (3, 12):
        assert done.stdout == "None\n"
        assert "another tracer is active" in done.stderr


def test_the_context_manager_sees_the_function_it_stands_in(tmp_path: Path, tracer: str) -> None:
    code = (
        "from distdiag import trace_lines\n"
        "def f():\n  before = 1\n"
        f"  with trace_lines({str(tmp_path)!r}, lines=50):\n    inside = 2\n    inside += 1\n  after = 3\n"
        "f()\nf()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(line_trace_file.__file__).parents[3])}
    subprocess.run([tracer, "-c", code], check=True, timeout=60, env=env)
    first, second = kept(tmp_path)
    for ring in (first, second):
        assert {5, 6} <= {record.line for record in ring.threads[0].records} <= {4, 5, 6}


def test_the_memory_limit_of_a_container_ends_it(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"distdiag-test-{os.getpid()}"
    if not os.access(group.parent / "cgroup.procs", os.W_OK):
        pytest.skip("no right to make a memory cgroup of version 1")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("60M")
        inside = f"echo $$ > {group}/cgroup.procs; exec {PROGRAM} trace py --dir {tmp_path} -- {LINES} eats"
        done = subprocess.run(["sh", "-c", inside], capture_output=True, check=False, timeout=60)
    finally:
        group.rmdir()
    assert done.returncode == -signal.SIGKILL
    (ring,) = kept(tmp_path)
    last = marked("EATS")  # or the head of its loop: what is written down takes memory as well
    assert place(lines_of(ring)[-1])[1] in (last, last - 1)


def show(*arguments: str) -> Result:
    return distdiag("trace", "show", "--json", *arguments)


def last_place(ring: dict[str, Any]) -> tuple[str, int]:
    return os.path.basename(ring["thread"]["last"][-1]["file"]), ring["thread"]["last"][-1]["line"]


def test_the_stuck_rank_of_a_job_that_was_killed_and_of_one_that_hangs(tmp_path: Path) -> None:
    source = (PROGRAMS / "hangs_by_line.py").read_text().splitlines()
    late, waits = (next(n for n, line in enumerate(source, 1) if f"# {mark}" in line) for mark in ("LATE", "WAITS"))
    traced = (PROGRAM, "trace", "py", "--dir", str(tmp_path), "--")
    with Job("hangs_by_line", 2, wrap=traced, forked=True) as job:
        job.wait_still()
        pids = [job.pid(rank) for rank in range(2)]
        time.sleep(2.5)  # lines are young for two seconds, and a job with young lines goes on
        live = show(str(tmp_path))
        assert live.report["data"]["outliers"] == [1]
        assert {ring["state"] for ring in live.report["data"]["rings"]} == {"running"}
    wait_until(lambda: set(states(pids).values()) <= {"", "Z"}, 20, lambda: f"{states(pids)}")
    dead = show(str(tmp_path))
    assert dead.code == 1
    finding = dead.findings["stuck-rank"]
    assert finding["where"]["ranks"] == [1]
    assert f"hangs_by_line.py:{late}" in finding["title"]
    assert f"waits in `all_reduce` called from `step` hangs_by_line.py:{waits}" in finding["title"]
    mains = {ring["pid"]: ring for ring in dead.report["data"]["rings"] if ring["thread"]["main"]}
    places = {rank: last_place(mains[pid]) for rank, pid in enumerate(pids)}
    assert places == {0: ("hangs_by_line.py", waits), 1: ("hangs_by_line.py", late)}
    assert [group["ranks"] for group in dead.report["data"]["groups"]] == [[0], [1]]
    counted = show("--count", r"dist\.all_reduce", str(tmp_path)).report["data"]["rings"]
    counts = {ring["rank"]: ring["thread"]["count"] for ring in counted if ring["thread"]["main"]}
    assert (counts[0], counts[1]) == (4, 3)


def test_a_job_that_comes_to_its_end_is_fine_and_an_older_run_is_not_mixed_in(tmp_path: Path) -> None:
    for _ in range(2):
        for rank in range(2):
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
            run(tmp_path, sys.executable, LINES, "turns", env=env)
    result = show(str(tmp_path))
    assert (result.code, result.report["verdict"]) == (0, "ok")
    assert result.report["data"]["older_runs"] == 1
    assert {ring["rank"] for ring in result.report["data"]["rings"]} == {0, 1}


def test_an_exception_that_nobody_caught_is_told_with_its_line(tmp_path: Path) -> None:
    assert run(tmp_path, LINES, "fails").code == 1
    result = show(str(tmp_path))
    assert result.code == 1
    title = result.findings["last-line"]["title"]
    assert "raised ValueError: bad batch" in title
    assert f"`fails` lines.py:{marked('RAISED')}" in title


def test_files_that_are_cut_off_or_foreign_are_named(tmp_path: Path) -> None:
    run(tmp_path, LINES, "turns")
    (good,) = tmp_path.glob("*.lines")
    (tmp_path / "cut.lines").write_bytes(good.read_bytes()[:5000])
    (tmp_path / "foreign.lines").write_text("hello")
    result = show(str(tmp_path))
    assert len(result.report["data"]["unread"]) == 2
    assert len(result.report["data"]["rings"]) == 1
    assert result.code == 3


def test_what_people_read(tmp_path: Path) -> None:
    run(tmp_path, LINES, "ends_by_signal", "SIGKILL")
    shown = distdiag("trace", "show", str(tmp_path))
    assert shown.out.splitlines()[0] == "distdiag trace show: FAIL"
    assert "os.kill(os.getpid(), getattr(signal, sys.argv[2]))" in shown.out
    assert "was killed or crashed" in shown.out
    assert "\x1b" not in shown.out
    nothing = distdiag("trace", "show", str(tmp_path / "nowhere"))
    assert (nothing.code, "trace py" in nothing.err) == (2, True)
    wrong = distdiag("trace", "show", "--count", "(", str(tmp_path))
    assert (wrong.code, "not a regular expression" in wrong.err) == (2, True)
    missing = distdiag("trace", "py", "--", "no_such_script.sh")
    assert (missing.code, "no_such_script.sh" in missing.err) == (127, True)


def test_on_several_nodes_each_tells_of_its_own_files() -> None:
    need_network()
    with Network(2) as network:
        for rank, node in enumerate(network.nodes):
            enter = network.via.replace("{host}", node.name).split()
            how = (LINES, "ends_by_signal", "SIGKILL") if rank else (LINES, "turns")
            place = [f"RANK={rank}", "WORLD_SIZE=2", "MASTER_ADDR=node1", "MASTER_PORT=1"]
            traced = [PROGRAM, "trace", "py", "--dir", "/dev/shm/lines", "--", *how]
            subprocess.run([*enter, "env", *place, *traced], capture_output=True, check=False, timeout=60)
        where = ("--hosts", network.hosts, "--via", network.via)
        command = ("trace", "show", "--json", *where, "/dev/shm/lines")
        result = distdiag(*command, wrap=tuple(network.client.command()), env=network.client_env())
    rings = result.report["data"]["rings"]
    assert {(ring["rank"], ring["host"], ring["state"]) for ring in rings} == {
        (0, "node1", "ended"),
        (1, "node2", "died"),
    }


def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    ranks = ("--nproc-per-node", "2", "--master-port", "0", "-m", "distdiag", "trace", "py", "--dir", str(tmp_path))
    with (tmp_path / "log").open("w") as log:
        job = support_torch.start(
            [torchrun, *ranks, "--", LINES, "turns"], {**os.environ, "OMP_NUM_THREADS": "1"}, output=log
        )
    assert job is not None
    assert job.wait(100) == 0, (tmp_path / "log").read_text()
    assert {ring.about.rank for ring in kept(tmp_path)} == {0, 1}
    assert show(str(tmp_path)).report["exit_code"] == 0
