"""Lock files left by torch's builds of extensions: a process waiting for one polls for its removal forever.

The path polled by a thread cannot be read from outside without a tracer: between two tries it is neither in a system
call nor in an open file, and Python's local variables are not read. `trace sys` sees it.
"""

from __future__ import annotations

import glob
import os

from distdiag.facts import deadlines
from distdiag.facts.process import process_counters, procs

_PATIENCE_S = 2.0
_LOCK = "lock"
"""The file name used by torch.utils.cpp_extension's FileBaton."""


def stale_build_locks(pid: int) -> list[str]:
    """List the locks in a process's torch_extensions folder that no process here has open. Paths are in its own mounts.

    An extension's builder keeps its lock open until it removes it. A builder on another host, with a shared folder, is
    not visible, so the lock may be in use there. Empty if the folder cannot be read, or does not answer.
    """
    found, _ = deadlines.each([pid], _locks, patience_s=_PATIENCE_S)
    locks = found.get(pid, [])
    if not locks:
        return []
    held = _open_locks()
    return [path for path in locks if _tail(path) not in held]


def _locks(pid: int) -> list[str]:
    root = f"/proc/{pid}/root"
    names = procs.cache_folders(pid)
    folder = names.get("TORCH_EXTENSIONS_DIR", "")
    if folder:
        pattern = f"*/{_LOCK}"
    else:  # one folder per Python and CUDA, "py312_cu126", with one per extension
        cache = names.get("XDG_CACHE_HOME") or f"{names.get('HOME', '')}/.cache"
        folder, pattern = f"{cache}/torch_extensions", f"*/*/{_LOCK}"
    if not folder.startswith("/"):
        return []
    return sorted(path[len(root) :] for path in glob.glob(f"{glob.escape(root + folder)}/{pattern}"))


def _open_locks() -> set[str]:
    """Return the path tails of all locks open here, as containers have different paths for the same file."""
    found: set[str] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = process_counters.links(int(name))
        except PermissionError:
            continue
        found.update(_tail(link) for link in links.values() if link.endswith(f"/{_LOCK}"))
    return found


def _tail(path: str) -> str:
    """Return extension and lock: "fused_adam/lock"."""
    return "/".join(path.split("/")[-2:])
