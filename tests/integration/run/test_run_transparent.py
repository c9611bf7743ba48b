"""distdiag run changes no exit status and no signal, in every way a shell can start a job: the bare job beside it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import PROGRAM, wait_until
from support_warm import distdiag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LATE_S = 120.0
_RUN = f"{shlex.quote(PROGRAM)} run --no-pictures -- "
_ENDS = {
    "exit 7": "sh -c 'exit 7'",
    "exit 255": "sh -c 'exit 255'",
    "SIGKILL": "sh -c 'kill -KILL $$'",
    "SIGTERM": "sh -c 'kill -TERM $$'",
    "SIGSEGV": "sh -c 'kill -SEGV $$'",
    "SIGHUP": "sh -c 'kill -HUP $$'",
    "SIGPIPE": "sh -c 'kill -PIPE $$'",
    "SIGINT": "sh -c 'kill -INT $$'",
    "SIGQUIT": "sh -c 'kill -QUIT $$'",
    "not found": "no-such-launcher train.py",
    "no such path": "./no-such-file",
    "a directory": "./folder",
    "no x bit": "./plain.sh",
    "no x bit on PATH": "on-path.sh",
    "no #!": "./bare.sh",
    "bad interpreter": "./bad.sh",
    "no program": "./garbage",
}
_BY_WAY = {
    "without a terminal": tuple(end for end in _ENDS if end not in ("SIGHUP", "SIGQUIT")),
    "in a terminal": ("SIGHUP", "SIGINT"),
    "in the background": ("SIGINT", "SIGQUIT", "not found"),
    "nohup": ("SIGHUP", "not found", "no program"),
    "setsid": ("SIGHUP", "no program"),
}
"""Ends that may differ where a shell or nohup changes signals, or starts what the kernel refuses."""
_OF_A_LEADER = ("exit 7", "SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    (tmp_path / "bin").mkdir()
    for name, text, mode in (
        ("plain.sh", b"#!/bin/sh\nexit 3\n", 0o644),
        ("bin/on-path.sh", b"#!/bin/sh\nexit 3\n", 0o644),
        ("bare.sh", b"exit 9\n", 0o755),
        ("bad.sh", b"#!/no/such/interpreter\n", 0o755),
        ("garbage", b"\x01\0\x02\0garbage", 0o755),
    ):
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(mode)
    return tmp_path


def _environment(place: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def _in_terminal(argv: list[str], place: Path, act: Callable[[int, int], None] | None = None) -> tuple[int, bytes]:
    """Run a program as the leader of a session with its own terminal; return its status and output."""
    child, terminal = pty.fork()
    if not child:
        os.chdir(place)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
        os.execvpe(argv[0], argv, _environment(place))
    if act is not None:
        act(child, terminal)
    output, deadline = b"", time.monotonic() + _LATE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        try:
            while select.select([terminal], [], [], 0 if done else 0.05)[0]:
                output += os.read(terminal, 65536)
        except OSError:  # closed, or the last of the other end is
            time.sleep(0.01)
        if done:
            _close(terminal)
            return os.waitstatus_to_exitcode(status), output
    os.kill(child, signal.SIGKILL)
    raise AssertionError(output)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def _statuses(way: str, before: str, place: Path, ends: Iterable[str]) -> dict[str, int]:
    """Return the status of each end as the shell sees it."""
    wait = " & wait $!" if way == "in the background" else ""
    before = {"nohup": "nohup ", "setsid": "setsid -w "}.get(way, "") + before
    chosen = {name: _ENDS[name] for name in ends}
    lines = [f"({before}{command}{wait}) 2>/dev/null; echo '<{name}>'=$?\n" for name, command in chosen.items()]
    script = "".join(lines)
    if way == "in a terminal":
        _, output = _in_terminal(["bash", "--norc", "-c", script], place)
    else:
        words, env = ["bash", "-c", script], _environment(place)
        output = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, check=True, cwd=place, env=env
        ).stdout
    return {name: int(status) for name, status in re.findall(r"<(.+?)>=(\d+)", output.decode())}


@pytest.mark.parametrize("way", _BY_WAY)
def test_each_end_has_the_status_of_the_bare_command(place: Path, way: str) -> None:
    ends = _BY_WAY[way]
    bare, ours = _statuses(way, "", place, ends), _statuses(way, _RUN, place, ends)
    assert bare.keys() == set(ends)
    if way in ("nohup", "setsid"):  # these give any file to sh that the kernel refuses; shells and run look into it
        assert (bare.pop("no program"), ours.pop("no program")) == (127, 126)
    assert ours == bare


@pytest.mark.parametrize("end", _OF_A_LEADER)
def test_the_leader_of_a_session_ends_as_the_bare_command(place: Path, end: str) -> None:
    ends = [_in_terminal(["sh", "-c", f"exec {before}{_ENDS[end]}"], place)[0] for before in ("", _RUN)]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("how", ["nohup", "setsid"])
def test_a_job_that_outlives_its_terminal_does_so_below_run(place: Path, how: str) -> None:
    lives = []
    for number, before in enumerate(("", _RUN)):
        mark = f"left-{os.getpid()}-{how}-{number}"
        job = f"{how} {before}{shlex.join([sys.executable, '-c', _JOB, mark])}"
        script = (
            f"{job} >{place}/out{number} 2>&1 </dev/null & until grep -q ready {place}/out{number}; do sleep 0.1; done"
        )
        words = ["bash", "--norc", "-c", f"{script}; echo ready; read line"]
        _in_terminal(words, place, _after_ready(lambda child, terminal: os.close(terminal)))
        time.sleep(1)
        lives.append(len(_living(mark)) - bool(before))  # run has the mark too
        for pid in _living(mark):
            os.kill(pid, signal.SIGKILL)
    assert lives[0] == lives[1] > 0


_JOB = """
import os, subprocess, sys, time
others = [subprocess.Popen([sys.argv[1], "50"], executable="sleep") for _ in range(2)]
print("ready", flush=True)
for other in others: other.wait()
"""


def _processes(are_these: Callable[[bytes], bool]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if are_these((entry / "cmdline").read_bytes()):
                found.append(int(entry.name))
    return found


def _living(mark: str) -> list[int]:
    return _processes(lambda line: mark.encode() in line.split(b"\0"))


def _gone(mark: str) -> bool:
    deadline = time.monotonic() + 10
    while _living(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = _living(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left


def _after_ready(act: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def wait(child: int, terminal: int) -> None:
        output = b""
        while b"ready" not in output:
            assert select.select([terminal], [], [], _LATE_S)[0]
            output += os.read(terminal, 65536)
        act(child, terminal)

    return wait


@pytest.mark.parametrize("shell", [False, True])
@pytest.mark.parametrize("what", ["hang up", "Ctrl-C", "SIGTERM"])
def test_what_a_terminal_and_a_kill_do_to_a_job(place: Path, shell: bool, what: str) -> None:
    def act(child: int, terminal: int) -> None:
        if what == "hang up":
            os.close(terminal)
        elif what == "Ctrl-C":
            os.write(terminal, b"\x03")
        else:
            os.kill(child, signal.SIGTERM)

    ends = []
    for before in ([], [PROGRAM, "run", "--no-pictures", "--"]):
        mark = f"mark-{os.getpid()}-{len(before)}-{what}-{shell}"
        words = [*before, sys.executable, "-c", _JOB, mark]
        argv = ["bash", "--norc", "-c", f"{shlex.join(words)}; exit $?"] if shell else words
        status, _ = _in_terminal(argv, place, _after_ready(act))
        if what == "SIGTERM" or (shell and what == "hang up"):
            # A bare job that is killed alone leaves its children, and so does this; a shell that is killed, its job.
            for pid in _living(mark):
                os.kill(pid, signal.SIGKILL)
        ends.append((status, _gone(mark)))
    assert ends[0] == ends[1]


def test_a_job_in_the_background_of_a_script_ignores_sigint(place: Path) -> None:
    code = (
        "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'usr1\\n')); "
        "print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN, flush=True); input()"
    )
    job = shlex.join([sys.executable, "-c", code])
    says = "while kill -0 $! && ! grep -q {} out; do sleep 0.02; done 2>/dev/null; "
    os.mkfifo(place / "in")
    for before in ("", _RUN):
        # Both signals are passed on in this order: when it has seen the second, it has ignored the first.
        script = (
            f"rm -f out; {before}{job} <in >out & exec 3>in; {says.format('.')} kill -INT $!; kill -USR1 $!; "
            f"{says.format('usr1')} exec 3>&-; wait $!; echo status=$?; cat out"
        )
        words = ["bash", "-c", script]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=place, timeout=_LATE_S)
        assert done.stdout == "status=1\nTrue\nusr1\n", (before, done)


def test_a_daemon_that_the_job_leaves_delays_nothing_and_keeps_no_recorder(place: Path) -> None:
    mark = f"daemon-{os.getpid()}"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}])"
    took_s = []
    for number, before in enumerate(("pass", code)):
        began = time.monotonic()
        with (place / "out").open("wb") as file:
            job = [sys.executable, "-c", f"{before}; print('done')"]
            words = [PROGRAM, "run", "--save", str(place / f"kept{number}"), *job]
            done = subprocess.run(words, stdout=file, stderr=file, check=False)
        took_s.append(time.monotonic() - began)
    (daemon,) = _living(mark)
    try:
        assert (done.returncode, (place / "out").read_bytes()) == (0, b"done\n")
        assert took_s[1] < took_s[0] + 4, took_s  # a recorder is waited for 5 s at most
        wait_until(lambda: not _recorders(place / "kept1"), 10, lambda: "a recorder is left")
    finally:
        os.kill(daemon, signal.SIGKILL)


def _recorders(folder: Path) -> list[int]:
    return _processes(lambda line: b"job_recorder" in line and str(folder).encode() in line)


@pytest.fixture
def in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be there, in no environment."""
    monkeypatch.chdir(place)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return place


@pytest.mark.parametrize(
    ("variable", "words"),
    [("VIRTUAL_ENV", ("run", "--")), ("CONDA_PREFIX", ("trace", "py", "--")), ("PATH", ("overflow", "--"))],
)
def test_a_bare_script_gets_the_python_of_the_active_environment(
    in_place: Path, variable: str, words: tuple[str, ...]
) -> None:
    environment = in_place / "env"
    (environment / "bin").mkdir(parents=True)
    for name in ("python", "python3"):
        python = environment / "bin" / name
        python.write_text(f'#!/bin/sh\necho "theirs" >&2\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
    (in_place / "train.py").write_text("print('trained')\n")
    value = f"{environment / 'bin'}:{os.environ['PATH']}" if variable == "PATH" else str(environment)
    done = distdiag(*words, "train.py", env={variable: value})
    assert done.out == "trained\n", done
    assert f"starting train.py with {environment / 'bin'}/python" in done.err
    assert "\ntheirs\n" in f"\n{done.err}"


@pytest.mark.parametrize("by_uvx", [False, True])
def test_the_environment_on_path_is_the_jobs_though_its_python_is_the_same_file(in_place: Path, by_uvx: bool) -> None:
    """uvx puts the environment that it makes for distdiag first on PATH, with a torchrun of its own."""
    environment = in_place / "env"
    venv.create(environment, symlinks=True)
    (package,) = (environment / "lib").glob("python*/site-packages")
    (package / "torch").mkdir()
    (package / "torch" / "__init__.py").touch()
    torchrun = environment / "bin" / "torchrun"
    torchrun.write_text("#!/bin/sh\necho theirs\n")
    torchrun.chmod(0o755)
    (in_place / "train.py").write_text("import sys; print(sys.prefix)\n")
    folders, uv = [str(environment / "bin"), "/usr/bin", "/bin"], {}
    if by_uvx:
        folders, uv = [str(Path(sys.executable).parent), *folders], {"UV": "/usr/bin/uv"}
    for job, says in (("train.py", str(environment)), ("torchrun", "theirs")):
        done = distdiag("run", "--", job, env={**uv, "PATH": os.pathsep.join(folders)})
        assert done.out == f"{says}\n", done
