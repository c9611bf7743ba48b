"""Call frame information of x86-64, emitted by compilers for exceptions: how to find the caller of a frame.

Formats: DWARF 5, sections 6.4 (the table and its instructions), 2.5 (expressions) and 7.7 (opcodes); differences in
.eh_frame: Linux Standard Base 5, 10.6. Register numbers: System V ABI, AMD64 supplement, 3.6.2.

The bytes are untrusted: invalid data raises `CannotUnwind`.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Rule = tuple[int, Any]
    """Rule kind (one of the constants below) with its number or expression."""
    Word = Callable[[int], int]
    """Returns the 8-byte word at an address; raises CannotUnwind if the core lacks it."""

STACK_POINTER, RETURN_ADDRESS = 7, 16
_CALLEE_SAVED = (3, 6, 12, 13, 14, 15)  # rbx, rbp, r12 to r15

_AT_CFA, _IS_CFA, _REGISTER, _AT_EXPRESSION, _IS_EXPRESSION, _UNDEFINED = range(6)
_MASK = (1 << 64) - 1
_MAX_LEB128_BYTES = 10  # bytes of a LEB128 of 64 bits
_MAX_REGISTERS, _MAX_REMEMBERED = 128, 64
_POINTERS = {0x0: "<Q", 0x2: "<H", 0x3: "<I", 0x4: "<Q", 0xA: "<h", 0xB: "<i", 0xC: "<q"}
_RELATIVE_TO_ITSELF = 0x10


class CannotUnwind(Exception):
    """The caller is unknown: the table is missing, damaged, or needs an unknown register."""


class Cie:
    """A common information entry, shared by many functions; `signal`: it describes a frame made by the kernel."""

    __slots__ = ("code_factor", "data_factor", "pointers", "program", "signal")

    def __init__(self, content: bytes) -> None:
        """Parse an entry; `content` starts after its length and id."""
        try:
            self._read(content)
        except (LookupError, ValueError, struct.error) as error:
            raise CannotUnwind from error

    def _read(self, content: bytes) -> None:
        version, end = content[0], content.index(0, 1)
        letters = content[1:end].decode("ascii")
        self.code_factor, at = _unsigned(content, end + 1)
        self.data_factor, at = _signed(content, at)
        column, at = (content[at], at + 1) if version == 1 else _unsigned(content, at)
        if version not in (1, 3) or column != RETURN_ADDRESS or not letters.startswith("z"):
            raise CannotUnwind
        size, at = _unsigned(content, at)
        self.program = content[at + size :]
        self.signal, self.pointers = "S" in letters, 0
        for letter in letters[1:]:
            if letter == "R":
                self.pointers = content[at]
            elif letter == "P":  # personality routine
                at += struct.calcsize(_POINTERS[content[at] & 0xF])
            elif letter not in "LS":
                raise CannotUnwind
            at += letter in "RPL"


class Fde:
    """A frame description entry: the code in [begin, end)."""

    __slots__ = ("_program", "begin", "cie", "end")

    def __init__(self, cie: Cie, content: bytes, address: int) -> None:
        """Parse an entry; `content`, at `address`, starts after the length and the reference to `cie`."""
        try:
            form = _POINTERS[cie.pointers & 0xF]
            width = struct.calcsize(form)
            (begin,) = struct.unpack_from(form, content)
            (size,) = struct.unpack_from(form.upper() if width < 8 else "<Q", content, width)
            skipped, at = _unsigned(content, 2 * width)
        except (LookupError, struct.error) as error:
            raise CannotUnwind from error
        if cie.pointers & ~0xF not in (0, _RELATIVE_TO_ITSELF):
            raise CannotUnwind
        self.begin = begin + (address if cie.pointers & _RELATIVE_TO_ITSELF else 0) & _MASK
        self.end = self.begin + size
        self.cie = cie
        self._program = content[at + skipped :]

    def rules(self, address: int) -> Rules:
        """Return the rules that hold before the instruction at `address` runs."""
        rules = Rules(self.cie)
        try:
            rules.execute(self.cie.program, self.begin, _MASK)
            rules.mark_initial()
            rules.execute(self._program, self.begin, address)
        except (LookupError, struct.error) as error:
            raise CannotUnwind from error
        return rules


class Rules:
    """How to recover the caller's registers: one row of the table built by a function's instructions."""

    def __init__(self, cie: Cie) -> None:
        self._cie = cie
        self._cfa: Rule = (_UNDEFINED, 0)
        self._of: dict[int, Rule] = {}
        self._initial: dict[int, Rule] = {}
        self._remembered: list[tuple[Rule, dict[int, Rule]]] = []

    @property
    def outermost(self) -> bool:
        """Whether the function has no caller, as the first function of a thread."""
        return self._of.get(RETURN_ADDRESS, (None,))[0] == _UNDEFINED

    def mark_initial(self) -> None:
        """Save the rules of the CIE for DW_CFA_restore."""
        self._initial = dict(self._of)

    def caller_registers(self, registers: dict[int, int], word: Word) -> dict[int, int]:
        """Return the caller's registers, omitting unknown values."""
        try:
            cfa = self._frame_address(registers, word)
            kept = registers if self._cie.signal else _CALLEE_SAVED
            found = {number: registers[number] for number in kept if number in registers}
            found.pop(RETURN_ADDRESS, None)
            found[STACK_POINTER] = cfa
            for number, (kind, what) in self._of.items():
                if kind == _UNDEFINED:
                    found.pop(number, None)
                else:
                    found[number] = _value(kind, what, cfa, registers, word)
        except (LookupError, struct.error) as error:
            raise CannotUnwind from error
        return found

    def _frame_address(self, registers: dict[int, int], word: Word) -> int:
        kind, what = self._cfa
        if kind == _IS_EXPRESSION:
            return _evaluate(what, registers, word, [])
        number, offset = _register_and_offset(self._cfa)
        return registers[number] + offset & _MASK

    def execute(self, program: bytes, place: int, address: int) -> None:
        """Execute the instructions of a program that starts at `place`, up to those that apply to `address`."""
        at = 0
        while at < len(program):
            kind, low = program[at] & 0xC0, program[at] & 0x3F
            at += 1
            if kind == 0x40:  # DW_CFA_advance_loc
                place += low * self._cie.code_factor
            elif kind == 0x80:  # DW_CFA_offset
                offset, at = _unsigned(program, at)
                self._of[low] = (_AT_CFA, offset * self._cie.data_factor)
            elif kind == 0xC0:  # DW_CFA_restore
                self._restore(low)
            elif low in _ADVANCES:
                (delta,) = struct.unpack_from(_ADVANCES[low], program, at)
                at += struct.calcsize(_ADVANCES[low])
                place += delta * self._cie.code_factor
            else:
                operands = []
                for read in _OPERANDS[low]:
                    operand, at = read(program, at)
                    operands.append(operand)
                self._apply(low, operands)
            if place > address:
                return

    def _apply(self, code: int, operands: list[Any]) -> None:
        if code in _SIGNED:
            operands[-1] *= self._cie.data_factor
        if code in _OF_CFA:
            self._cfa = _OF_CFA[code](self._cfa, operands)
        elif code in _OF_REGISTER:
            if operands[0] > _MAX_REGISTERS:
                raise CannotUnwind
            self._of[operands[0]] = (_OF_REGISTER[code], operands[-1])
        elif code == 0x06:  # DW_CFA_restore_extended
            self._restore(operands[0])
        elif code == 0x08:  # DW_CFA_same_value
            self._of.pop(operands[0], None)
        elif code == 0x0A:  # DW_CFA_remember_state
            if len(self._remembered) == _MAX_REMEMBERED:
                raise CannotUnwind
            self._remembered.append((self._cfa, dict(self._of)))
        elif code == 0x0B:  # DW_CFA_restore_state
            self._cfa, self._of = self._remembered.pop()

    def _restore(self, number: int) -> None:
        self._of.pop(number, None)
        if number in self._initial:
            self._of[number] = self._initial[number]


def _register_and_offset(cfa: Rule) -> tuple[int, int]:
    kind, what = cfa
    if kind != _REGISTER:
        raise CannotUnwind
    number, offset = what
    return number, offset


def _value(kind: int, what: Any, cfa: int, registers: dict[int, int], word: Word) -> int:  # noqa: ANN401 - see Rule
    if kind == _AT_CFA:
        return word(cfa + what & _MASK)
    if kind == _IS_CFA:
        return int(cfa + what & _MASK)
    if kind == _REGISTER:
        return registers[what]
    value = _evaluate(what, registers, word, [cfa])
    return word(value) if kind == _AT_EXPRESSION else value


def _evaluate(expression: bytes, registers: dict[int, int], word: Word, stack: list[int]) -> int:
    """Evaluate an expression without jumps; signal frames and procedure linkage tables use none."""
    at = 0
    while at < len(expression):
        code = expression[at]
        at += 1
        if 0x70 <= code <= 0x8F:  # DW_OP_breg0 to 31
            offset, at = _signed(expression, at)
            stack.append(registers[code - 0x70] + offset & _MASK)
        elif 0x30 <= code <= 0x4F:  # DW_OP_lit0 to 31
            stack.append(code - 0x30)
        elif code in _CONSTANTS:
            (value,) = struct.unpack_from(_CONSTANTS[code], expression, at)
            at += struct.calcsize(_CONSTANTS[code])
            stack.append(value & _MASK)
        elif code == 0x23:  # DW_OP_plus_uconst
            value, at = _unsigned(expression, at)
            stack.append(stack.pop() + value & _MASK)
        elif code == 0x06:  # DW_OP_deref
            stack.append(word(stack.pop()))
        elif code in _BINARY_OPERATIONS:
            second, first = stack.pop(), stack.pop()
            stack.append(_BINARY_OPERATIONS[code](first, second) & _MASK)
        else:
            raise CannotUnwind
    return stack[-1]


def _as_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    """Parse an unsigned LEB128 (DWARF 5, 7.6); return its value and end."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if shift >= 7 * _MAX_LEB128_BYTES:
            raise CannotUnwind
    return value | data[at] << shift, at + 1


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, end = _unsigned(data, at)
    bits = 7 * (end - at)
    return (value - (1 << bits) if value >> (bits - 1) else value), end


def _block(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _unsigned(data, at)
    if at + size > len(data):
        raise CannotUnwind
    return data[at : at + size], at + size


_ADVANCES = {0x02: "<B", 0x03: "<H", 0x04: "<I"}  # DW_CFA_advance_loc1, 2 and 4
_OPERANDS: dict[int, tuple[Callable[[bytes, int], tuple[Any, int]], ...]] = {
    0x00: (),  # DW_CFA_nop
    0x05: (_unsigned, _unsigned),  # DW_CFA_offset_extended
    0x06: (_unsigned,),
    0x07: (_unsigned,),  # DW_CFA_undefined
    0x08: (_unsigned,),
    0x09: (_unsigned, _unsigned),  # DW_CFA_register
    0x0A: (),
    0x0B: (),
    0x0C: (_unsigned, _unsigned),
    0x0D: (_unsigned,),
    0x0E: (_unsigned,),
    0x0F: (_block,),
    0x10: (_unsigned, _block),  # DW_CFA_expression
    0x11: (_unsigned, _signed),  # DW_CFA_offset_extended_sf
    0x12: (_unsigned, _signed),
    0x13: (_signed,),
    0x14: (_unsigned, _unsigned),  # DW_CFA_val_offset
    0x15: (_unsigned, _signed),  # DW_CFA_val_offset_sf
    0x16: (_unsigned, _block),  # DW_CFA_val_expression
    0x2E: (_unsigned,),  # DW_CFA_GNU_args_size, ignored
}
_SIGNED = (0x05, 0x11, 0x12, 0x13, 0x14, 0x15)  # the last operand is a multiple of the CIE's data factor
_OF_CFA: dict[int, Callable[[Rule, list[Any]], Rule]] = {
    0x0C: lambda _, operands: (_REGISTER, tuple(operands)),  # DW_CFA_def_cfa
    0x0D: lambda was, operands: (_REGISTER, (operands[0], _register_and_offset(was)[1])),  # DW_CFA_def_cfa_register
    0x0E: lambda was, operands: (_REGISTER, (_register_and_offset(was)[0], operands[0])),  # DW_CFA_def_cfa_offset
    0x0F: lambda _, operands: (_IS_EXPRESSION, operands[0]),  # DW_CFA_def_cfa_expression
    0x12: lambda _, operands: (_REGISTER, tuple(operands)),  # DW_CFA_def_cfa_sf
    0x13: lambda was, operands: (_REGISTER, (_register_and_offset(was)[0], operands[0])),  # DW_CFA_def_cfa_offset_sf
}
_OF_REGISTER = {
    0x05: _AT_CFA,
    0x07: _UNDEFINED,
    0x09: _REGISTER,
    0x10: _AT_EXPRESSION,
    0x11: _AT_CFA,
    0x14: _IS_CFA,
    0x15: _IS_CFA,
    0x16: _IS_EXPRESSION,
}
_CONSTANTS = {0x08: "<B", 0x09: "<b", 0x0A: "<H", 0x0B: "<h", 0x0C: "<I", 0x0D: "<i", 0x0E: "<Q", 0x0F: "<q"}
_BINARY_OPERATIONS: dict[int, Callable[[int, int], int]] = {
    0x1A: lambda first, second: first & second,
    0x1C: lambda first, second: first - second,
    0x21: lambda first, second: first | second,
    0x22: lambda first, second: first + second,
    0x24: lambda first, second: first << min(second, 64),
    0x25: lambda first, second: first >> min(second, 64),
    0x2A: lambda first, second: _as_signed(first) >= _as_signed(second),
    0x2D: lambda first, second: _as_signed(first) < _as_signed(second),
}
