"""Parser of core files: notes, memory, and the launcher's variables of the rank. See elf(5), core(5).

The kernel writes notes first, so a truncated core still has them. Cores are untrusted: counts and sizes are checked
against the file size before reading or allocating. Layouts follow Linux: include/uapi/linux/elfcore.h (prstatus,
prpsinfo), include/uapi/asm-generic/siginfo.h, and fs/binfmt_elf.c (NT_FILE, note order); registers: asm/user_64.h of
x86, uapi/asm/ptrace.h of arm64.
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from bisect import bisect_right

from distdiag.facts.elf import File, Malformed
from distdiag.facts.process import procs
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Protocol, Union

    Core = Union[str, bytes]
    """The path of a core, or its bytes."""

    class Readable(Protocol):
        """Implemented by `elf.File` and `Bytes`."""

        size: int

        def at(self, offset: int, size: int) -> bytes:
            """Read exactly `size` bytes. Raises Malformed if the file ends before."""


MAGIC = b"\x7fELF"
_READABLE = MAGIC + b"\x02\x01\x01"  # 64 bits, little endian, version 1
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOTE = struct.Struct("<III")
_MACHINES = {62: "x86_64", 183: "aarch64"}
_OTHER_MACHINES = {3: "i386", 8: "mips", 20: "ppc", 21: "ppc64", 22: "s390", 40: "arm", 243: "riscv", 258: "loongarch"}
_KINDS = {1: "an object file", 2: "a program", 3: "a program or library"}
_ET_CORE = 4
_IDENTITY_BYTES = 20  # up to e_machine
_BITS_32, _BITS_64, _LITTLE, _BIG = 1, 2, 1, 2
_LONGEST_OWNER = 8  # "CORE", "LINUX" and "GNU", with padding
_PT_LOAD, _PT_NOTE = 1, 4
_PN_XNUM = 0xFFFF
_AT_ONCE = 4096
_MAX_NOTES = 1 << 17  # ten kinds for each of 13,000 threads
_MAX_BYTES = 32 << 20
"""Limit for headers and notes; a torch job has 0.2 MB. By default the kernel writes up to 4 MiB about mapped files."""
_PC_AT = {"x86_64": 240, "aarch64": 368}
"""Offset of the program counter in prstatus: registers start at 112, and 16 or 32 precede the counter."""
_REGISTERS_AT, _REGISTERS = 112, struct.Struct("<27Q")
_DWARF_NUMBERS = (15, 14, 13, 12, 6, 3, 11, 10, 9, 8, 0, 2, 1, 4, 5, None, 16, None, None, 7)
"""DWARF numbers of the x86-64 registers in the order of user_regs_struct: r15, r14, r13, r12, rbp, rbx, r11 to r8, rax,
rcx, rdx, rsi, rdi, orig_rax, rip, cs, eflags, rsp; see System V ABI, AMD64 supplement, 3.6.2."""
_NT_PRSTATUS, _NT_PRPSINFO, _NT_AUXV, _NT_SIGINFO, _NT_FILE = 1, 3, 6, 0x53494749, 0x46494C45
_PRSTATUS = struct.Struct("<12xh18xi")  # pr_cursig, pr_pid
_PRPSINFO = struct.Struct("<16xI4xi12x16s80s")  # pr_uid, pr_pid, pr_fname, pr_psargs
_SIGINFO = struct.Struct("<i4xi4x")  # si_signo, si_code
_FILES, _FILE = struct.Struct("<QQ"), struct.Struct("<QQQ")  # count, page size; start, end, offset in pages
_AUXV = struct.Struct("<QQ")
_WORD, _PID = struct.Struct("<Q"), struct.Struct("<i")
_AT_EXECFN = 31

_FAULTS = (4, 5, 7, 8, 11)  # SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV with a kernel code, 1 to 127
_SENT = (0, -1, -6)  # SI_USER, SI_QUEUE, SI_TKILL
_MAX_PATH_BYTES = 4096
_PAGE = 4096
_DELETED = " (deleted)"
_MAX_ENVIRONMENT_BYTES = 512 * 1024


class NotACore(Exception):
    """Not a readable core; the text is the reason, to follow "FILE: "."""


class OtherMachine(NotACore):
    """A core of an unsupported architecture."""


class Bytes:
    """Core data in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def at(self, offset: int, size: int) -> bytes:
        """Return exactly `size` bytes. Raises Malformed if the data ends before."""
        if offset + size > self.size:
            raise Malformed
        return self._data[offset : offset + size]


@record
class Note:
    """A complete note: `size` bytes of content at `offset` in the file."""

    owner: bytes
    kind: int
    offset: int
    size: int


class Image:
    """The program headers of a 64-bit little-endian ELF file.

    `machine` as in uname(2), "" if unsupported. `whole_bytes` is the end of the last segment; a smaller `size_bytes`
    means that the file was truncated.

    Raises:
        Malformed: not such a file, or its program headers are missing.
    """

    def __init__(self, file: Readable) -> None:
        self._file = file
        self.size_bytes = file.size
        self.whole_bytes = 0
        self._notes: list[tuple[int, int]] = []
        header = _HEADER.unpack(file.at(0, _HEADER.size))
        if not header[0].startswith(_READABLE) or header[9] != _SEGMENT.size:
            raise Malformed
        self.machine = _MACHINES.get(header[2], "")
        self._read_segments(header[5], self._count(segments_at=header[5], sections_at=header[6], in_header=header[10]))

    def at(self, offset: int, size: int) -> bytes:
        """Read exactly `size` bytes of the file. Raises Malformed if it ends before."""
        return self._file.at(offset, size)

    def memory(self, address: int, most_bytes: int) -> bytes:
        """Return memory from an address to the end of its segment, at most `most_bytes`; b"" if not in the file."""
        found = bisect_right(self._starts, address) - 1
        if found < 0:
            return b""
        skipped = address - self._starts[found]
        offset = self._offsets[found] + skipped
        size = min(self._sizes[found] - skipped, most_bytes, self.size_bytes - offset)
        return self._file.at(offset, size) if size > 0 else b""

    def notes(self) -> Iterator[Note]:
        """List the notes in order, up to the first truncated note; notes are padded to 4 bytes."""
        left = _MAX_NOTES
        for at, size in self._notes:
            end = min(at + size, self.size_bytes)
            while at + _NOTE.size <= end:
                left -= 1
                if not left:
                    raise Malformed
                head = self._file.at(at, min(_NOTE.size + _LONGEST_OWNER, end - at))
                owner_size, content_size, kind = _NOTE.unpack_from(head)
                content = at + _NOTE.size + (owner_size + 3) // 4 * 4
                if content + content_size > end:
                    return
                yield Note(head[_NOTE.size :][:owner_size].rstrip(b"\0"), kind, content, content_size)
                at = content + (content_size + 3) // 4 * 4

    def _count(self, *, segments_at: int, sections_at: int, in_header: int) -> int:
        """Count the program headers.

        If the header field overflows (PN_XNUM), the count is in the first section header, which the kernel writes last.
        In a truncated core, derive the count from the offset of the notes, which follow the program headers
        (fs/binfmt_elf.c, elf_core_dump).
        """
        if in_header != _PN_XNUM:
            return in_header
        try:
            return int(_SECTION.unpack(self._file.at(sections_at, _SECTION.size))[7])
        except Malformed:
            kind, _, offset, *_ = _SEGMENT.unpack(self._file.at(segments_at, _SEGMENT.size))
            if kind != _PT_NOTE or offset < segments_at:
                raise
            return int(offset - segments_at) // _SEGMENT.size

    def _read_segments(self, at: int, count: int) -> None:
        if at + count * _SEGMENT.size > self.size_bytes:
            raise Malformed
        columns = array("Q"), array("Q"), array("Q")
        for first in range(0, count, _AT_ONCE):
            rows = self._file.at(at + first * _SEGMENT.size, min(count - first, _AT_ONCE) * _SEGMENT.size)
            for kind, _, offset, address, _, size, _, _ in _SEGMENT.iter_unpack(rows):
                self.whole_bytes = max(self.whole_bytes, offset + size)
                if kind == _PT_LOAD:
                    for column, value in zip(columns, (address, offset, size)):
                        column.append(value)
                elif kind == _PT_NOTE:
                    self._notes.append((offset, size))
        # With kernel.core_sort_vma, and before that setting (about 6.13), Linux writes small mappings first.
        order = sorted(range(len(columns[0])), key=columns[0].__getitem__)
        self._starts, self._offsets, self._sizes = (array("Q", map(column.__getitem__, order)) for column in columns)


@contextlib.contextmanager
def opened(core: Core) -> Iterator[Image]:
    """Open a core; parse errors inside the `with` block also become NotACore.

    Raises:
        NotACore: not a core, or damaged or truncated at the requested data.
        OSError, ValueError: invalid path, not a regular file, or unreadable.
    """
    with File(core, _MAX_BYTES) if isinstance(core, str) else contextlib.nullcontext(Bytes(core)) as file:
        _check(file.at(0, min(_IDENTITY_BYTES, file.size)))
        try:
            yield Image(file)
        except (Malformed, struct.error) as error:
            reason = f"damaged, or truncated before the end of its notes: it has {file.size:,} bytes"
            raise NotACore(reason) from error


def _check(head: bytes) -> None:
    """Raise NotACore unless the header is that of a core of a supported architecture."""
    if not head:
        raise NotACore("empty (was the disk full?)")
    if head[:4] != MAGIC:
        raise NotACore("not a core: no ELF header")
    if len(head) < _IDENTITY_BYTES or head[4] not in (_BITS_32, _BITS_64) or head[5] not in (_LITTLE, _BIG):
        raise NotACore("damaged or truncated in its first 20 bytes")
    kind, machine = struct.unpack_from("<HH" if head[5] == _LITTLE else ">HH", head, 16)
    if kind != _ET_CORE:
        raise NotACore(f"not a core, but {_KINDS.get(kind, f'an ELF file of type {kind}')}")
    if machine not in _MACHINES or head[4] != _BITS_64 or head[5] != _LITTLE:
        name = _MACHINES.get(machine) or _OTHER_MACHINES.get(machine, f"machine {machine}")
        bits, order = 32 * head[4], "little" if head[5] == _LITTLE else "big"
        raise OtherMachine(f"a core of an unsupported machine: {name}, {bits} bits, {order} endian")


@record
class CoreThread:
    """A thread; `pc` is its program counter. The kernel gives every thread the fatal signal."""

    tid: int
    signal: int
    pc: int | None


@record
class MappedFile:
    """A file mapped at [start, end) from `offset` bytes on; " (deleted)" follows the path of an unlinked file."""

    start: int
    end: int
    offset: int
    path: str


class MappedFiles:
    """Mapped files, searchable by address."""

    def __init__(self, files: Sequence[MappedFile]) -> None:
        self._files = sorted(files, key=lambda file: file.start)
        self._starts = [file.start for file in self._files]

    def at(self, address: int) -> MappedFile | None:
        """Return the file mapped at an address."""
        index = bisect_right(self._starts, address) - 1
        return self._files[index] if index >= 0 and address < self._files[index].end else None


@record
class CoreNotes:
    """A crashed process, with the ids of its own pid namespace.

    `threads[0]` crashed. `code` is si_code of sigaction(2), None if the core lacks it (gdb's gcore). `address`: the
    fault address; None for a sent signal, or if the processor does not report it. `sender_pid`: the process that sent
    the signal. `program` has at most 15 characters, `arguments` 79. `execfn`: the path passed to execve, "" if not in
    the core. `whole_bytes`: the size implied by the headers; for a core given as bytes, `size_bytes` and `truncated`
    describe those bytes.
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
        NotACore: not a core, damaged, or truncated before the notes of the crashed thread.
        OSError, ValueError: invalid path, not a regular file, or unreadable.
    """
    with opened(core) as image:
        threads, content = _gather(image, _PC_AT[image.machine])
        if not threads or _NT_PRPSINFO not in content:
            raise Malformed
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
    """List thread ids with their registers by DWARF number; empty unless x86-64."""
    if image.machine != "x86_64":
        return
    for note in image.notes():
        if note.owner == b"CORE" and note.kind == _NT_PRSTATUS:
            state = image.at(note.offset, _REGISTERS_AT + _REGISTERS.size)
            values = zip(_DWARF_NUMBERS, _REGISTERS.unpack_from(state, _REGISTERS_AT))
            yield _PRSTATUS.unpack_from(state)[1], {number: value for number, value in values if number is not None}


def rank_variables(core: Core) -> dict[str, str]:
    """Return the launcher's rank variables from the initial environment of the process.

    The environment lies below the program's name at the top of the stack; {} if the core omits it. Other variables are
    not returned. Raises as `read`.
    """
    with opened(core) as image:
        auxv = next((image.at(note.offset, note.size) for note in image.notes() if note.kind == _NT_AUXV), b"")
        address, size = _execfn_at(auxv), _MAX_ENVIRONMENT_BYTES
        while size >= _PAGE:  # the segment may begin less than `size` below
            if found := image.memory(max(0, address - size), size):
                return procs.wanted(filter(None, found.split(b"\0")))  # most of it is zero
            size //= 2
    return {}


def build_ids(core: Core, notes: CoreNotes) -> dict[str, str]:
    """Return the build id, in hexadecimal, of each mapped program and library, by path; omit files without one.

    Build ids are in the first page of a file, which the kernel dumps (bit 4 of coredump_filter, core(5)). Raises as
    `read`.
    """
    return {path: build_id for path, build_id in _binaries(core, notes) if build_id}


def changed_files(core: Core, notes: CoreNotes) -> tuple[str, ...]:
    """List mapped programs and libraries whose build id on this disk differs from the core's.

    Excludes missing files (see `missing_files`), unreadable files, and files without a build id.
    """
    pages = ((path, was, _first_page(path)) for path, was in _as_named_now(build_ids(core, notes)))
    return tuple(dict.fromkeys(path for path, was, page in pages if page is not None and _build_id(page) != was))


def missing_files(core: Core, notes: CoreNotes) -> tuple[str, ...]:
    """List mapped programs and libraries missing from this disk."""
    now = _as_named_now(dict(_binaries(core, notes)))
    return tuple(dict.fromkeys(path for path, _ in now if _is_gone(path)))


def _gather(image: Image, pc_at: int) -> tuple[list[CoreThread], dict[int, bytes]]:
    """Read the threads, and the per-process notes by kind."""
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
    if siginfo is None:
        return signal, None, None, None
    signal, code = _SIGINFO.unpack_from(siginfo)
    # SI_KERNEL (128), sent for a non-canonical address on x86-64, leaves the address at 0.
    address = _WORD.unpack_from(siginfo, _SIGINFO.size)[0] if signal in _FAULTS and 0 < code < 128 else None
    sender = _PID.unpack_from(siginfo, _SIGINFO.size)[0] if code in _SENT else None
    return signal, code, address, sender


def _files(data: bytes) -> Iterator[MappedFile]:
    count, page_bytes = _FILES.unpack_from(data)
    names_at = _FILES.size + count * _FILE.size
    if names_at > len(data):
        raise Malformed
    names = data[names_at:].split(b"\0", count)
    if len(names) <= count:
        raise Malformed
    for (start, end, pages), name in zip(_FILE.iter_unpack(data[_FILES.size : names_at]), names):
        yield MappedFile(start, end, pages * page_bytes, name.decode("utf-8", "replace"))


def _execfn(image: Image, auxv: bytes) -> str:
    name, end, _ = image.memory(_execfn_at(auxv), _MAX_PATH_BYTES).partition(b"\0")
    return _text(name) if end else ""


def _execfn_at(auxv: bytes) -> int:
    """Return the address of the path passed to execve, else 0."""
    whole = len(auxv) // _AUXV.size * _AUXV.size
    return int(dict(_AUXV.iter_unpack(auxv[:whole])).get(_AT_EXECFN, 0))


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")


def _binaries(core: Core, notes: CoreNotes) -> Iterator[tuple[str, str]]:
    """List path and build id ("" if none) of each mapped ELF file whose first page is in the core."""
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
    except Malformed:
        return ""


def _as_named_now(ids: dict[str, str]) -> Iterator[tuple[str, str]]:
    """List path and build id, with the path of the replacement for files replaced before the crash."""
    for path, build_id in ids.items():
        yield path[: -len(_DELETED)] if path.endswith(_DELETED) else path, build_id


def _first_page(path: str) -> bytes | None:
    try:
        with File(path) as file:
            return file.at(0, min(file.size, _PAGE))
    except (OSError, ValueError, Malformed):
        return None


def _is_gone(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        pass  # permission denied
    return False
