"""Errors of a thread's calls, folded; and which are worth to be looked at."""

from __future__ import annotations

import os
import re

from distdiag.facts.strace.types import CallError

_REPORTED = 200
"""The gravest of each thread are reported."""
_MAX_HELD = 4000
"""More different errors are not kept at a time."""
_MAX_PLACES = 1000
_NAME_MAX = 255
"""No file can have a longer name."""
_MAX_FOUND = 100_000
"""Limit on remembered names of found files."""
_WEIGHTS = {
    **dict.fromkeys(("ENOSPC", "EDQUOT", "EIO", "ESTALE", "EROFS", "EMFILE", "ENFILE", "ENOMEM", "EUCLEAN"), 10),
    **dict.fromkeys(("ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH", "ECONNRESET", "EADDRINUSE", "EADDRNOTAVAIL"), 8),
    **dict.fromkeys(("EACCES", "EPERM", "ECONNREFUSED", "EPIPE", "ENOEXEC", "ECONNABORTED", "ENODEV"), 7),
}
_USUAL = {
    **dict.fromkeys(("EAGAIN", "EWOULDBLOCK", "EINTR", "EINPROGRESS", "EALREADY", "ENOTTY"), ""),
    **{"ETIMEDOUT": "futex|rt_sigtimedwait.*|mq_.*", "ECHILD": "wait.*", "ESRCH": "t?g?kill", "ESPIPE": "lseek"},
    **{"EINVAL": "readlink.*|prctl|arch_prctl", "EEXIST": "mkdir.*|epoll_ctl", "ENODATA": ".*xattr.*"},
    **{"ENOTSUP": ".*xattr.*", "EOPNOTSUPP": ".*xattr.*"},
}
"""What well-made programs get all day: the error, and of which calls; of all where none are named."""
# Paths probed by glibc's loader and Python's import system, present or not.
_TRIED = re.compile(
    r"ld\.so\.(?:preload|nohwcap)|pyvenv\.cfg|pybuilddir\.txt|.*\._pth|python\d+\.zip|.*\.(?:cpython|pypy)\d*-.*\.so"
    r"|.*\.abi\d\.so|.*\.py[co]?|__pycache__|.*\.pth|haswell|avx512_1|x86_64|tls|glibc-hwcaps|x86-64-v\d"
    r"|.*\.mo|locale.*|gconv-modules.*|nscd|__init__.*|nsswitch\.conf|\.terminfo"
)
_LIBRARY = re.compile(r".*\.so(?:\.[\w.]+)?")
_DATA = re.compile(
    r".*\.(?:conf|cfg|ini|ya?ml|json|toml|xml|txt|csv|pth?|ckpt|safetensors|bin|model|idx|tar|npy|npz|h5|parquet|arrow|lmdb"
    r"|db|tfrecords?|jsonl|jpe?g|png|zip|gz|zst|env|sh|pem|crt|key)|.*rc|.*config.*"
)
_DEVICES = ("/dev/nvidia", "/dev/infiniband", "/dev/kfd", "/dev/dri", "/dev/shm")


class Errors:
    """Errors of one thread, folded: the same one often, the same name in many folders."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str, str], _Held] = {}
        self._found: set[str] = set()

    def found(self, path: str) -> None:
        """Remember that a file was there: not to find its name elsewhere was the way to it, and no error."""
        if len(self._found) < _MAX_FOUND:
            self._found.add(os.path.basename(path))

    def add(self, name: str, error: str, target: str) -> None:
        """Count an error of a call on `target`, unless it is usual."""
        if is_usual(name, error):
            return
        missing = error in ("ENOENT", "ENOTDIR") and name != "connect"
        # One search may use several calls, so the call is not part of the key.
        key = ("", error, os.path.basename(target)) if missing else (name, error, target)
        held = self._held.get(key)
        if held is None:
            if len(self._held) >= _MAX_HELD:
                self._held = dict(sorted(self._held.items(), key=_rank)[: _MAX_HELD // 2])
            held = self._held[key] = _Held(name, weight(name, error, target))
        held.count += 1
        if missing and len(held.places) < _MAX_PLACES:
            held.places.add(target)

    def gravest(self) -> tuple[CallError, ...]:
        """Return the errors to report, the gravest first, without the probably harmless."""
        rows = []
        for (_, error, target), held in sorted(self._held.items(), key=_rank):
            if held.weight > 1 and not (held.places and target in self._found):
                only = next(iter(held.places)) if len(held.places) == 1 else target
                rows.append(CallError(held.name, error, only, max(1, len(held.places)), held.count, held.weight))
        return tuple(rows[:_REPORTED])


class _Held:
    def __init__(self, name: str, weight: int) -> None:
        self.name = name
        self.weight = weight
        self.count = 0
        self.places: set[str] = set()


def _rank(item: tuple[tuple[str, str, str], _Held]) -> tuple[int, int, str]:
    """Sort key: the gravest error first, then the most frequent."""
    return -item[1].weight, -item[1].count, item[0][2]


def is_usual(name: str, error: str) -> bool:
    """Return whether a call's error is routine."""
    if error.startswith("ERESTART"):
        return True
    calls = _USUAL.get(error)
    return calls is not None and (not calls or re.fullmatch(calls, name) is not None)


def weight(name: str, error: str, target: str) -> int:
    """Return how grave an error is: from 10 (such as a full or broken disk) to 1 (probably harmless)."""
    if error in ("ENOENT", "ENOTDIR", "ENXIO"):
        base = os.path.basename(target)[-_NAME_MAX:]
        if _TRIED.fullmatch(base) or "/nscd/" in target:
            return 1
        if _LIBRARY.fullmatch(base) or target.startswith(_DEVICES):
            return 6
        return 4 if _DATA.fullmatch(base) and not target.startswith(("/proc/", "/sys/")) else 2
    if error == "ETIMEDOUT" and name not in ("connect", "recvfrom", "recvmsg", "read", "sendto", "sendmsg", "write"):
        return 1
    return _WEIGHTS.get(error, 1)
