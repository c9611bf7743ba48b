"""Versions of the libraries mapped by a process, read from their files, without importing or running any.

Files are opened as the process sees them (/proc/PID/root), so those of a container are its own. Standard library only.
"""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import field

from distdiag.facts import deadlines, machine
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK = 8 * 2**20
_OVERLAP = 256
_MOST_BYTES = 768 * 2**20
_MOST_MAPS_BYTES = 16 * 2**20
_SEARCH_S = 4.0
_MAPS_S = 2.0
_FILES = {
    "nccl": re.compile(r"libnccl\.so[.\d]*"),
    "rccl": re.compile(r"librccl\.so[.\d]*"),
    "driver": re.compile(r"libcuda\.so[.\d]*"),
    "glibc": re.compile(r"libc(?:\.so\.6|-2\.\d+\.so)"),
    "torch": re.compile(r"libtorch_cpu\.so"),
    "ucx": re.compile(r"libucp(?:-[0-9a-f]{8})?\.so[.\d]*"),
    "aws-ofi-nccl": re.compile(r"libnccl-net(?:-\w+)?\.so[.\d]*"),
    "nvshmem": re.compile(r"libnvshmem_host\.so[.\d]*"),
    "deep-ep": re.compile(r"deep_ep_cpp\..{1,60}\.so"),
}
_NUMBERED = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)?)$")
_TEXTS = {
    "nccl": re.compile(rb"NCCL version (\d+\.\d+\.\d+(?:\+cuda\d+\.\d+)?)"),
    "rccl": re.compile(rb"RCCL version (?:: )?(\d+\.\d+\.\d+)"),
    "glibc": re.compile(rb"GNU C Library [^\n]{0,100}release version (\d+\.\d+)"),
    "ucx": re.compile(rb"\x00(1\.\d{1,2}\.\d{1,2})\x00"),
    "aws-ofi-nccl": re.compile(rb"aws-ofi-nccl (?:v)?(\d+\.\d+\.\d+)"),
    "nvshmem": re.compile(rb"NVSHMEM v(\d+\.\d+\.\d+)"),
}
_DEEP_EP = re.compile(r"\bdeep_ep-(\d+\.\d+\.\d+)")
"""In the name of its .egg or .dist-info, which stands beside it: its own files have no version."""
_TORCH = re.compile(r"^(__version__|cuda|hip)(?:: [^=\n]{1,60})? = '([\w.+\-]{1,80})'", re.MULTILINE)
_PYTHON = re.compile(r"/(?:lib|lib64)/python(3\.\d{1,2})/|/libpython(3\.\d{1,2})\.so|/python(3\.\d{1,2})$")
_PYTHON_FILE = re.compile(r"libpython3\.\d{1,2}\.so[.\d]*")


@record
class MappedVersions:
    """Versions by component ("nccl", "torch", ...), and the file that each was read from."""

    pid: int
    versions: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    error: str = ""


def read(pid: int) -> MappedVersions:
    """Read the versions of a process and of the kernel below it. Never raises; bounded in time and memory."""
    system = os.uname()
    versions = {"kernel": system.release, "arch": system.machine}
    sources = {"kernel": "uname", "arch": "uname"}
    done, late = deadlines.each([pid], _mapped, patience_s=_MAPS_S)
    if late or isinstance(done[pid], str):
        return MappedVersions(pid, versions, sources, "reading its maps timed out" if late else str(done[pid]))
    reader = _Reader(pid, list(done[pid]))
    found, files = reader.read()
    return MappedVersions(pid, {**versions, **found}, {**sources, **files})


def _mapped(pid: int) -> list[str] | str:
    """List the files mapped by a process, each once; or the error."""
    found: dict[str, None] = {}
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            for line in file.read(_MOST_MAPS_BYTES).split(b"\n"):
                fields = line.split(None, 5)
                if len(fields) == 6 and fields[5].startswith(b"/") and not fields[5].endswith(b" (deleted)"):
                    found[os.fsdecode(fields[5])] = None
    except OSError as error:
        return error.strerror or str(error)
    return list(found)


class _Reader:
    """Reads versions from the files of one process, within a time limit."""

    def __init__(self, pid: int, mapped: list[str]) -> None:
        self._root = f"/proc/{pid}/root"
        self._exe = f"/proc/{pid}/exe"
        self._mapped = mapped
        self._until = time.monotonic() + _SEARCH_S
        self._versions: dict[str, str] = {}
        self._sources: dict[str, str] = {}

    def read(self) -> tuple[dict[str, str], dict[str, str]]:
        for path in self._mapped:
            name = os.path.basename(path)
            for component, pattern in _FILES.items():
                if component not in self._versions and pattern.fullmatch(name):
                    self._library(component, path)
        self._python()
        self._driver()
        self._note("ofed", _text("/sys/module/mlx5_core/version"), "/sys/module/mlx5_core/version")
        return self._versions, self._sources

    def _note(self, component: str, version: str, source: str) -> None:
        if version and component not in self._versions:
            self._versions[component] = version[:80]
            self._sources[component] = source

    def _library(self, component: str, path: str) -> None:
        numbered = _NUMBERED.search(path)
        if component == "torch":
            self._torch(os.path.join(os.path.dirname(os.path.dirname(path)), "version.py"))
        elif component == "driver":
            self._note(component, numbered[1] if numbered is not None else "", path)
        elif component == "deep-ep":
            names = [path, *machine.names_in(os.path.dirname(self._root + path))]
            self._note(component, next((match[1] for name in names if (match := _DEEP_EP.search(name))), ""), path)
        else:
            found = self._search(self._root + path, _TEXTS[component])
            if not found and component in ("nccl", "rccl") and numbered is not None:
                found = [numbered[1]]  # /usr/lib/libnccl.so.2.27.5
            self._note(component, found[0] if len(set(found)) == 1 else "", path)

    def _torch(self, path: str) -> None:
        names = {"__version__": "torch", "cuda": "cuda", "hip": "hip"}
        for name, value in _TORCH.findall(_text(self._root + path)):
            self._note(names[name], value, path)

    def _python(self) -> None:
        """Find the patch level, a string in the interpreter, possibly the end of a longer one."""
        executable = machine.link_target(self._exe)
        minors = {
            next(filter(None, match.groups()))
            for path in [*self._mapped, executable]
            if (match := _PYTHON.search(path))
        }
        if len(minors) != 1:
            return
        libraries = [path for path in self._mapped if _PYTHON_FILE.fullmatch(os.path.basename(path))]
        minor = re.escape(minors.pop()).encode()
        # Text first: a pattern that begins with a condition takes 50 times as long, 0.15 s.
        pattern = re.compile(rb"(" + minor + rb"(?<![\d.]" + minor + rb")\.\d{1,2}(?:(?:a|b|rc)\d{1,2})?)\+?\x00")
        for path in libraries or [executable]:
            found = self._search(self._root + path, pattern)
            if len(set(found)) == 1:
                self._note("python", found[0], path)

    def _driver(self) -> None:
        text = _text("/proc/driver/nvidia/version")
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+\.\d+(?:\.\d+)?)", text)
        if match is not None:
            self._note("driver", match[1], "/proc/driver/nvidia/version")

    def _search(self, path: str, pattern: re.Pattern[bytes]) -> list[str]:
        """Return a pattern's first match in a file, and all others in the same piece."""
        for piece in self._pieces(path):
            found = pattern.findall(piece)
            if found:
                return [text.decode("ascii", "replace") for text in found]
        return []

    def _pieces(self, path: str) -> Iterator[bytes]:
        """Yield a regular file in overlapping pieces."""
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return
                kept, read = b"", 0
                while read < _MOST_BYTES and time.monotonic() < self._until:
                    data = file.read(_CHUNK)
                    if not data:
                        return
                    read += len(data)
                    yield kept + data
                    kept = data[-_OVERLAP:]
        except OSError:
            return


def _text(path: str) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return ""
            return (file.read(65536) or b"").decode("utf-8", "replace").strip()
    except OSError:
        return ""
