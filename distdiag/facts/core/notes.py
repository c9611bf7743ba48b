"""What crashed, as the notes of a core file tell it. They come first in it, so that a cut-off core has them too.

Layouts are those of Linux: include/uapi/linux/elfcore.h (prstatus, prpsinfo), include/uapi/asm-generic/siginfo.h, and
fs/binfmt_elf.c (NT_FILE, the order of all); registers: asm/user_64.h of x86, uapi/asm/ptrace.h of arm64.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from dataclasses import dataclass

from distdiag.facts import elf
from distdiag.facts.core.image import MAGIC, Bytes, Image, opened
from distdiag.facts.core.image import NotACore as NotACore
from distdiag.facts.core.image import OtherMachine as OtherMachine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from distdiag.facts.core.image import Core

_PC_AT = {"x86_64": 240, "aarch64": 368}
"""Where in a prstatus the program counter stands: the registers begin at 112, and 16 or 32 come before it."""
_REGISTERS_AT, _REGISTERS = 112, struct.Struct("<27Q")
_DWARF_NUMBERS = (15, 14, 13, 12, 6, 3, 11, 10, 9, 8, 0, 2, 1, 4, 5, None, 16, None, None, 7)
"""Of the registers of x86-64 in the order of user_regs_struct: r15, r14, r13, r12, rbp, rbx, r11 to r8, rax, rcx, rdx,
rsi, rdi, orig_rax, rip, cs, eflags, rsp; by the System V ABI, AMD64 supplement, 3.6.2."""
_NT_PRSTATUS, _NT_PRPSINFO, _NT_AUXV, _NT_SIGINFO, _NT_FILE = 1, 3, 6, 0x53494749, 0x46494C45
_PRSTATUS = struct.Struct("<12xh18xi")  # pr_cursig, pr_pid
_PRPSINFO = struct.Struct("<16xI4xi12x16s80s")  # pr_uid, pr_pid, pr_fname, pr_psargs
_SIGINFO = struct.Struct("<i4xi4x")  # si_signo, si_code
_FILES, _FILE = struct.Struct("<QQ"), struct.Struct("<QQQ")  # count, page size; start, end, offset in pages
_AUXV = struct.Struct("<QQ")
_WORD, _PID = struct.Struct("<Q"), struct.Struct("<i")
_AT_EXECFN = 31

_FAULTS = (4, 5, 7, 8, 11)  # SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV, when the kernel says why: codes 1 to 127
_SENT = (0, -1, -6)  # SI_USER, SI_QUEUE, SI_TKILL
_LONGEST_PATH = 4096
_PAGE = 4096
_DELETED = " (deleted)"


@dataclass(frozen=True)
class CoreThread:
    """A thread; `pc` is the address that it was at. The kernel gives every thread the signal that ended them all."""

    tid: int
    signal: int
    pc: int | None


@dataclass(frozen=True)
class MappedFile:
    """Addresses that showed a file from `offset` bytes on; the path ends in " (deleted)" if it was no more then."""

    start: int
    end: int
    offset: int
    path: str


class Mapped:
    """Mapped files by their addresses."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._files = sorted(files, key=lambda one: one.start)
        self._starts = [one.start for one in self._files]

    def at(self, address: int) -> MappedFile | None:
        """Give the file that lay at an address."""
        index = bisect_right(self._starts, address) - 1
        return self._files[index] if index >= 0 and address < self._files[index].end else None


@dataclass(frozen=True)
class CoreNotes:
    """A process that crashed, with the ids of its own pid namespace.

    The first of `threads` is the one that crashed. `code` is si_code of sigaction(2), None if the core has none (gdb's
    gcore). `address`: what could not be accessed or executed; None if the signal was sent, or the processor does not
    tell. `sender_pid`: who sent the signal, if anybody. `program` has at most 15 letters, `arguments` 79. `execfn`: the
    program as it was started, empty if that is not in the core. `whole_bytes`: the size that its headers promise; for
    a core given by its first bytes, `size_bytes` and `truncated` are those of them.
    """

    machine: str
    pid: int
    uid: int | None
    program: str
    arguments: str
    signal: int
    code: int | None
    address: int | None
    sender_pid: int | None
    threads: tuple[CoreThread, ...]
    files: tuple[MappedFile, ...]
    execfn: str
    size_bytes: int
    whole_bytes: int
    truncated: bool


def read(core: Core) -> CoreNotes:
    """Read the notes.

    Raises:
        NotACore: it is none, or is damaged, or ends before its notes say who crashed.
        OSError, ValueError: it cannot be opened or read, or is not a regular file; this is no path.
    """
    with opened(core) as image:
        threads, content = _gather(image, _PC_AT[image.machine])
        if not threads or _NT_PRPSINFO not in content:
            raise elf.Malformed
        uid, pid, program, arguments = _PRPSINFO.unpack_from(content[_NT_PRPSINFO])
        signal, code, address, sender = _why(content.get(_NT_SIGINFO), threads[0].signal)
        return CoreNotes(
            machine=image.machine,
            pid=pid,
            uid=uid,
            program=_text(program),
            arguments=_text(arguments).rstrip(),
            signal=signal,
            code=code,
            address=address,
            sender_pid=sender,
            threads=tuple(threads),
            files=tuple(sorted(_files(content.get(_NT_FILE, bytes(_FILES.size))), key=lambda file: file.start)),
            execfn=_execfn(image, content.get(_NT_AUXV, b"")),
            size_bytes=image.size_bytes,
            whole_bytes=image.whole_bytes,
            truncated=image.size_bytes < image.whole_bytes,
        )


def registers(image: Image) -> Iterator[tuple[int, dict[int, int]]]:
    """Give each thread's id and its registers by their DWARF numbers; none of a machine other than x86-64."""
    if image.machine != "x86_64":
        return
    for note in image.notes():
        if note.owner == b"CORE" and note.kind == _NT_PRSTATUS:
            state = image.at(note.offset, _REGISTERS_AT + _REGISTERS.size)
            values = zip(_DWARF_NUMBERS, _REGISTERS.unpack_from(state, _REGISTERS_AT))
            yield _PRSTATUS.unpack_from(state)[1], {number: value for number, value in values if number is not None}


def build_ids(core: Core, notes: CoreNotes) -> dict[str, str]:
    """Tell the build id, in hexadecimal, of each mapped program and library that has one.

    It stands in a file's first page, which the kernel keeps (bit 4 of coredump_filter, core(5)). The path is as in
    `notes`. Raises what `read` raises.
    """
    return {path: build_id for path, build_id in _binaries(core, notes) if build_id}


def changed_files(core: Core, notes: CoreNotes) -> tuple[str, ...]:
    """List mapped programs and libraries that have another build id on this disk than in the core.

    Not those that are gone (`missing_files`), that may not be read here, or that had no build id: nobody can tell.
    """
    pages = ((path, was, _first_page(path)) for path, was in _as_named_now(build_ids(core, notes)))
    return tuple(dict.fromkeys(path for path, was, page in pages if page is not None and _build_id(page) != was))


def missing_files(core: Core, notes: CoreNotes) -> tuple[str, ...]:
    """List mapped programs and libraries of which this disk has nothing of that name."""
    now = _as_named_now(dict(_binaries(core, notes)))
    return tuple(dict.fromkeys(path for path, _ in now if _is_gone(path)))


def _gather(image: Image, pc_at: int) -> tuple[list[CoreThread], dict[int, bytes]]:
    """Read the threads, and the notes of which there is one for the process."""
    threads, content = [], {}
    for note in image.notes():
        if note.owner != b"CORE":
            continue
        if note.kind == _NT_PRSTATUS:
            state = image.at(note.offset, min(note.size, pc_at + _WORD.size))
            signal, tid = _PRSTATUS.unpack_from(state)
            pc = _WORD.unpack_from(state, pc_at)[0] if len(state) == pc_at + _WORD.size else None
            threads.append(CoreThread(tid, signal, pc))
        elif note.kind in (_NT_PRPSINFO, _NT_SIGINFO, _NT_AUXV, _NT_FILE) and note.kind not in content:
            content[note.kind] = image.at(note.offset, note.size)
    return threads, content


def _why(siginfo: bytes | None, signal: int) -> tuple[int, int | None, int | None, int | None]:
    """Give signal, code, address and sender."""
    if siginfo is None:
        return signal, None, None, None
    signal, code = _SIGINFO.unpack_from(siginfo)
    # SI_KERNEL (128), as for an address that cannot be one (x86-64: not canonical), leaves the address at 0.
    address = _WORD.unpack_from(siginfo, _SIGINFO.size)[0] if signal in _FAULTS and 0 < code < 128 else None
    sender = _PID.unpack_from(siginfo, _SIGINFO.size)[0] if code in _SENT else None
    return signal, code, address, sender


def _files(data: bytes) -> Iterator[MappedFile]:
    count, page_bytes = _FILES.unpack_from(data)
    names_at = _FILES.size + count * _FILE.size
    if names_at > len(data):
        raise elf.Malformed
    names = data[names_at:].split(b"\0", count)
    if len(names) <= count:
        raise elf.Malformed
    for (start, end, pages), name in zip(_FILE.iter_unpack(data[_FILES.size : names_at]), names):
        yield MappedFile(start, end, pages * page_bytes, name.decode("utf-8", "replace"))


def _execfn(image: Image, auxv: bytes) -> str:
    whole = len(auxv) // _AUXV.size * _AUXV.size
    address = dict(_AUXV.iter_unpack(auxv[:whole])).get(_AT_EXECFN, 0)
    name, end, _ = image.memory(address, _LONGEST_PATH).partition(b"\0")
    return _text(name) if end else ""


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")


def _binaries(core: Core, notes: CoreNotes) -> Iterator[tuple[str, str]]:
    """List path and build id of each mapped ELF file whose first page is in the core; empty if it has none."""
    seen = set()
    with opened(core) as image:
        for file in notes.files:
            if file.offset == 0 and file.path not in seen:
                page = image.memory(file.start, _PAGE)
                if page.startswith(MAGIC):
                    seen.add(file.path)
                    yield file.path, _build_id(page)


def _build_id(page: bytes) -> str:
    try:
        image = Image(Bytes(page))
        return next((image.at(n.offset, n.size).hex() for n in image.notes() if (n.owner, n.kind) == (b"GNU", 3)), "")
    except elf.Malformed:
        return ""


def _as_named_now(ids: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Name a file that was replaced before the crash as the one that took its place."""
    for path, build_id in ids.items():
        yield path[: -len(_DELETED)] if path.endswith(_DELETED) else path, build_id


def _first_page(path: str) -> bytes | None:
    try:
        with elf.File(path) as file:
            return file.at(0, min(file.size, _PAGE))
    except (OSError, ValueError, elf.Malformed):
        return None


def _is_gone(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        pass  # not ours to see
    return False
