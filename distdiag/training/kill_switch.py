"""A file that ends a job cleanly at its next step, on all ranks together.

For users with write access to a folder but no right to cancel the job. Only rank 0 reads the file, and a reduction of
one number broadcasts the result: nodes with stale views of a shared file system cannot disagree.
"""

from __future__ import annotations

import contextlib
import os
import sys

from distdiag.facts.process.rank_identity import own_label, own_rank, torch_distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_REASON_BYTES = 1000


def read_reason(path: str) -> str | None:
    """Return the first line of the file as the reason; None if the file does not exist.

    The folder is listed first and the file is reopened: NFS revalidates cached attributes on open, and listing the
    folder drops a cached "no such file".

    Raises:
        OSError: it exists but cannot be read.
    """
    folder, name = os.path.split(os.path.abspath(path))
    with contextlib.suppress(OSError):  # a folder that may be entered but not listed
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.listdir(descriptor)
        finally:
            os.close(descriptor)
    try:
        # A pipe under that name must not block the job.
        file = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        text = os.read(file, MOST_REASON_BYTES)
    finally:
        os.close(file)
    lines = text.decode("utf-8", "replace").split("\n")
    return "".join(letter for letter in lines[0] if letter.isprintable()).strip()


class KillSwitch:
    """Ask at every step whether the job is to end: `if switch.is_on(): break`.

    Every rank must call `is_on` at the same place of the same step. It costs one reduction of one number, and on rank 0
    the opening of a file.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 1, group: Any = None) -> None:  # noqa: ANN401
        """Watch `path`.

        Args:
            path: the file of `distdiag kill-switch on PATH`; only rank 0's node must see it.
            every: check only every N-th call; the same on all ranks.
            group: the process group that steps together; None: all ranks.

        Raises:
            ValueError: `every` is below 1.
        """
        if every < 1:
            raise ValueError(f"every={every}: must be 1 or more")
        self.path = os.path.abspath(path)
        self.reason = ""
        """Reason for the stop, on the rank that read the file; empty on the others."""
        self._every, self._group, self._calls, self._on = every, group, 0, False
        self._reported_error = False

    def is_on(self) -> bool:
        """Return whether all ranks are to stop now; all of them get the same answer."""
        if self._on:
            return True
        self._calls += 1
        if self._calls % self._every:
            return False
        dist = torch_distributed()
        first = dist is None or dist.get_rank(self._group) == 0
        self._on = _agree(first and self._look(), dist, self._group)
        if self._on and first:
            because = f": {self.reason}" if self.reason else ""
            _log(f"kill switch {self.path} is on, all ranks stop at this step{because}")
        return self._on

    def _look(self) -> bool:
        try:
            reason = read_reason(self.path)
        except OSError as error:
            # A transient I/O error must not end a job of weeks.
            if not self._reported_error:
                self._reported_error = True
                _log(f"cannot read kill switch {self.path}: {error.strerror}; the job goes on")
            return False
        self.reason = reason or ""
        return reason is not None


def _agree(mine: bool, dist: Any, group: Any) -> bool:  # noqa: ANN401 - torch.distributed and a group of it
    """Return rank 0's answer: all others contribute 0 to the maximum."""
    if dist is None or dist.get_world_size(group) == 1:
        return mine
    from distdiag.training.overflow.ranks import greatest  # imports torch, which is loaded by now

    return greatest([int(mine)], dist.group.WORLD if group is None else group) == [1]


def _log(text: str) -> None:
    label = "" if own_rank() is None else f"{own_label()} "
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed: no reason to fail
        sys.stderr.write(f"{label}distdiag: {text}\n")
        sys.stderr.flush()
