"""Writes the flight recorder's dump of this rank from the training script: with Gloo, torch writes none.

The file is PyTorch's own pickle with rank, host and the members of the process groups added.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
import time

from distdiag.facts import private_files
from distdiag.facts.machine import host_name
from distdiag.facts.process.rank_identity import own_rank, torch_distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_POLL_S = 1.0
_SETTLES_S = 0.05
"""Delay until another torch thread has marked a just completed operation."""
_started: set[str] = set()
_errors: list[str] = []
"""The first error, repeated in later dumps."""


def dump_flight_recorder(folder: str, *, when_stuck_s: float | None = None) -> str:
    """Write this rank's flight recorder entries to `folder/rank_N`, and return the path.

    Args:
        folder: directory shared by all ranks; created if it does not exist.
        when_stuck_s: do not write now, but each time no collective has made progress for this many seconds, when the
            script raises, and on `distdiag flight-recorder --trigger FOLDER`. A thread does this, even while the
            script is blocked in a collective.

    A dump written while an exception is handled records the exception: Gloo marks failed operations as ended.

    Raises:
        RuntimeError: torch.distributed is not initialised, or this build of torch has no flight recorder.
        OSError: the file cannot be written.
    """
    if torch_distributed() is None:
        raise RuntimeError("dump_flight_recorder: call torch.distributed.init_process_group first")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(os.path.abspath(folder), f"rank_{own_rank()}")
    if when_stuck_s is None:
        time.sleep(_SETTLES_S)
        private_files.write_whole(path, _dump(sys.exc_info()[1]))
    elif path not in _started:
        _started.add(path)
        _Watch(path, when_stuck_s).start()
    return path


def _dump(error: BaseException | None) -> bytes:
    dist = torch_distributed()
    recorder = getattr(sys.modules["torch"]._C._distributed_c10d, "_dump_fr_trace", None)
    if recorder is None:
        recorder = getattr(sys.modules["torch"]._C._distributed_c10d, "_dump_nccl_trace", None)
    if dist is None or recorder is None:
        raise RuntimeError("dump_flight_recorder: this build of torch has no flight recorder")
    document = pickle.loads(recorder(includeCollectives=True, includeStackTraces=True, onlyActive=False))
    configured = document.setdefault("pg_config", {})
    configured.pop("", None)
    world = dist.distributed_c10d._world
    for group, ranks in list(world.pg_group_ranks.items()):
        name = world.pg_names.get(group, "")
        if not name:
            continue  # this rank is no member
        members = [member for member, _ in sorted(ranks.items(), key=lambda item: item[1])]
        configured.setdefault(name, {"name": name, "desc": getattr(group, "group_desc", ""), "ranks": str(members)})
    document["distdiag_rank"] = dist.get_rank()
    document["distdiag_world_size"] = dist.get_world_size()
    document["distdiag_host"] = host_name()
    document["distdiag_dumped_ns"] = time.time_ns()
    if error is not None and not _errors:
        _errors.append(f"{type(error).__name__}: {error}"[:300])
    if _errors:
        document["distdiag_error"] = _errors[0]
    return pickle.dumps(document, protocol=4)


class _Watch(threading.Thread):
    """Writes the dump on a request through the pipe, or when no operation has progressed for `stuck_s`."""

    def __init__(self, path: str, stuck_s: float) -> None:
        super().__init__(name="distdiag-flight-recorder", daemon=True)
        self._path, self._stuck_s = path, stuck_s
        self._pipe_path = f"{path}.pipe"
        if os.path.lexists(self._pipe_path):
            os.unlink(self._pipe_path)
        os.mkfifo(self._pipe_path, 0o600)
        self._pipe = os.open(self._pipe_path, os.O_RDWR | os.O_NONBLOCK)
        self._hook = sys.excepthook
        sys.excepthook = self._raised

    def run(self) -> None:
        """Poll once a second; write at most once per stall."""
        seen: Any = None
        since, written = time.monotonic(), False
        while torch_distributed() is not None:
            ready, _, _ = select.select([self._pipe], [], [], min(_POLL_S, self._stuck_s / 2))
            try:
                if ready:
                    os.read(self._pipe, 4096)
                    private_files.write_whole(self._path, _dump(None))
                now = self._progress()
                if now != seen:
                    seen, since, written = now, time.monotonic(), False
                elif not written and now[1] and time.monotonic() - since >= self._stuck_s:
                    written = True
                    private_files.write_whole(self._path, _dump(None))
            except (OSError, RuntimeError):
                continue  # disk full for now; group being destroyed
        os.close(self._pipe)

    def _progress(self) -> tuple[int, int]:
        """Return the newest record id and the number of unfinished operations."""
        module = sys.modules["torch"]._C._distributed_c10d
        recorder = getattr(module, "_dump_fr_trace", None) or module._dump_nccl_trace
        entries = pickle.loads(recorder(includeCollectives=True, includeStackTraces=False, onlyActive=True)).get(
            "entries", []
        )
        return max((entry["record_id"] for entry in entries), default=-1), len(entries)

    def _raised(self, kind: Any, error: BaseException, trace: Any) -> None:  # noqa: ANN401 - as sys.excepthook
        try:
            private_files.write_whole(self._path, _dump(error))
        except (OSError, RuntimeError):
            pass
        finally:
            self._hook(kind, error, trace)
