"""Names, source lines and inlined calls of C code, by libdw, which pystack brings with it.

It imports nothing of distdiag: its text is run by whatever Python has pystack, see `pystack_child`.
"""

from __future__ import annotations

import ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Line = tuple[str, str, int]
    """Function, source file and line (empty and 0 if not known)."""

_BASE = 1 << 32  # where a library is said to lie; a program may not lie at 0
_INLINED, _SUBPROGRAM = 0x1D, 0x2E
_CALL_FILE, _CALL_LINE = 0x58, 0x59
_LINKAGE_NAMES = 0x6E, 0x2007  # that of DWARF 4, and that of MIPS, which was used before


class _Callbacks(ctypes.Structure):
    _fields_ = (
        ("find_elf", ctypes.c_void_p),
        ("find_debuginfo", ctypes.c_void_p),
        ("section_address", ctypes.c_void_p),
        ("debuginfo_path", ctypes.c_void_p),
    )


class _Die(ctypes.Structure):
    _fields_ = (("addr", ctypes.c_void_p), ("cu", ctypes.c_void_p), ("abbrev", ctypes.c_void_p), ("pad", ctypes.c_long))


class _Attribute(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint), ("form", ctypes.c_uint), ("at", ctypes.c_void_p), ("cu", ctypes.c_void_p))


_Dies = ctypes.POINTER(_Die)
_POINTERS = ("dwfl_begin", "dwfl_report_elf", "dwfl_module_getelf", "dwfl_module_getsrc")
_ATTRIBUTES = ("dwarf_attr", "dwarf_attr_integrate")
_TEXTS = ("dwfl_module_addrname", "dwfl_lineinfo", "dwarf_diename", "dwarf_formstring", "dwarf_filesrc")
_RESULTS = {
    **dict.fromkeys((*_POINTERS, *_ATTRIBUTES), ctypes.c_void_p),
    **dict.fromkeys((*_TEXTS, "__cxa_demangle"), ctypes.c_char_p),
    "dwfl_module_addrdie": _Dies,
}


class Lines:
    """libdw as `library` has it, or has it loaded. Raises OSError, AttributeError if it does not."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        for name, kind in _RESULTS.items():
            getattr(self._library, name).restype = kind
        find = ctypes.cast(self._library.dwfl_standard_find_debuginfo, ctypes.c_void_p)
        address = ctypes.cast(self._library.dwfl_offline_section_address, ctypes.c_void_p)
        self._callbacks = _Callbacks(None, find, address, None)
        self._demangle = getattr(self._library, "__cxa_demangle")  # as an attribute its name would be mangled

    def of(self, path: str, addresses: Sequence[int]) -> list[list[Line]]:
        """Tell what is at addresses of a file, as it was linked; what was inlined comes before what it is in."""
        dw = self._library
        session = ctypes.c_void_p(dw.dwfl_begin(ctypes.byref(self._callbacks)))
        try:
            dw.dwfl_report_begin(session)
            where = path.encode("utf-8", "surrogateescape")
            module = dw.dwfl_report_elf(session, where, where, -1, ctypes.c_uint64(_BASE), False)
            dw.dwfl_report_end(session, None, None)
            bias = ctypes.c_uint64()
            module = ctypes.c_void_p(module)
            if not module or not dw.dwfl_module_getelf(module, ctypes.byref(bias)):
                return [[] for _ in addresses]
            return [list(self._at(module, address + bias.value)) for address in addresses]
        finally:
            dw.dwfl_end(session)

    def _at(self, module: ctypes.c_void_p, address: int) -> Iterator[Line]:
        there = ctypes.c_uint64(address)
        name = self._demangled(self._library.dwfl_module_addrname(module, there))
        file, line = self._source(module, there)
        unit, scopes = self._scopes(module, there)
        for scope in scopes:
            kind = self._library.dwarf_tag(ctypes.byref(scope))
            if kind == _INLINED:
                yield self._name(scope), file, line
                file, line = self._call_file(unit, scope), self._number(scope, _CALL_LINE)
            elif kind == _SUBPROGRAM:
                name = name or self._name(scope)
                break
        yield name, file, line

    def _source(self, module: ctypes.c_void_p, address: ctypes.c_uint64) -> tuple[str, int]:
        found = ctypes.c_void_p(self._library.dwfl_module_getsrc(module, address))
        line = ctypes.c_int()
        file = self._library.dwfl_lineinfo(found, None, ctypes.byref(line), None, None, None) if found else None
        return _text(file), line.value if file else 0

    def _scopes(self, module: ctypes.c_void_p, address: ctypes.c_uint64) -> tuple[object, list[_Die]]:
        """Give the compilation unit of an address, and what it lies in, innermost first."""
        bias = ctypes.c_uint64()
        unit = self._library.dwfl_module_addrdie(module, address, ctypes.byref(bias))
        if not unit:
            return None, []
        at = ctypes.c_uint64(address.value - bias.value)
        # Beyond what was inlined these are where it was written; where it was inlined to is asked for by itself.
        innermost = self._list(lambda found: self._library.dwarf_getscopes(unit, at, found))[:1]
        if not innermost:
            return unit, []
        return unit, self._list(lambda found: self._library.dwarf_getscopes_die(ctypes.byref(innermost[0]), found))

    def _list(self, call: Callable[[object], int]) -> list[_Die]:
        found = _Dies()
        count = call(ctypes.byref(found))
        if count <= 0:
            return []
        # What they point to belongs to the session; the array is ours to free.
        dies = [_Die.from_buffer_copy(found[at]) for at in range(count)]
        self._library.free(found)
        return dies

    def _name(self, die: _Die) -> str:
        attribute = _Attribute()
        for code in _LINKAGE_NAMES:
            if self._library.dwarf_attr_integrate(ctypes.byref(die), code, ctypes.byref(attribute)):
                return self._demangled(self._library.dwarf_formstring(ctypes.byref(attribute)))
        return _text(self._library.dwarf_diename(ctypes.byref(die)))

    def _number(self, die: _Die, code: int) -> int:
        attribute, value = _Attribute(), ctypes.c_uint64()
        if self._library.dwarf_attr(ctypes.byref(die), code, ctypes.byref(attribute)):
            self._library.dwarf_formudata(ctypes.byref(attribute), ctypes.byref(value))
        return value.value

    def _call_file(self, unit: object, die: _Die) -> str:
        files, count = ctypes.c_void_p(), ctypes.c_size_t()
        if self._library.dwarf_getsrcfiles(unit, ctypes.byref(files), ctypes.byref(count)) != 0:
            return ""
        number = ctypes.c_size_t(self._number(die, _CALL_FILE))
        return _text(self._library.dwarf_filesrc(files, number, None, None))

    def _demangled(self, name: bytes | None) -> str:
        # "f" would be float.
        is_cpp = name is not None and name.startswith(b"_Z")
        return _text((self._demangle(name, None, None, None) if is_cpp else None) or name)


def _text(found: bytes | None) -> str:
    return (found or b"").decode("utf-8", "replace")
