"""Damaged input: bytes changed as files, disks and liars change them, and distdiag run on each in one forked child.

A case passes when the command ends in time with an exit status of the contract, no traceback and bounded memory.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fork_server import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PER_READER = int(os.environ.get("DISTDIAG_FUZZ", "40"))
"""Damaged inputs per reader, always the same; set DISTDIAG_FUZZ=5000 for a long run by hand."""
SECONDS = 30
MEMORY_BYTES = 512 * 2**20
"""How much more memory than before a reader may have needed, whatever it was given."""
_NUMBERS = (b"-1", b"0", b"1e999", b"-1e999", b"NaN", b"Infinity", b"9" * 400, b"18446744073709551616", b"1.5", b"-0")
_WORDS = (b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"', b'"\\u0000"', b'"\\u001b]0;owned\\u0007"', b"[[]]")
_PIECES = (
    b"\x1b]0;owned\x07",
    b"\x1b[2J\x1b[31m",
    b"\xff\xfe\x00",
    b"\xed\xa0\x80",
    b"\x00" * 64,
    b"\r\n\r\n",
    b"%s%n{0}[rank0]",
    b"\xe2\x80\xae\xe2\x80\xa8",
)


def damaged(original: bytes, count: int = PER_READER, *, seed: int = 20) -> Iterator[tuple[str, bytes]]:
    """Yield `count` (how it was damaged, the damaged bytes), the same ones for the same arguments."""
    ways = (
        _flip,
        _flip,
        _cut,
        _drop,
        _repeat,
        _number,
        _number,
        _word,
        _word,
        _piece,
        _swap_lines,
        _nest,
        _long,
        _none,
    )
    dice = random.Random(seed)
    for number in range(count):
        data, names = original, []
        for _ in range(dice.choice((1, 1, 1, 2, 4))):
            way = dice.choice(ways)
            data = way(data, dice)
            names.append(way.__name__.strip("_"))
        yield f"{number}: {' + '.join(names)}", data


_INTS = (0, -1, 1, 7, 255, 65536, 10**9, 2**31, 2**53, 2**63, 2**64 - 1, 10**30)
_FLOATS = (0.0, -1.0, 1e-9, 1e9, 1e18, 1e300, -1e300)
_TEXTS = (
    "",
    " ",
    "0",
    "-1",
    "\n",
    "\x1b[2J",
    "[rank0]",
    "%s{0}",
    "a" * 5000,
    "/",
    "..",
    "9" * 30,
    "10.0.0.1/99",
    "\u202e",
)


def misleading(json_text: bytes, dice: random.Random) -> bytes:
    """Change some values of one JSON document into others of the same type: what a decoder cannot object to."""
    document = json.loads(json_text)
    places: list[tuple[Any, Any]] = []
    todo = [document]
    while todo:
        holder = todo.pop()
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            places.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                todo.append(holder[key])
    texts = [holder[key] for holder, key in places if isinstance(holder[key], str)] or [""]
    for _ in range(dice.choice((1, 1, 2, 4, 16))):
        holder, key = dice.choice(places)
        if isinstance(holder, dict) or key < len(holder):
            holder[key] = _another(holder[key], texts, dice)
    return json.dumps(document).encode()


def _another(value: Any, texts: list[str], dice: random.Random) -> Any:  # noqa: ANN401 - any JSON
    choices: dict[type, tuple[Any, ...]] = {
        bool: (not value,),
        int: (*_INTS, value + 1, -value) if isinstance(value, int) else (),
        float: (*_FLOATS, -value) if isinstance(value, float) else (),
        str: (*_TEXTS, dice.choice(texts)),
        list: ([], value * 2, value[:1], value[::-1], value[:-1]) if isinstance(value, list) else (),
        dict: ({}, {**value, "other": next(iter(value.values()), 0)}) if isinstance(value, dict) else (),
        type(None): (0, "", [], None),
    }
    return dice.choice(choices[type(value)])


def _flip(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 8, 64))):
        if changed:
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _cut(data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def _span(data: bytes, dice: random.Random) -> tuple[int, int]:
    start = dice.randrange(len(data) + 1)
    return start, min(len(data), start + dice.choice((1, 4, 32, 512, 8192)))


def _drop(data: bytes, dice: random.Random) -> bytes:
    start, end = _span(data, dice)
    return data[:start] + data[end:]


def _repeat(data: bytes, dice: random.Random) -> bytes:
    start, end = _span(data, dice)
    return data[:start] + data[start:end] * dice.choice((2, 5, 50)) + data[end:]


def _replace(data: bytes, pattern: bytes, new: bytes, dice: random.Random) -> bytes:
    places = list(re.finditer(pattern, data[: 2**18]))
    if not places:
        return _piece(data, dice)
    place = dice.choice(places)
    return data[: place.start()] + new + data[place.end() :]


def _number(data: bytes, dice: random.Random) -> bytes:
    return _replace(data, rb"-?\d+(\.\d+)?", dice.choice(_NUMBERS), dice)


def _word(data: bytes, dice: random.Random) -> bytes:
    """Put something of another type in the place of a JSON string, number, list or object that nests no further."""
    value = rb'"(?:[^"\\]|\\.)*"(?!\s*:)|-?\d+(?:\.\d+)?|true|false|null|\[[^][{}]*\]|\{[^][{}]*\}'
    return _replace(data, value, dice.choice((*_WORDS, *_NUMBERS)), dice)


def _piece(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(_PIECES) + data[at:]


def _swap_lines(data: bytes, dice: random.Random) -> bytes:
    lines = data.split(b"\n")
    one, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


def _nest(data: bytes, dice: random.Random) -> bytes:
    deep = dice.choice((b"[", b'{"a":', b"(", b"[[{")) * dice.choice((1000, 100_000))
    return _replace(data, rb'-?\d+|"[^"\\]*"(?!\s*:)', deep, dice)


def _long(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice((b"a", b"1", b"\\", b'"', b" ", b"/")) * dice.choice((5000, 300_000)) + data[at:]


def _none(data: bytes, dice: random.Random) -> bytes:
    return dice.choice((b"", b"\n", b"\x00", b"{}", b"[]", b"null", data + data))


@dataclass(frozen=True)
class Outcome:
    """How one case ended."""

    name: str
    code: int
    seconds: float
    grown_bytes: int
    said: str
    """The end of stdout and stderr, where the case failed."""

    @property
    def failed(self) -> bool:
        """Whether it broke the contract."""
        late = self.seconds > SECONDS or self.grown_bytes > MEMORY_BYTES
        return late or self.code not in (0, 1, 2, 3) or bool(self.said)


def run_each(cases: Iterator[tuple[str, list[str], Callable[[], None]]]) -> list[Outcome]:
    """Run `distdiag ARGUMENTS` for each (name, arguments, what to prepare) in one forked child, one after another.

    A case that takes the child down (a crash, a signal) ends the list with it.
    """

    def main_of(arguments: list[str], prepare: Callable[[], None]) -> Callable[[], None]:
        def work() -> None:
            from distdiag.cli import main

            prepare()
            sys.argv = ["distdiag", *arguments]
            main()

        return work

    return run_calls((name, main_of(arguments, prepare)) for name, arguments, prepare in cases)


def run_calls(cases: Iterator[tuple[str, Callable[[], None]]]) -> list[Outcome]:
    """Call each (name, call) in one forked child; its output, exception or exit status is judged like a command's."""
    before = set(sys.modules)
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(ours)
            os.setpgid(0, 0)
            with os.fdopen(theirs, "w") as pipe:
                _run_all(cases, pipe)
                pipe.write(json.dumps([*sys.modules.keys() - before]))
        except BaseException:  # noqa: BLE001 - the child never returns into the tests
            traceback.print_exc()
            os._exit(70)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        said = [json.loads(line) for line in pipe]
    outcomes = [Outcome(**one) for one in said if isinstance(one, dict)]
    load([name for one in said if isinstance(one, list) for name in one])  # no later child has to import it
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        outcomes.append(Outcome("the child itself", status, 0.0, 0, f"ended with {status} after {len(outcomes)} cases"))
    return outcomes


def assert_survived(outcomes: list[Outcome], count: int = PER_READER) -> None:
    """Assert that every case ran and kept the contract."""
    bad = [outcome for outcome in outcomes if outcome.failed]
    shown = "\n".join(
        f"{one.name}: {one.code}, {one.seconds:.1f} s, +{one.grown_bytes} B: {one.said}" for one in bad[:5]
    )
    assert not bad, f"{len(bad)} of {len(outcomes)}:\n{shown}"
    assert len(outcomes) == count


def _run_all(cases: Iterator[tuple[str, Callable[[], None]]], pipe: io.TextIOBase) -> None:
    def too_late(*_: object) -> None:
        raise TimeoutError(f"still at work after {SECONDS} s")

    signal.signal(signal.SIGALRM, too_late)
    stdout, stderr, before = sys.stdout, sys.stderr, _peak()
    for name, work in cases:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            sys.stdout = io.TextIOWrapper(os.fdopen(os.dup(out.fileno()), "wb"), "utf-8", write_through=True)
            sys.stderr = io.TextIOWrapper(
                os.fdopen(os.dup(err.fileno()), "wb"), "utf-8", "backslashreplace", write_through=True
            )
            began = time.monotonic()
            signal.alarm(SECONDS + 5)
            code = _ended(work)
            signal.alarm(0)
            took = time.monotonic() - began
            printed, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), stdout, stderr
            for stream in printed:
                stream.close()
            outcome = Outcome(name, code, took, max(0, _peak() - before), _wrong(_all(out), _all(err)))
        pipe.write(json.dumps(asdict(outcome)) + "\n")
        pipe.flush()


def _ended(main: Callable[[], None]) -> int:
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - whatever comes out here is what the test is about
        traceback.print_exc()
        return 70
    return 0


def _wrong(out: bytes, err: bytes) -> str:
    """Quote what must not be printed: a traceback, or bytes that command the terminal."""
    both = out + b"\n" + err
    if b"Traceback (most recent call last)" in both or b"bug in distdiag" in both:
        return both[-1500:].decode("utf-8", "backslashreplace")
    commands = re.search(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]", re.sub(rb"\x1b\[[0-9;]*m", b"", both))
    if commands:
        around = both[max(0, commands.start() - 60) : commands.end() + 60]
        return f"a control character was printed: {around!r}"
    return ""


def _all(file: io.IOBase) -> bytes:
    file.seek(0)
    data = file.read()
    assert isinstance(data, bytes)
    return data


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
