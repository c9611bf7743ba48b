"""Where cores go, what counts as a core file, and whether a crash leaves one: checked against real crashes."""

from __future__ import annotations

import gzip
import lzma
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loops import each
from support import need, wait_until

from distdiag.commands.core_bt.core_dump_setup import setup_findings
from distdiag.facts.core import setup, stored_cores
from distdiag.facts.core.setup import CoredumpConf, PatternKind, parse_pattern
from distdiag.report import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOBODY = 65534
CORE = b"\x7fELF\x02\x01\x01" + bytes(9) + (4).to_bytes(2, "little") + (62).to_bytes(2, "little") + bytes(8000)
LIBRARY = CORE[:16] + (3).to_bytes(2, "little") + CORE[18:]
GIB = 1 << 30

SYSTEMD = "|/usr/lib/systemd/systemd-coredump %P %u %g %s %t %c %h"
APPORT = "|/usr/share/apport/apport -p%p -s%s -c%c -d%d -P%P -u%u -g%g -- %E"


@each(
    "text, uses_pid, kind, folder, handler, unique",
    [
        ("core", False, PatternKind.RELATIVE, "", "", False),
        ("core", True, PatternKind.RELATIVE, "", "", True),
        ("", True, PatternKind.RELATIVE, "", "", True),
        ("cores/core.%e", False, PatternKind.RELATIVE, "cores", "", False),
        ("/var/crash/core.%e.%h.%p", False, PatternKind.ABSOLUTE, "/var/crash", "", True),
        ("/cores/%h/core.%t", False, PatternKind.ABSOLUTE, "/cores", "", False),
        ("/core.%%p", False, PatternKind.ABSOLUTE, "/", "", False),
        (SYSTEMD, False, PatternKind.PROGRAM, "", "systemd-coredump", True),
        (APPORT, False, PatternKind.PROGRAM, "", "apport", True),
        ("|/usr/libexec/abrt-hook-ccpp %s %c %p", False, PatternKind.PROGRAM, "", "abrt", True),
        ("|/wsl-capture-crash %t %E %p %s", False, PatternKind.PROGRAM, "", "WSL", True),
        ("|/opt/site/collect %p", False, PatternKind.PROGRAM, "", "collect", True),
        ("@/run/systemd/coredump.socket", False, PatternKind.SOCKET, "", "", True),
        ("|/bin/false", True, PatternKind.NOWHERE, "", "", True),
        ("", False, PatternKind.NOWHERE, "", "", True),
        ("/dev/null", False, PatternKind.NOWHERE, "", "", True),
    ],
)
def test_a_core_pattern_is_understood(
    text: str, uses_pid: bool, kind: PatternKind, folder: str, handler: str, unique: bool
) -> None:
    found = parse_pattern(text, uses_pid=uses_pid)
    assert (found.kind, found.folder, found.handler, found.unique) == (kind, folder, handler, unique)


def test_this_systems_pattern_is_the_kernels() -> None:
    found = setup.read_pattern()
    assert found is not None
    assert found.text == Path("/proc/sys/kernel/core_pattern").read_text("utf-8").rstrip("\n")


def test_cores_are_found_by_what_is_in_them_newest_first(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    (deep / "d").mkdir(parents=True)
    files = {
        deep / "crashed-yesterday": CORE,
        tmp_path / "packed.gz": gzip.compress(CORE),
        tmp_path / "a" / "packed.xz": lzma.compress(CORE),
        tmp_path / "big-endian": CORE[:5] + b"\x02" + CORE[6:16] + b"\0\x04" + CORE[18:],
    }
    for age, (path, data) in enumerate(files.items()):
        path.write_bytes(data)
        os.utime(path, (time.time() - age, time.time() - age))
    (tmp_path / "core").write_text("a text that is called core")
    (tmp_path / "core.so").write_bytes(LIBRARY)
    (tmp_path / "data.gz").write_bytes(gzip.compress(b"0123456789"))
    (deep / "d" / "core").write_bytes(CORE)
    (tmp_path / "again").symlink_to(deep / "crashed-yesterday")
    (tmp_path / "around").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    found = stored_cores.find(str(tmp_path))
    assert [Path(core).resolve() for core in found.cores] == list(files)
    assert found.skipped == ()


@pytest.mark.parametrize("tool", ["zstd", "lz4"])
def test_what_systemd_packs_is_looked_into(tmp_path: Path, tool: str) -> None:
    need(tool)
    for name, data in (("core.python3.0.4711", CORE), ("core.notes", LIBRARY)):
        done = subprocess.run([tool, "-qc"], input=data, capture_output=True, check=True, timeout=20)
        (tmp_path / f"{name}.{tool}").write_bytes(done.stdout)
    assert [Path(core).name for core in stored_cores.find(str(tmp_path)).cores] == [f"core.python3.0.4711.{tool}"]


def test_what_is_called_a_core_and_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "core.1").touch()
    (tmp_path / "core.2.gz").write_bytes(gzip.compress(CORE)[:12])
    (tmp_path / "_usr_bin_python3.0.crash").write_text("ProblemType: Crash\nCoreDump: base64\n")
    why = {Path(path).name: why for path, why in stored_cores.find(str(tmp_path)).skipped}
    assert "the disk was full" in why["core.1"]
    assert "apport-unpack" in why["_usr_bin_python3.0.crash"]
    for path, words in ((tmp_path / "gone", "No such file"), (tmp_path / "core.1", "the disk was full")):
        found = stored_cores.find(str(path))
        assert not found.cores
        assert words in found.skipped[0][1]


def test_a_folder_without_end_is_not_searched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_cores, "_MAX_FILES", 2000)
    (tmp_path / "aaa").write_bytes(CORE)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0").write_text("x")
    for number in range(1, 2100):
        os.link(tmp_path / "data" / "0", tmp_path / "data" / str(number))
    began = time.monotonic()
    found = stored_cores.find(str(tmp_path))
    assert [Path(core).name for core in found.cores] == ["aaa"]
    assert "not searched completely: 2000 files read" in found.skipped[0][1]
    assert time.monotonic() - began < 12


def test_files_of_others_are_told(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can be another user")
    (tmp_path / "core.7").write_bytes(CORE)
    (tmp_path / "core.7").chmod(0o600)
    (tmp_path / "closed").mkdir(mode=0o700)
    tmp_path.chmod(0o755)
    # Entered before, because the folders above are root's own.
    program = (
        "import os, sys; from distdiag.facts.core import stored_cores; os.chdir(sys.argv[1]); os.seteuid(65534)\n"
        "for path, why in stored_cores.find('.').skipped: print(path, why)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout == "./core.7 Permission denied\n./closed Permission denied\n"


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a waiting program with a user, a directory and core limits."""
    running = []

    def start(folder: Path, core: tuple[int, int], user: int = 0, **env: str) -> subprocess.Popen[bytes]:
        one = subprocess.Popen(
            ["sleep", "60"],
            cwd=folder,
            env={**os.environ, **env},
            user=user or None,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, core),
        )
        running.append(one)
        # For a moment the new program's variables are not there yet.
        wait_until(lambda: Path(f"/proc/{one.pid}/environ").read_bytes() != b"", 10, lambda: "no environ")
        return one

    yield start
    for one in running:
        one.kill()
        one.wait()


@pytest.mark.parametrize(
    ("case", "id_"),
    [
        ("free", None),
        ("a file that is replaced", None),
        ("a file of another user", "setup-place"),
        ("a folder", "setup-place"),
        ("a closed folder", "setup-place"),
        ("a removed folder", "setup-place"),
        ("no limit left", "setup-limit"),
    ],
)
def test_what_is_said_of_a_crash_is_what_happens(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]], case: str, id_: str | None
) -> None:
    pattern = setup.read_pattern()
    if pattern is None or pattern.kind is not PatternKind.RELATIVE or pattern.unique:
        pytest.skip("only where core_pattern is a plain name can the name be taken")
    if os.geteuid():
        pytest.skip("only root can start a process of another user")
    folder = tmp_path / "here"
    folder.mkdir()
    core = folder / pattern.text
    user = 0
    if case == "a file that is replaced":
        core.write_text("")
    elif case == "a folder":
        core.mkdir()
    elif case == "a file of another user":
        user = NOBODY
        folder.chmod(0o1777)
        core.write_text("")
    elif case == "a closed folder":
        user = NOBODY
    process = started(folder, (0, 0) if case == "no limit left" else (resource.RLIM_INFINITY,) * 2, user)
    if case == "a removed folder":
        folder.rmdir()
    found = setup_findings({"n1": setup.read([process.pid])})
    process.send_signal(signal.SIGSEGV)
    process.wait(20)
    failed = [one.id.removeprefix("core-bt.") for one in found if one.level is Level.FAIL]
    assert failed == ([id_] if id_ else [])
    assert any(one.id == "core-bt.setup-ready" for one in found) is (id_ is None)
    assert (core.is_file() and core.stat().st_size > 0) is (id_ is None)
    if id_ is None:
        assert stored_cores.find(str(folder)).cores == (str(core),)


def test_a_rank_is_read_as_it_is(tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = started(tmp_path, (4096, 1 << 20), RANK="3", WORLD_SIZE="4", TORCHELASTIC_RUN_ID="job")
    Path(f"/proc/{process.pid}/coredump_filter").write_text("0x30", "utf-8")
    facts = setup.read([process.pid, 4_194_305])
    (rank,) = facts.ranks
    assert (rank.pid, rank.rank, rank.launchers[0]) == (process.pid, 3, "torchrun")
    assert rank.limits is not None
    assert (rank.limits.core, rank.limits.core_hard) == (4096, 1 << 20)
    assert rank.filter == 0x30
    assert 0 < (rank.memory_bytes or 0) < GIB
    assert facts.gone == (4_194_305,)
    assert facts.own.pid == os.getpid()
    assert facts.own.dumpable is True
    if rank.folder is not None:
        assert rank.folder.path == str(tmp_path)
        assert (rank.folder.free_bytes or 0) > 0
    by_id = {str(one.id): one for one in setup_findings({"n1": facts})}
    assert by_id["core-bt.setup-filter"].level is Level.FAIL
    assert by_id["core-bt.setup-gone"].level is Level.UNKNOWN
    if facts.pattern is not None and facts.pattern.kind in (PatternKind.RELATIVE, PatternKind.ABSOLUTE):
        limit = by_id["core-bt.setup-limit"]
        assert (limit.level, limit.where.ranks, limit.where.pids) == (Level.WARN, (3,), (process.pid,))
        assert limit.fix is not None
        assert limit.fix.commands[0].startswith(f"for pid in {process.pid}; do prlimit ")


def test_of_several_nodes_those_at_fault_are_named(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = started(tmp_path, (0, resource.RLIM_INFINITY))
    facts = setup.read([process.pid])
    found = [one for one in setup_findings({"n1": facts, "n2": facts}) if one.id == "core-bt.setup-limit"]
    healthy = replace(facts, ranks=tuple(replace(one, limits=None) for one in facts.ranks))
    alone = [one for one in setup_findings({"n1": facts, "n2": healthy}) if one.id == "core-bt.setup-limit"]
    assert [one.title.partition(":")[0] for one in (*found, *alone)] == ["all 2 hosts", "n1"][: len(found) + len(alone)]


def test_the_command_that_is_given_raises_the_limit(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    need("prlimit", "sh")
    process = started(tmp_path, (0, resource.RLIM_INFINITY))
    facts = setup.read([process.pid])
    if facts.pattern is None or facts.pattern.kind not in (PatternKind.RELATIVE, PatternKind.ABSOLUTE):
        pytest.skip("a program takes the cores here, and may not ask for the limit")
    (limit,) = [one for one in setup_findings({"n1": facts}) if one.id == "core-bt.setup-limit"]
    assert limit.fix is not None
    subprocess.run(["sh", "-c", limit.fix.commands[0]], check=True, timeout=20)
    assert resource.prlimit(process.pid, resource.RLIMIT_CORE)[0] == resource.RLIM_INFINITY


def test_a_process_that_changed_its_user_leaves_no_core(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can change its user")
    program = "import os, sys; os.setuid(65534); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        facts = setup.read([process.pid])
        process.communicate()
    assert facts.ranks[0].dumpable is False
    found = {one.id for one in setup_findings({"n1": facts}) if one.level is Level.FAIL}
    assert ("core-bt.setup-dumpable" in found) is (facts.suid_dumpable != 1)


def test_the_settings_of_systemd_are_read(tmp_path: Path) -> None:
    etc, usr = tmp_path / "etc/systemd/coredump.conf.d", tmp_path / "usr/lib/systemd/coredump.conf.d"
    etc.mkdir(parents=True)
    usr.mkdir(parents=True)
    assert setup.coredump_conf(str(tmp_path)) == CoredumpConf(keeps=True, most_bytes=None)
    (etc.parent / "coredump.conf").write_text("[Coredump]\n#Storage=none\nExternalSizeMax=2G\n")
    (usr / "50-site.conf").write_text("[Coredump]\nStorage=none\n")
    assert setup.coredump_conf(str(tmp_path)) == CoredumpConf(keeps=False, most_bytes=2 * GIB)
    (etc / "50-site.conf").write_text("[Coredump]\nExternalSizeMax=512M\n")
    assert setup.coredump_conf(str(tmp_path)) == CoredumpConf(keeps=True, most_bytes=GIB // 2)


def facts_with(pattern: str, **changes: object) -> setup.SetupFacts:
    """This process's facts, under another core_pattern, with no limit."""
    facts = setup.read([])
    own = replace(
        facts.own, limits=setup.Limits(None, None, None), folder=setup.CoreFolder("/x", True, True, 99 * GIB, 1)
    )
    own = replace(own, memory_bytes=GIB, launchers=(), unit="", filter=0x33)
    base = replace(facts, own=own, container="", handler_there=None, systemd=None, store=None)
    return replace(base, pattern=parse_pattern(pattern, uses_pid=False), **changes)  # type: ignore[arg-type]


def levels(facts: setup.SetupFacts) -> dict[str, Level]:
    return {one.id.removeprefix("core-bt."): one.level for one in setup_findings({"n1": facts})}


def test_who_takes_the_cores_decides_what_is_said() -> None:
    none = setup.Limits(0, 0, None)
    own = facts_with(SYSTEMD).own
    keeps, drops = CoredumpConf(keeps=True, most_bytes=None), CoredumpConf(keeps=False, most_bytes=None)
    small = CoredumpConf(keeps=True, most_bytes=1 << 20)
    limited = replace(own, limits=none)
    assert levels(facts_with("/var/crash/core.%p")) == {"setup-ready": Level.INFO}
    assert levels(facts_with("core")) == {"setup-overwrites": Level.WARN, "setup-ready": Level.INFO}
    assert levels(facts_with("|/bin/false")) == {"setup-pattern": Level.FAIL}
    assert levels(facts_with(SYSTEMD, handler_there=False)) == {"setup-handler": Level.FAIL}
    assert levels(facts_with(SYSTEMD, handler_there=True, systemd=keeps)) == {"setup-ready": Level.INFO}
    assert levels(facts_with(SYSTEMD, handler_there=True, systemd=drops)) == {"setup-handler": Level.FAIL}
    assert levels(facts_with(SYSTEMD, handler_there=True, systemd=small))["setup-handler"] is Level.WARN
    assert levels(facts_with(SYSTEMD, handler_there=True, own=limited)) == {"setup-limit": Level.FAIL}
    untold = SYSTEMD.replace("%c", "9223372036854775808")  # as Debian 12 has it
    assert levels(facts_with(untold, handler_there=True, own=limited)) == {"setup-ready": Level.INFO}
    assert levels(facts_with(APPORT, handler_there=True, own=limited))["setup-limit"] is Level.WARN
    assert "setup-limit" not in levels(
        facts_with("|/wsl-capture-crash %t %E %p %s", container="a container", own=limited)
    )
    assert levels(facts_with(SYSTEMD, container="Docker"))["setup-handler"] is Level.INFO
    assert levels(replace(facts_with("core"), pattern=None)) == {"setup-pattern": Level.UNKNOWN}
    assert levels(facts_with("core.%p", own=replace(own, limits=None))) == {"setup-unread": Level.UNKNOWN}


def test_the_same_on_many_nodes_is_said_once_and_commands_fit_who_may() -> None:
    own = facts_with("core").own
    limited = replace(own, limits=setup.Limits(0, 0, None), memory_bytes=60 * GIB, launchers=("srun",))
    nodes = {
        host: facts_with(
            "core", is_root=False, ranks=(replace(limited, pid=7, rank=rank), replace(limited, rank=rank + 1))
        )
        for host, rank in (("n1", 0), ("n2", 2))
    }
    found = {str(one.id): one for one in setup_findings(nodes)}
    limit, overwrites = found["core-bt.setup-limit"], found["core-bt.setup-overwrites"]
    assert (limit.where.hosts, limit.where.ranks, limit.where.pids) == (("n1", "n2"), (0, 1, 2, 3), ())
    assert "srun --propagate=CORE python train.py" in _commands(limit)
    assert "only root can raise it" in (limit.fix.text if limit.fix else "")
    assert overwrites.where.hosts == ("n1", "n2")
    assert "share a directory" in overwrites.detail
    assert _commands(overwrites) == ("echo 1 | sudo tee /proc/sys/kernel/core_uses_pid",)
    assert found["core-bt.setup-space"].level is Level.WARN
    assert not any("prlimit --pid 7" in command for command in _commands(limit))
    inside = facts_with("core", container="Kubernetes", may_set=False)
    assert all(not _commands(one) for one in setup_findings({"n1": inside}))


def _commands(finding: Finding) -> tuple[str, ...]:
    return finding.fix.commands if finding.fix else ()
