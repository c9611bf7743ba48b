"""Runs the real distdiag like a user, and finds its leftovers."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Set

PROGRAM = str(Path(sys.executable).with_name("distdiag"))
_MARK = "DISTDIAG_TEST_RUN"
_running: list[Running] = []
"""Those that were started and are not closed yet."""


def need(*tools: str) -> None:
    """Skip where a tool is missing; fail where all of them are promised."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing and os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
        pytest.fail(f"required here and not installed: {', '.join(missing)}")
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def need_root() -> None:
    """Skip where a process of another user cannot be made; fail where it is promised."""
    if os.geteuid() and os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
        pytest.fail("required here: root")
    if os.geteuid():
        pytest.skip("not root: no process of another user can be made")


def need_mounts() -> None:
    """Skip where a private mount namespace cannot be made; fail where it is promised."""
    need("unshare", "mount")
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False, timeout=10)
    if tried.returncode and os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
        pytest.fail(f"required here: unshare -m: {tried.stderr.decode()}")
    if tried.returncode:
        pytest.skip("no right to make a mount namespace")


@dataclass
class Result:
    """What a finished distdiag left."""

    code: int
    out: str
    err: str
    stderr_lines: list[tuple[float, str]]
    ended_at: float

    @property
    def report(self) -> dict[str, Any]:
        """The one JSON document on stdout; nothing else may be there."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def findings(self) -> dict[str, dict[str, Any]]:
        """Findings by the last part of their id, without the remarks on untested parts."""
        found = self.report["findings"]
        return {one["id"].partition(".")[2]: one for one in found if one["level"] != "info"}

    @property
    def statuses(self) -> list[str]:
        """Status of each rank, in order."""
        return [rank["status"] for rank in self.report["data"]["ranks"]]

    @property
    def seconds_after_last_news(self) -> float:
        """Time from the last stage that all ranks reached to the end of the program."""
        return self.ended_at - max(at for at, line in self.stderr_lines if "all ranks" in line)


class Running:
    """A distdiag under way; its stderr is read line by line as it comes."""

    before: Set[str] = frozenset()
    """Processes that were there before it: not looked at, as hundreds of them cost more than some runs do."""
    is_gone = False
    """Whether nothing of it lives on."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()) -> None:
        self.mark = uuid.uuid4().hex
        self.before = set(os.listdir("/proc"))
        self.process = subprocess.Popen(
            [*wrap, PROGRAM, *arguments],
            env={**os.environ, "COLUMNS": "80", **(env or {}), _MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _running.append(self)
        self.stderr_lines: list[tuple[float, str]] = []
        self._news = threading.Condition()
        self._over = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def wait_for(self, text: str, timeout: float = 40) -> str:
        """Wait until a line on stderr has this text; that is the handshake of a test."""
        deadline = time.monotonic() + timeout
        with self._news:
            while time.monotonic() < deadline:
                for _, line in self.stderr_lines:
                    if text in line:
                        return line
                if self._over:
                    break
                self._news.wait(0.2)
        raise AssertionError(f"{text!r} was never said; it said {self.stderr_lines}")

    def pid_of_rank(self, rank: int) -> int:
        """Read a rank's process id from the progress lines."""
        match = re.search(rf"[ ,]{rank}=(\d+)", self.wait_for("start: all ranks").replace("(pids", ""))
        assert match is not None
        return int(match[1])

    def finish(self, timeout: float = 90) -> Result:
        """Wait for the end; nothing of it may live on."""
        assert self.process.stdout is not None
        try:
            out = self.process.stdout.read()
            code = self.process.wait(timeout)
            ended = time.monotonic()
            with self._news:
                self._news.wait_for(lambda: self._over, 10)
            wait_until(lambda: not self.left_behind(), 15, lambda: f"left behind: {self.left_behind()}")
            self.is_gone = True
        finally:
            self.close()
        return Result(code, out, "".join(line for _, line in self.stderr_lines), self.stderr_lines, ended)

    def left_behind(self) -> list[str]:
        """List processes, other than distdiag itself, that carry this run's mark."""
        found = []
        for name in os.listdir("/proc"):
            if not name.isdigit() or name in self.before or int(name) == self.process.pid:
                continue
            try:
                if f"{_MARK}={self.mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(f"{name}: {Path(f'/proc/{name}/cmdline').read_bytes()[-60:]!r}")
            except OSError:
                continue
        return found

    def close(self) -> None:
        """End it and let go of its pipes, if that has not been done."""
        if self not in _running:
            return
        _running.remove(self)
        assert self.process.stdout is not None
        self.kill_all()
        self._listener.join(10)
        self.process.stdout.close()

    def kill_all(self) -> None:
        """End all remaining processes."""
        left = [] if self.is_gone else self.left_behind()
        alive = [self.process.pid] if self.process.poll() is None else []  # its number may be another's afterwards
        for pid in [*alive, *(int(line.partition(":")[0]) for line in left)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr:
            for line in self.process.stderr:
                with self._news:
                    self.stderr_lines.append((time.monotonic(), line))
                    self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()


def close_all() -> None:
    """End what a test that failed did not; an open pipe of it would be the failure of another, innocent test."""
    for one in _running[:]:
        one.close()


def distdiag(*arguments: str, env: dict[str, str] | None = None, wrap: tuple[str, ...] = ()) -> Result:
    """Run distdiag to its end."""
    return Running(*arguments, env=env, wrap=wrap).finish()


def unread(pipe: IO[bytes] | None) -> int:
    """Return the number of bytes in a pipe."""
    assert pipe is not None
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def wait_until(met: Callable[[], bool], timeout: float, otherwise: Callable[[], str]) -> None:
    """Wait for a condition, or fail with the current state."""
    deadline = time.monotonic() + timeout
    while not met():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)
