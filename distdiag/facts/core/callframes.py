"""Where the caller of a frame is: the call frame information of x86-64 that a compiler leaves for exceptions.

Formats: DWARF 5, sections 6.4 (the table and its instructions), 2.5 (expressions) and 7.7 (their codes); what .eh_frame
makes of it: Linux Standard Base 5, 10.6. Numbers of registers: System V ABI, AMD64 supplement, 3.6.2.

Nothing here knows where the bytes come from, and none of them is trusted: what cannot be is `NoRules`.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Rule = tuple[int, Any]
    """One of the kinds below, and its number or expression."""
    Word = Callable[[int], int]
    """Gives the word of 8 bytes that lay at an address; raises NoRules where nobody knows it."""

STACK_POINTER, RETURN_ADDRESS = 7, 16
_KEPT_BY_CALLS = (3, 6, 12, 13, 14, 15)  # rbx, rbp, r12 to r15

_AT_CFA, _IS_CFA, _REGISTER, _AT_EXPRESSION, _IS_EXPRESSION, _UNDEFINED = range(6)
_MASK = (1 << 64) - 1
_LONGEST_NUMBER = 10  # bytes of a LEB128 of 64 bits
_MOST_REGISTERS, _MOST_KEPT = 128, 64
_POINTERS = {0x0: "<Q", 0x2: "<H", 0x3: "<I", 0x4: "<Q", 0xA: "<h", 0xB: "<i", 0xC: "<q"}
_RELATIVE_TO_ITSELF = 0x10


class NoRules(Exception):
    """Nothing tells who called: there is no table for this place, it is damaged, or it wants what is not known here."""


class Common:
    """What many functions share (a CIE): `signal`: what it describes is no call, but was put there by the kernel."""

    __slots__ = ("code_factor", "data_factor", "pointers", "program", "signal")

    def __init__(self, content: bytes) -> None:
        """Read it; `content` is what follows its length and its id."""
        try:
            self._read(content)
        except (LookupError, ValueError, struct.error) as error:
            raise NoRules from error

    def _read(self, content: bytes) -> None:
        version, end = content[0], content.index(0, 1)
        letters = content[1:end].decode("ascii")
        self.code_factor, at = _unsigned(content, end + 1)
        self.data_factor, at = _signed(content, at)
        column, at = (content[at], at + 1) if version == 1 else _unsigned(content, at)
        if version not in (1, 3) or column != RETURN_ADDRESS or not letters.startswith("z"):
            raise NoRules
        size, at = _unsigned(content, at)
        self.program = content[at + size :]
        self.signal, self.pointers = "S" in letters, 0
        for letter in letters[1:]:
            if letter == "R":
                self.pointers = content[at]
            elif letter == "P":  # the function that handles exceptions
                at += struct.calcsize(_POINTERS[content[at] & 0xF])
            elif letter not in "LS":
                raise NoRules
            at += letter in "RPL"


class Function:
    """What is known of one piece of code (an FDE): from `begin` on, up to `end`."""

    __slots__ = ("_program", "begin", "common", "end")

    def __init__(self, common: Common, content: bytes, address: int) -> None:
        """Read it; `content` is what follows its length and its reference to `common`, and lies at `address`."""
        try:
            form = _POINTERS[common.pointers & 0xF]
            width = struct.calcsize(form)
            (begin,) = struct.unpack_from(form, content)
            (size,) = struct.unpack_from(form.upper() if width < 8 else "<Q", content, width)
            skipped, at = _unsigned(content, 2 * width)
        except (LookupError, struct.error) as error:
            raise NoRules from error
        if common.pointers & ~0xF not in (0, _RELATIVE_TO_ITSELF):
            raise NoRules
        self.begin = begin + (address if common.pointers & _RELATIVE_TO_ITSELF else 0) & _MASK
        self.end = self.begin + size
        self.common = common
        self._program = content[at + skipped :]

    def rules(self, address: int) -> Rules:
        """Give the rules that hold before the instruction at `address` runs."""
        rules = Rules(self.common)
        try:
            rules.follow(self.common.program, self.begin, _MASK)
            rules.begin()
            rules.follow(self._program, self.begin, address)
        except (LookupError, struct.error) as error:
            raise NoRules from error
        return rules


class Rules:
    """How the caller's registers are found: one row of the table that a function's instructions make."""

    def __init__(self, common: Common) -> None:
        self._common = common
        self._cfa: Rule = (_UNDEFINED, 0)
        self._of: dict[int, Rule] = {}
        self._at_begin: dict[int, Rule] = {}
        self._kept: list[tuple[Rule, dict[int, Rule]]] = []

    @property
    def outermost(self) -> bool:
        """Whether this says that nobody called: the thread began here."""
        return self._of.get(RETURN_ADDRESS, (None,))[0] == _UNDEFINED

    def begin(self) -> None:
        """Keep what the common part says: DW_CFA_restore goes back to it."""
        self._at_begin = dict(self._of)

    def callers(self, registers: dict[int, int], word: Word) -> dict[int, int]:
        """Give the registers as the caller will find them; what is not known is not among them."""
        try:
            cfa = self._frame_address(registers, word)
            kept = registers if self._common.signal else _KEPT_BY_CALLS
            found = {number: registers[number] for number in kept if number in registers}
            found.pop(RETURN_ADDRESS, None)
            found[STACK_POINTER] = cfa
            for number, (kind, what) in self._of.items():
                if kind == _UNDEFINED:
                    found.pop(number, None)
                else:
                    found[number] = _value(kind, what, cfa, registers, word)
        except (LookupError, struct.error) as error:
            raise NoRules from error
        return found

    def _frame_address(self, registers: dict[int, int], word: Word) -> int:
        kind, what = self._cfa
        if kind == _IS_EXPRESSION:
            return _evaluate(what, registers, word, [])
        number, offset = _pair(self._cfa)
        return registers[number] + offset & _MASK

    def follow(self, program: bytes, place: int, address: int) -> None:
        """Carry out instructions, which begin at `place`, up to those that hold for what comes after `address`."""
        at = 0
        while at < len(program):
            kind, low = program[at] & 0xC0, program[at] & 0x3F
            at += 1
            if kind == 0x40:  # DW_CFA_advance_loc
                place += low * self._common.code_factor
            elif kind == 0x80:  # DW_CFA_offset
                offset, at = _unsigned(program, at)
                self._of[low] = (_AT_CFA, offset * self._common.data_factor)
            elif kind == 0xC0:  # DW_CFA_restore
                self._restore(low)
            elif low in _ADVANCES:
                (delta,) = struct.unpack_from(_ADVANCES[low], program, at)
                at += struct.calcsize(_ADVANCES[low])
                place += delta * self._common.code_factor
            else:
                operands = []
                for read in _OPERANDS[low]:
                    operand, at = read(program, at)
                    operands.append(operand)
                self._obey(low, operands)
            if place > address:
                return

    def _obey(self, code: int, operands: list[Any]) -> None:
        if code in _SIGNED:
            operands[-1] *= self._common.data_factor
        if code in _OF_CFA:
            self._cfa = _OF_CFA[code](self._cfa, operands)
        elif code in _OF_REGISTER:
            if operands[0] > _MOST_REGISTERS:
                raise NoRules
            self._of[operands[0]] = (_OF_REGISTER[code], operands[-1])
        elif code == 0x06:  # DW_CFA_restore_extended
            self._restore(operands[0])
        elif code == 0x08:  # DW_CFA_same_value
            self._of.pop(operands[0], None)
        elif code == 0x0A:  # DW_CFA_remember_state
            if len(self._kept) == _MOST_KEPT:
                raise NoRules
            self._kept.append((self._cfa, dict(self._of)))
        elif code == 0x0B:  # DW_CFA_restore_state
            self._cfa, self._of = self._kept.pop()

    def _restore(self, number: int) -> None:
        self._of.pop(number, None)
        if number in self._at_begin:
            self._of[number] = self._at_begin[number]


def _pair(cfa: Rule) -> tuple[int, int]:
    """Give register and offset of a rule that has them."""
    kind, what = cfa
    if kind != _REGISTER:
        raise NoRules
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
    """Carry out an expression without jumps: those of signal frames and of procedure linkage tables have none."""
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
        elif code in _OF_TWO:
            second, first = stack.pop(), stack.pop()
            stack.append(_OF_TWO[code](first, second) & _MASK)
        else:
            raise NoRules
    return stack[-1]


def _as_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned LEB128 (DWARF 5, 7.6); it and where it ends."""
    value = shift = 0
    while data[at] & 0x80:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if shift >= 7 * _LONGEST_NUMBER:
            raise NoRules
    return value | data[at] << shift, at + 1


def _signed(data: bytes, at: int) -> tuple[int, int]:
    value, end = _unsigned(data, at)
    bits = 7 * (end - at)
    return (value - (1 << bits) if value >> (bits - 1) else value), end


def _block(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = _unsigned(data, at)
    if at + size > len(data):
        raise NoRules
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
    0x2E: (_unsigned,),  # DW_CFA_GNU_args_size, of no use here
}
_SIGNED = (0x05, 0x11, 0x12, 0x13, 0x14, 0x15)  # their last operand counts in the common factor
_OF_CFA: dict[int, Callable[[Rule, list[Any]], Rule]] = {
    0x0C: lambda _, operands: (_REGISTER, tuple(operands)),  # DW_CFA_def_cfa
    0x0D: lambda was, operands: (_REGISTER, (operands[0], _pair(was)[1])),  # DW_CFA_def_cfa_register
    0x0E: lambda was, operands: (_REGISTER, (_pair(was)[0], operands[0])),  # DW_CFA_def_cfa_offset
    0x0F: lambda _, operands: (_IS_EXPRESSION, operands[0]),  # DW_CFA_def_cfa_expression
    0x12: lambda _, operands: (_REGISTER, tuple(operands)),  # DW_CFA_def_cfa_sf
    0x13: lambda was, operands: (_REGISTER, (_pair(was)[0], operands[0])),  # DW_CFA_def_cfa_offset_sf
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
_OF_TWO: dict[int, Callable[[int, int], int]] = {
    0x1A: lambda first, second: first & second,
    0x1C: lambda first, second: first - second,
    0x21: lambda first, second: first | second,
    0x22: lambda first, second: first + second,
    0x24: lambda first, second: first << min(second, 64),
    0x25: lambda first, second: first >> min(second, 64),
    0x2A: lambda first, second: _as_signed(first) >= _as_signed(second),
    0x2D: lambda first, second: _as_signed(first) < _as_signed(second),
}
