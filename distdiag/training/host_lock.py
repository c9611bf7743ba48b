"""A lock that the ranks of a job on one host share, that nobody waits for without end."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from threading import get_ident

from distdiag.node import private
from distdiag.training.whoami import label

PATIENCE_S = 5.0
"""How long to wait for a holder that writes nothing."""
_TURNS = 12
"""How many times that long to wait for holders that do write."""
_IMPATIENT_S = 30.0
"""How long not to wait at all after it was in vain."""
_LOOK_S = 0.25
_AT_ONCE = LOCK_EX | LOCK_NB
_JOB_NAMES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID")

NOTHING, THREADS, ALL = range(3)
"""What `take` got: nothing, the lock among this process's threads only, the lock of the host."""


class HostLock:
    """flock on a descriptor that is kept, and a lock among threads, which share that descriptor.

    The file is in a directory of the user's own below the temporary one, named after the job, and stays there: who
    removed it would leave the others with a lock that the next one does not see.
    """

    def __init__(self) -> None:
        self._start()
        self._told = False
        # The open file description is shared with a child, and with it the lock: a child needs one of its own.
        os.register_at_fork(after_in_child=self._after_fork)

    def take(self) -> int:
        """Get the lock, or go without it after a while; gives what `give` is to be given."""
        if not self._threads.acquire(False) and not self._wait_for_thread():
            return NOTHING
        self._owner = get_ident()
        if self._file < 0 and not self._open():
            return THREADS
        try:
            flock(self._file, _AT_ONCE)
        except BlockingIOError:
            try:
                return ALL if self._wait_for_process() else THREADS
            except BaseException:  # Ctrl-C, while waiting
                self.give(THREADS)
                raise
        except OSError as error:
            self._fail(f"{self._path}: {error.strerror}")
            return THREADS
        return ALL

    def give(self, taken: int) -> None:
        """Let go of what `take` got."""
        if taken == NOTHING:
            return
        if taken == ALL:
            flock(self._file, LOCK_UN)
        self._owner = 0
        self._threads.release()

    def _start(self) -> None:
        self._threads = threading.Lock()
        self._owner = 0
        self._file = -1
        self._path = ""
        self._usable = True
        self._impatient_until = 0.0

    def _after_fork(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._start()

    def _open(self) -> bool:
        if self._usable:
            try:
                self._file, self._path = _open_file()
            except OSError as error:
                self._fail(f"{error.filename}: {error.strerror}")
        return self._usable

    def _fail(self, why: str) -> None:
        self._usable = False
        self._tell(f"no lock among the processes of this host, {why}")

    def _wait_for_thread(self) -> bool:
        # A signal handler that prints while this very thread is printing would wait for itself.
        if self._owner == get_ident():
            return False
        return self._threads.acquire(timeout=PATIENCE_S)

    def _wait_for_process(self) -> bool:
        """Try again and again: waiting inside of flock has no limit. False if the holder does nothing."""
        now = time.monotonic()
        if now < self._impatient_until:
            return False
        last, give_up, look = now + _TURNS * PATIENCE_S, now + PATIENCE_S, now + _LOOK_S
        doing, pause = _doing(_holder(self._file)), 0.0001
        while now < min(last, give_up):
            time.sleep(pause)
            with contextlib.suppress(BlockingIOError):
                flock(self._file, _AT_ONCE)
                return True
            now, pause = time.monotonic(), min(2 * pause, 0.005)
            if now >= look:
                was, doing, look = doing, _doing(_holder(self._file)), now + _LOOK_S
                give_up = give_up if was == doing else now + PATIENCE_S
        self._impatient_until = now + _IMPATIENT_S
        self._tell(f"waited {PATIENCE_S:g} s for {_describe(_holder(self._file))}, so lines are printed without it now")
        return False

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            # Without a stderr the job goes on all the same.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"{label()} distdiag printflock: {what}; they may be torn\n")
                sys.stderr.flush()


def _open_file() -> tuple[int, str]:
    """Open the lock file of this job. Raises OSError."""
    job = next((os.environ[name] for name in _JOB_NAMES if os.environ.get(name)), "job")
    name = re.sub(r"[^\w.-]", "_", job)[:64] + ".lock"
    # tempfile would choose the working directory in the end, which many nodes may share.
    folders = [folder for folder in (os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm") if os.path.isabs(folder)]
    for folder in folders:
        path = os.path.join(folder, f"distdiag-printflock-{os.getuid()}")
        try:
            return _open_in(path, name), os.path.join(path, name)
        except OSError:
            if folder == folders[-1]:
                raise
    raise AssertionError("unreachable")


def _open_in(folder: str, name: str) -> int:
    # Whoever else had made this directory could hold the lock for ever.
    directory = private.open_folder(folder, own=True)
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    finally:
        os.close(directory)


def _holder(file: int) -> int | None:
    """Find who has the lock in /proc/locks; None where the kernel does not tell."""
    inode = f":{os.fstat(file).st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            words = line.split()
            if words[1] == "FLOCK" and words[5].endswith(inode) and int(words[4]) > 0:
                return int(words[4])
    return None


def _doing(pid: int | None) -> tuple[int | None, str]:
    """Read the holder and how much it has written: while that changes, the lock goes round."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/io", encoding="ascii") as counters:
        return pid, counters.read()
    return pid, ""


def _describe(pid: int | None) -> str:
    from distdiag.node import procs
    from distdiag.node.identity import identify

    if pid is None:
        return "the lock"
    identity, proc = identify(procs.variables(pid) or {}), procs.read(pid)
    rank = "" if identity is None else f" of rank {identity.rank}"
    state = " and stands still (stopped)" if proc is not None and proc.state in "tT" else ""
    return f"process {pid}{rank}, which has the lock{state}"
