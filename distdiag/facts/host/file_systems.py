"""Free space of file systems, each queried on a separate thread with a deadline.

A mount whose server died blocks every caller, often forever: it only loses its own result, and is named.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from functools import partial

from distdiag.facts import deadlines, machine
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NETWORK = (
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "wekafs", "glusterfs", "pvfs2", "orangefs"),
    *("afs", "9p", "virtiofs", "fuse", "fuseblk", "panfs"),
)
"""Types with remote files, or served by a program: /proc/mounts, third column."""
_NO_FILES = ("fuse.lxcfs", "fuse.portal", "fuse.gvfsd-fuse", "fuse.snapfuse")
_MOST_MOUNTS = 64
NO_ANSWER = "no answer"
"""Prefix of `error` for a file system that did not answer in time."""


@record
class Space:
    """A file system: total bytes, bytes free for users, and inodes (0: not counted).

    `kind` and `source` as in /proc/mounts, empty if unknown. `error`: why it could not be read.
    """

    path: str
    total_bytes: int = 0
    free_bytes: int = 0
    inodes: int = 0
    free_inodes: int = 0
    kind: str = ""
    source: str = ""
    read_only: bool = False
    no_exec: bool = False
    error: str = ""


@record
class Mount:
    """A line of /proc/mounts."""

    source: str
    path: str
    kind: str


def spaces(paths: Iterable[str], *, patience_s: float) -> list[Space]:
    """Read the file systems of paths in parallel; `error` marks those late."""
    wanted = list(dict.fromkeys(paths))
    table = mounts()
    found, late = deadlines.together({path: partial(_read, path) for path in wanted}, patience_s=patience_s)
    silent = {path: Space(path, error=f"{NO_ANSWER} within {patience_s:g} s") for path in late}
    return [_with_mount({**silent, **found}[path], table) for path in wanted]


def network_mounts() -> list[str]:
    """List the mount points of network file systems."""
    return [mount.path for mount in mounts() if is_network(mount)][:_MOST_MOUNTS]


def is_network(mount: Mount) -> bool:
    """Return whether its files are remote, or served by a program."""
    return mount.kind.partition(".")[0] in _NETWORK and mount.kind not in _NO_FILES


def mounts() -> list[Mount]:
    """Read /proc/self/mounts, keeping the last mount on a path. No file system is accessed."""
    lines = (line.split(" ") for line in machine.read_text("/proc/self/mounts").splitlines())
    found = {_plain(words[1]): Mount(_plain(words[0]), _plain(words[1]), words[2]) for words in lines if len(words) > 3}
    return list(found.values())


def useful_folders(environment: Mapping[str, str]) -> list[str]:
    """List the folders that every job writes to: for temporary files, the home, and caches named by variables."""
    home = environment.get("HOME") or os.path.expanduser("~")
    named = (
        *("TMPDIR", "XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"),
        *("TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"),
    )
    given = [environment[name] for name in named if environment.get(name, "").startswith("/")]
    return list(dict.fromkeys(["/tmp", home, *given]))


def _read(path: str) -> Space:
    try:
        found = os.statvfs(path)
        if not stat.S_ISDIR(os.stat(path).st_mode):
            return Space(path, error="not a folder")
    except OSError as error:
        return Space(path, error=error.strerror or str(error))
    return Space(
        path,
        total_bytes=found.f_blocks * found.f_frsize,
        free_bytes=found.f_bavail * found.f_frsize,
        inodes=found.f_files,
        free_inodes=found.f_favail,
        read_only=bool(found.f_flag & os.ST_RDONLY),
        no_exec=bool(found.f_flag & os.ST_NOEXEC),
    )


def _with_mount(space: Space, table: list[Mount]) -> Space:
    """Add the mount, by the longest parent path: without resolving symbolic links, which may block."""
    above = [
        mount for mount in table if space.path == mount.path or space.path.startswith(mount.path.rstrip("/") + "/")
    ]
    mount = max(above, key=lambda mount: len(mount.path), default=None)
    if mount is None:
        return space
    return replace(space, kind=mount.kind, source=mount.source)


def _plain(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
