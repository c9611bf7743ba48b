"""Passes words between the processes of a job through their process manager (MPICH's Hydra, Intel MPI).

This is the wire protocol of PMI-1: lines of key=value over the descriptor in PMI_FD. Source: "PMI-1 wire protocol" in
MPICH's developer documentation. For Open MPI and SLURM see `distdiag.launch.rank0_discovery`.
"""

from __future__ import annotations

import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_LINE = 4096


class PmiFailed(Exception):
    """The process manager did not answer, or not as expected."""


def share(environ: Mapping[str, str], words: str | None, *, timeout_s: float) -> str:
    """Return the words of rank 0, which passes `words` (without spaces), the others None. Blocks until all call it.

    Raises:
        PmiFailed: no PMI process manager, or no answer in time.
    """
    try:
        return _Manager(int(environ["PMI_FD"]), time.monotonic() + timeout_s).share(words)
    except (KeyError, ValueError, OSError) as error:
        raise PmiFailed(str(error)) from error


class _Manager:
    def __init__(self, fd: int, deadline: float) -> None:
        self._fd = fd
        self._deadline = deadline
        self._unread = b""

    def share(self, words: str | None) -> str:
        self._ask("cmd=init pmi_version=1 pmi_subversion=1", "response_to_init")
        space = self._ask("cmd=get_my_kvsname", "my_kvsname")["kvsname"]
        if words is not None:
            self._ask(f"cmd=put kvsname={space} key=distdiag value={words}", "put_result")
        self._ask("cmd=barrier_in", "barrier_out")
        heard = self._ask(f"cmd=get kvsname={space} key=distdiag", "get_result").get("value", "")
        # Without this the manager takes our exit for a crash.
        self._ask("cmd=finalize", "finalize_ack")
        return heard

    def _ask(self, line: str, answer: str) -> dict[str, str]:
        os.write(self._fd, line.encode() + b"\n")
        said = self._read_line()
        fields = dict(word.partition("=")[::2] for word in said.split())
        if fields.get("cmd") != answer or fields.get("rc", "0") != "0":
            raise PmiFailed(f"{line.partition(' ')[0]} was answered by {said[:100]!r}")
        return fields

    def _read_line(self) -> str:
        while b"\n" not in self._unread:
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([self._fd], [], [], left)[0]:
                raise PmiFailed("the process manager did not answer in time")
            data = os.read(self._fd, _MAX_LINE)
            if not data or len(self._unread) > _MAX_LINE:
                raise PmiFailed("the process manager closed the connection")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode("ascii", "replace")
