"""Attacks by another user of the same machine: a real user, with files in a world-writable folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobs import PROGRAMS
from support import PROGRAM, need
from support_warm import distdiag

from distdiag.facts import private_files

if TYPE_CHECKING:
    from collections.abc import Iterator

OTHER = 65534
LINES = str(PROGRAMS / "lines.py")
SECRET = "Authorization: Bearer sesame"


@pytest.fixture(autouse=True)
def _as_root() -> None:
    need("setpriv")
    if os.geteuid():
        if os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
            pytest.fail("required here: root, to be two users")
        pytest.skip("only root can be two users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: all users can create files, and remove only their own."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def other(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run a shell script as the other user; its arguments are $1, $2 ..."""
    user = ["setpriv", "--reuid", str(OTHER), "--regid", str(OTHER), "--clear-groups"]
    argv = [*user, "sh", "-c", script, "sh", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, check=False, timeout=30)


def can_read(path: Path) -> bool:
    return other('cat "$1"', path).returncode == 0


# Lines of a job: trace py, trace show.


def trace(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    argv = [PROGRAM, "trace", "py", *arguments]
    return subprocess.run(
        argv,
        capture_output=True,
        check=False,
        timeout=60,
        text=True,
        errors="replace",
        env={**os.environ, "COLUMNS": "80", **env},
    )


def as_rank(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def forged(folder: Path, made_in: Path, rank: int) -> str:
    """Let the other user write a file into `folder` that claims a rank of our job; return its path."""
    if not made_in.exists():
        made_in.mkdir()
        trace("--dir", str(made_in), "--", LINES, "turns", env=as_rank(rank))
    for path in made_in.iterdir():
        copy = folder / f"forged{path.suffix}"
        assert other('cat > "$1"', copy).returncode == 0
        copy.write_bytes(path.read_bytes())
    assert (folder / "forged.lines").stat().st_uid == OTHER
    return str(folder / "forged.lines")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ('mkdir -m 777 "$1"', "owned by another user (uid 65534)"),
        ('mkdir -m 777 "$1-his" && ln -s "$1-his" "$1"', "a symbolic link"),
    ],
)
def test_lines_of_a_job_do_not_go_into_a_folder_of_another_user(shared: Path, script: str, says: str) -> None:
    for name in ("0", "root"):  # the number of a user is his own, unlike his name
        assert other(script, shared / f"distdiag-lines-{name}").returncode == 0
    done = trace("--", LINES, "prints", env={"TMPDIR": str(shared)})
    assert done.returncode == 3
    assert "argv ['prints']" in done.stdout
    assert f"cannot record lines in {shared}/distdiag-lines-0: {says}; choose another directory: " in done.stderr
    assert not list(shared.rglob("*.lines"))


def test_a_folder_for_lines_is_made_for_its_owner_alone(shared: Path) -> None:
    trace("--", LINES, "turns", env={"TMPDIR": str(shared)})
    (file,) = shared.rglob("*.lines")
    assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {0o600}
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_another_user_is_not_taken_for_the_job(shared: Path, tmp_path: Path) -> None:
    for name in ("0", "root"):
        folder = shared / f"distdiag-lines-{name}"
        assert other('mkdir -m 777 "$1"', folder).returncode == 0
        forged(folder, tmp_path / "made", rank=0)
    result = distdiag("trace", "show", "--json", env={"TMPDIR": str(shared)})
    assert result.report["data"]["rings"] == []
    assert result.code == 3
    assert result.findings["no-recording"]["title"].endswith(f"in {shared}/distdiag-lines-0")
    assert result.findings["other-user"]["title"].endswith("not read: owned by another user (uid 65534)")


def test_a_file_of_another_user_among_the_job_s_own_is_named_and_not_read(shared: Path, tmp_path: Path) -> None:
    trace("--dir", str(shared), "--", LINES, "turns", env=as_rank(0))
    path = forged(shared, tmp_path / "made", rank=1)
    other('ln -s "$1" "$2"; mkfifo "$3"', path, shared / "linked.lines", shared / "pipe.lines")
    result = distdiag("trace", "show", "--json", str(shared))
    assert {ring["rank"] for ring in result.report["data"]["rings"]} == {0}
    finding = result.findings["other-user"]
    assert finding["title"] == f"{path} not read: owned by another user (uid 65534)"
    assert finding["level"] == "warn"
    unread = {os.path.basename(name): why for _, name, why in result.report["data"]["unread"]}
    assert set(unread) == {"forged.lines", "linked.lines", "pipe.lines"}


def test_root_sees_the_job_of_another_user(shared: Path, tmp_path: Path) -> None:
    code = (
        "import os, time; from distdiag import trace_lines\n"
        "def step(folder, wait):\n"
        "    with trace_lines(folder):\n"
        "        wait()\n"
        f"step({str(tmp_path)!r}, int)\n"  # its imports may be in a folder closed to the other user
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        f"step({str(shared)!r} + '/his', lambda: input('ready\\n'))\n"
    )
    script = shared / "job.py"
    script.write_text(code)
    argv = [sys.executable, str(script)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        # Its owner is known by the process, and by the folder.
        for folder in (shared, shared / "his"):
            (ring,) = distdiag("trace", "show", "--json", str(folder)).report["data"]["rings"]
            assert (ring["pid"], ring["state"]) == (job.pid, "running")
        job.kill()
    result = distdiag("trace", "show", "--json", str(shared / "his"))
    assert [ring["state"] for ring in result.report["data"]["rings"]] == ["died"]
    assert result.report["data"]["run"] == f"pid {job.pid} of user nobody"
    # In a world-writable folder, the file of an ended process may be any user's, unless it is named.
    (path,) = (shared / "his").glob("*.lines")
    assert not distdiag("trace", "show", "--json", str(shared)).report["data"]["rings"]
    assert distdiag("trace", "show", "--json", str(path)).report["data"]["rings"]


# What another user runs: its ranks may not be read, and are ranks all the same.

LAUNCHES = (
    "import ctypes, subprocess, sys; ctypes.CDLL(None).prctl(15, b'pt_elastic', 0, 0, 0); "
    "ranks = [subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1) for _ in range(2)]; input('ready\\n')"
)
LOOKS = (
    "import json, os, pwd; from dataclasses import asdict; from distdiag.jobs.collect import Ask, facts; "
    "os.setgroups([]); os.setgid(65534); os.setuid(65534); "
    "print(json.dumps(asdict(facts(Ask()))))"
)


def test_ranks_of_another_user_are_below_their_launcher_though_they_cannot_be_read(tmp_path: Path) -> None:
    script = tmp_path / "torchrun"
    script.write_text(LAUNCHES)
    with subprocess.Popen([sys.executable, str(script)], stdin=-1, stdout=-1) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"ready\n"
        done = subprocess.run([sys.executable, "-c", LOOKS], capture_output=True, check=True, timeout=60)
        launcher.communicate(b"\n", timeout=20)
    found = [one for one in json.loads(done.stdout)["processes"] if launcher.pid in (one["pid"], one["parent"])]
    assert [(one["kind"], one["hidden"], one["user"]) for one in found] == [
        ("launcher", True, 0),
        ("", True, 0),
        ("", True, 0),
    ]


# Written files: --save, --html, --report.

OVERFLOWS = "import torch; torch.nn.Linear(2, 2)(torch.full((1, 2), float('inf')))"
SAVES = {
    "cuda-env": ("cuda-env", "--save", "DIR/a/b"),
    "core-bt": ("core-bt", "--check-setup", "--save", "DIR/c/d"),
    "pyspy-all": ("pyspy-all", "--pid", "SLEEPER", "--save", "DIR/a/b", "--html", "DIR/page.html"),
    "trace sys, attached": ("trace", "sys", "--pid", "SLEEPER", "--for", "100ms", "--keep-logs", "DIR/a/b"),
    "overflow": ("overflow", "--save", "DIR/a/b", "--", "sh", "-c", 'echo "$1" | "$0" -', sys.executable, OVERFLOWS),
}


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input('ready\\n')"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.kill()


@pytest.fixture
def umask() -> Iterator[int]:
    """The most generous one there is, also for what is started."""
    before = os.umask(0)
    yield 0
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("saves", SAVES.values(), ids=SAVES)
def test_what_is_kept_can_only_be_read_by_its_owner(shared: Path, sleeper: int, saves: tuple[str, ...]) -> None:
    arguments = [word.replace("DIR", str(shared)).replace("SLEEPER", str(sleeper)) for word in saves]
    done = distdiag(*arguments)
    found = sorted(shared.rglob("*"))
    files = [path for path in found if path.is_file()]
    assert len(files) >= sum("DIR" in word for word in saves), (found, done.err)
    assert {path: oct(path.stat().st_mode & 0o777) for path in files} == dict.fromkeys(files, "0o600")
    assert {path.stat().st_mode & 0o777 for path in found if path.is_dir()} <= {0o700}
    assert not any(can_read(path) for path in files)


WRITE = "import sys; from distdiag.files import write_whole; input('ready\\n'); write_whole(sys.argv[1], b'report')"


def test_a_link_under_the_name_of_a_draft_is_not_followed(shared: Path, tmp_path: Path) -> None:
    precious, report = tmp_path / "precious", shared / "report.json"
    precious.write_text("precious")
    argv = [sys.executable, "-c", WRITE, str(report)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        assert other('ln -s "$1" "$2"', precious, f"{report}.{writer.pid}.part").returncode == 0
        writer.communicate(b"\n", timeout=20)
    assert precious.read_text() == "precious"
    assert (report.read_text(), report.is_symlink()) == ("report", False)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ('ln -s "$1" "$2"', "DIR/report is a symbolic link owned by another user (uid 65534)"),
        ('ln -s "$1.d" "$2"', "DIR/report is a symbolic link owned by another user (uid 65534)"),
        ('mkfifo "$2"', "owned by another user (uid 65534)"),
    ],
    ids=["link to a file", "link to nothing", "pipe"],
)
def test_what_another_user_has_laid_under_the_name_of_a_report_is_refused(
    shared: Path, tmp_path: Path, sleeper: int, script: str, says: str
) -> None:
    precious, report = tmp_path / "precious", shared / "report"
    precious.write_text("precious")
    assert other(script, precious, report).returncode == 0
    done = distdiag("pyspy-all", "--pid", str(sleeper), "--html", str(report))
    assert done.code == 3
    assert f"cannot write {report}: {says.replace('DIR', str(shared))}" in " ".join(done.err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("script", ['mkdir -m 777 "$1"', 'mkdir -m 777 "$1-his" && ln -s "$1-his" "$1"'])
@pytest.mark.parametrize("saves", [SAVES["cuda-env"], SAVES["overflow"]], ids=lambda one: one[0])
def test_a_folder_of_another_user_is_not_saved_into(shared: Path, script: str, saves: tuple[str, ...]) -> None:
    assert other(script, shared / "facts").returncode == 0
    arguments = [str(shared / "facts") if word == "DIR/a/b" else word for word in saves]
    done = distdiag(*arguments)
    assert done.code == 2
    assert "another user (uid 65534)" in " ".join(done.err.split())
    assert not [path for path in shared.rglob("*") if path.is_file()]


def test_frames_of_a_model_are_not_appended_to_a_file_of_another_user(shared: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    for name, script in (("linked", 'ln -s "$1" "$2"'), ("his", 'touch "$2"; chmod 666 "$2"')):
        assert other(script, precious, shared / name).returncode == 0
        with pytest.raises(PermissionError, match="another user"):
            private_files.open_file(str(shared / name), os.O_WRONLY | os.O_APPEND)
    assert precious.read_text() == "precious"
    assert not (shared / "his").read_bytes()


def test_a_link_of_one_s_own_a_pipe_and_stdout_still_work(shared: Path) -> None:
    latest, run = shared / "latest.json", shared / "run1.json"
    run.write_text("old")
    latest.symlink_to("run1.json")
    write = WRITE.replace("input('ready\\n'); ", "")

    def written(path: Path | str, **stdout: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-c", write, str(path)], timeout=20, check=True, **stdout)  # type: ignore[call-overload, no-any-return]

    written(latest)
    assert (latest.is_symlink(), run.read_text()) == (True, "report")
    assert written("/dev/stdout", stdout=subprocess.PIPE).stdout == b"report"
    assert written("/dev/fd/1", stdout=subprocess.PIPE).stdout == b"report"
    with run.open("wb") as out:
        written("/dev/stdout", stdout=out)
    assert run.read_bytes() == b"report"
    os.mkfifo(shared / "pipe")
    with subprocess.Popen(["cat", str(shared / "pipe")], stdout=subprocess.PIPE) as reader:
        written(shared / "pipe")
        assert reader.communicate(timeout=20)[0] == b"report"
    assert sorted(path.name for path in shared.iterdir()) == ["latest.json", "pipe", "run1.json"]


def test_what_cannot_be_written_whole_leaves_what_was_there(shared: Path) -> None:
    report = shared / "report.json"
    report.write_text("old")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3, 3)); "
    argv = [sys.executable, "-c", limit + WRITE.replace("input('ready\\n'); ", ""), str(report)]
    done = subprocess.run(argv, capture_output=True, timeout=20, check=False, text=True)
    assert f"cannot write {report}: File too large" in done.stderr
    assert {path.name: path.read_text() for path in shared.iterdir()} == {"report.json": "old"}
