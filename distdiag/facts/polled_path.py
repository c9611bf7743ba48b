"""Lock files that torch's builds of extensions left: a process that waits for one polls for its removal, for ever.

The path that a thread polls for cannot be read from outside without a tracer: between two tries it is neither in a
system call nor in an open file, and Python's local variables are not read. `trace sys` sees it.
"""

from __future__ import annotations

import glob
import os

from distdiag.facts import deadlines, process_counters, procs

_PATIENCE_S = 2.0
_LOCK = "lock"
"""The name that torch.utils.cpp_extension gives to its FileBaton."""


def stale_build_locks(pid: int) -> list[str]:
    """List the locks in a process's torch_extensions folder that no process here has open. Paths are in its own mounts.

    The builder of an extension keeps its lock open until it removes it. One on another host, in a folder that hosts
    share, cannot be seen: there the lock may be in use. Empty where the folder cannot be read, or does not answer.
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
    else:  # one folder for each Python and CUDA, "py312_cu126", and below it one for each extension
        cache = names.get("XDG_CACHE_HOME") or f"{names.get('HOME', '')}/.cache"
        folder, pattern = f"{cache}/torch_extensions", f"*/*/{_LOCK}"
    if not folder.startswith("/"):
        return []
    return sorted(path[len(root) :] for path in glob.glob(f"{glob.escape(root + folder)}/{pattern}"))


def _open_locks() -> set[str]:
    """Return the ends of the paths of all locks that are open here: containers name the same file differently."""
    found: set[str] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = process_counters.links(int(name))
        except PermissionError:
            continue
        found.update(_tail(link) for link in links.values() if link.endswith(f"/{_LOCK}"))
    return found


def _tail(path: str) -> str:
    """Return the extension and the lock: "fused_adam/lock"."""
    return "/".join(path.split("/")[-2:])
