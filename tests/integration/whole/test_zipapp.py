"""distdiag.pyz on a Python without any package and without network."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import make_zipapp
import pytest
from cluster import Network, need_network
from cluster_ssh import serve_ssh
from jobs import Job


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pyz") / "distdiag.pyz"
    make_zipapp.write(path, {**make_zipapp.installed(), **make_zipapp.own()})
    return path


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment in which nothing is installed."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a user who has run it before: it is unpacked once, and compiled."""
    return tmp_path_factory.mktemp("user") / "home"


def run(python: Path, archive: Path, home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user whose environment has nothing, cut off from every network."""
    need_network()
    home.mkdir(exist_ok=True)
    return subprocess.run(
        ["unshare", "--net", str(python), str(archive), *words],
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


def test_the_stuck_rank_of_a_hung_job_is_found(archive: Path, bare: Path, home: Path) -> None:
    with Job("hangs_by_line", 2, forked=True) as job:
        job.wait_still()
        done = run(bare, archive, home, "pyspy-all", "--json", "--job", job.name)
    report = json.loads(done.stdout)
    assert (done.returncode, report["data"]["outliers"][0]["ranks"]) == (1, [1]), done.stderr


@pytest.mark.parametrize(
    "words",
    ["cuda-env --goal run", "ports", "trace fds {pid}", "trace blocked {pid}", "core-bt --check-setup", "logs {log}"],
)
def test_commands_that_need_no_torch_answer(archive: Path, bare: Path, home: Path, tmp_path: Path, words: str) -> None:
    log = tmp_path / "job.log"
    log.write_text("[rank0]: ValueError: no\n")
    with subprocess.Popen([bare, "-c", "input()"], stdin=subprocess.PIPE) as other:
        filled = [word.format(pid=other.pid, log=log) for word in words.split()]
        done = run(bare, archive, home, *filled, "--json")
        other.communicate(b"\n")
    report = json.loads(done.stdout)
    assert "data" in report, report
    assert done.stderr.count("Traceback") == 0


def test_a_printed_command_can_be_pasted(archive: Path, bare: Path, home: Path, tmp_path: Path) -> None:
    (finding,) = json.loads(run(bare, archive, home, "core-bt", "--json", str(tmp_path)).stdout)["findings"]
    assert finding["fix"]["commands"] == [f"{bare} {archive} core-bt --check-setup"]
    assert run(bare, archive, home, "logs").stderr.endswith(
        f"hint: {bare} {archive} logs FILE, a folder, or - for stdin\n"
    )


def test_without_torch_a_rank_says_what_is_missing(archive: Path, bare: Path, home: Path) -> None:
    done = run(bare, archive, home, "gpu-test", "--json", "--stall", "10")
    assert [each["id"] for each in json.loads(done.stdout)["findings"] if each["level"] == "fail"] == [
        "gpu-test.no-torch"
    ]


def test_ranks_take_the_torch_of_the_active_environment(archive: Path, bare: Path, home: Path) -> None:
    active = str(Path(sys.executable).parent.parent)
    done = run(bare, archive, home, "gpu-test", "--json", "--size", "1MiB", VIRTUAL_ENV=active)
    assert json.loads(done.stdout)["data"]["versions"]["torch"], done.stderr


IN_ACTIVE, ON_PATH = {"VIRTUAL_ENV": "{active}"}, {"PATH": "{active}/bin:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("words", "chosen"),
    [("run --", IN_ACTIVE), ("run --", ON_PATH), ("trace py --", IN_ACTIVE), ("overflow --", ON_PATH)],
)
def test_a_bare_script_gets_the_python_of_the_active_environment(
    archive: Path, bare: Path, home: Path, tmp_path: Path, words: str, chosen: dict[str, str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print('trained in', sys.prefix)\n")
    active = str(Path(sys.executable).parent.parent)
    environment = {name: value.format(active=active) for name, value in chosen.items()}
    done = run(bare, archive, home, *words.split(), str(script), **environment)
    assert done.stdout.startswith(f"trained in {active}\n"), done


def test_the_cache_is_the_user_s_alone_what_is_gone_is_named_and_a_foreign_one_is_not_used(
    archive: Path, bare: Path, tmp_path: Path
) -> None:
    home, cache = tmp_path / "home", tmp_path / "home" / ".cache" / "distdiag"
    assert run(bare, archive, home, "--version").stdout.startswith("distdiag ")
    assert cache.stat().st_mode & 0o777 == 0o700
    (folder,) = cache.iterdir()
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.rglob("*") if path.is_file())
    lib = folder / "lib" / "msgspec"
    lib.rename(lib.with_name("gone"))
    done = run(bare, archive, home, "ports")
    assert "msgspec" in done.stderr
    assert done.returncode not in (0, 1)
    lib.with_name("gone").rename(lib)
    broken = folder / "lib" / "distdiag" / "__init__.py"
    broken.write_text("raise SystemExit('another user wrote this')\n")
    cache.chmod(0o777)
    assert run(bare, archive, home, "--version").stdout.startswith("distdiag ")


def test_an_old_python_is_told_which_it_needs(archive: Path) -> None:
    roots = [*map(Path, os.environ.get("PATH", "").split(os.pathsep)), *Path.home().glob(".pyenv/versions/*/bin")]
    names = ("python2.7", "python3.6", "python3.9")  # of Debian 8, RHEL 8 and RHEL 9
    old = {name: root / name for root in roots for name in names if os.access(root / name, os.X_OK)}
    for python in old.values():
        done = subprocess.run([python, archive], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("distdiag needs Python 3.11 or newer; this is "), (python, done.stderr)
    with zipfile.ZipFile(archive) as packed:
        first, second, *_ = ast.parse(packed.read("__main__.py")).body
    assert isinstance(first, ast.Import), "only sys is imported before the check"
    assert isinstance(second, ast.If)


def test_the_same_files_make_the_same_archive(archive: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.pyz"
    make_zipapp.write(again, {**make_zipapp.own(), **make_zipapp.installed()})
    assert again.read_bytes() == archive.read_bytes()


def test_hosts_are_reached_by_openssh_where_paramiko_is_not(archive: Path, bare: Path, home: Path) -> None:
    need_network()
    with Network(1) as network:
        serve_ssh(network)
        command = [*network.client.command(), str(bare), str(archive), "ports", "--json", "--hosts", "node1"]
        done = subprocess.run(
            command,
            env={"PATH": "/usr/sbin:/usr/bin:/bin", "XDG_CACHE_HOME": f"{home}/.cache", **network.client_env()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
    report = json.loads(done.stdout)
    assert "data" in report, done.stderr
    assert [each["id"] for each in report["findings"] if each["id"].startswith("hosts.")] == []
