"""C stacks of a core by gdb, loading symbols only of libraries on a stack.

By default gdb loads the symbols of all libraries, which takes seconds with torch, even for one thread.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from distdiag.facts import carried_tools, programs
from distdiag.facts.core.stacks import MAX_FRAMES, Frame, Stacks, ThreadStack
from distdiag.facts.text import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_SETTINGS = (
    *("auto-load off", "pagination off", "width 0", "height 0", "confirm off", "style enabled off"),
    *("print frame-arguments none", "print frame-arguments presence", "print entry-values no"),
    *("print thread-events off", "print inferior-events off", "filename-display absolute", "demangle-style gnu-v3"),
    f"backtrace limit {MAX_FRAMES}",
)
"""No code from the program runs (auto-load) and values are hidden. gdb ignores unknown settings."""
_NO_LIBRARIES = 'python gdb.execute("set auto-solib-add off")'
"""A gdb without Python rejects this command and loads all libraries."""
_READ_NEEDED_LIBRARIES = """python
import re
def unread(known):
    try:
        frame = gdb.newest_frame()
        while frame is not None:
            name = gdb.solib_name(frame.pc())
            if name and name not in known:
                return name
            frame = frame.older()
    except gdb.error:
        return None
def read_all():
    known = set()
    for thread in gdb.selected_inferior().threads():
        if thread.num <= {last}:
            thread.switch()
            name = unread(known)
            while name:
                known.add(name)
                gdb.execute("sharedlibrary ^" + re.sub(r"([][.*^$\\\\])", r"\\\\\\1", name) + "$", to_string=True)
                name = unread(known)
read_all()
"""
"""A loaded library may reveal further frames, and those further libraries."""
_HARMFUL = ("PYTHONHOME", "PYTHONPATH")  # gdb embeds its own Python
_HEADER = re.compile(r'Thread \d+ \(.*?\b(?:LWP|process) (?P<tid>\d+)\)?(?: "(?P<name>.*)")?\)+:')
_FRAME = re.compile(
    r"#\d+ +(?:0x[0-9a-f]+ in )?(?P<function>.+?)(?: \((?:\.\.\.|[^ ]+=\.\.\.(?:, [^ ]+=\.\.\.)*)?\))?"
    r"(?: at (?P<file>.+):(?P<line>\d+)| from (?P<module>.+))?"
)
_DOUBTS = re.compile(r"may not match|is newer than|past end of file|truncated|not a core dump|No such file|ptrace")


def of_core(core: str, executable: str, *, timeout_s: float, only_first: bool = False) -> Stacks:
    """Read the C stacks of a core; `only_first`: only its first thread, which crashed."""
    tool = carried_tools.find("gdb")
    if tool is None:
        return Stacks("gdb", (), "gdb is not installed", 0.0)
    before = [*(f"set {setting}" for setting in _SETTINGS), _NO_LIBRARIES]
    after = [
        _READ_NEEDED_LIBRARIES.replace("{last}", "1" if only_first else "1e9"),
        f"thread apply {'1' if only_first else 'all -ascending'} bt",
    ]
    target = [os.path.realpath(executable), os.path.abspath(core)]
    argv = [tool, "-batch", "-nx", *_each("-iex", before), *target, *_each("-ex", after)]
    environment = {name: value for name, value in os.environ.items() if name not in _HARMFUL}
    environment.update(LC_ALL="C", DEBUGINFOD_URLS="")
    try:
        done = programs.run(argv, timeout_s=timeout_s, env=environment)
    except programs.CannotRun as error:
        return Stacks("gdb", (), str(error), 0.0)
    threads = parse(done.stdout.decode("utf-8", "replace"))
    return Stacks("gdb", threads, _why(done, bool(threads), timeout_s), done.elapsed_s)


def parse(text: str) -> tuple[ThreadStack, ...]:
    """Parse the output of `thread apply ... bt`, ignoring an incomplete last line."""
    found: list[ThreadStack] = []
    for line in text.split("\n")[:-1]:
        header, frame = _HEADER.fullmatch(line), _FRAME.fullmatch(line)
        if header:
            found.append(ThreadStack(int(header["tid"]), printable(header["name"] or ""), (), None))
        elif frame and found:
            found[-1] = replace(found[-1], frames=(*found[-1].frames, _frame(frame)))
    return tuple(replace(thread, frames=_without_guesses(thread.frames)) for thread in found)


def _without_guesses(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Drop the callers outside any file that gdb guesses at the end of a stack it cannot follow."""
    count = len(frames)
    while count > 1 and frames[count - 1].function == "??" and not frames[count - 1].module:
        count -= 1
    return frames[:count]


def _each(option: str, words: Sequence[str]) -> list[str]:
    return [text for word in words for text in (option, word)]


def _why(done: programs.Done, has_threads: bool, timeout_s: float) -> str:
    if done.timed_out:
        return f"gdb did not {'finish' if has_threads else 'answer'} within {timeout_s:g} s"
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    # "76<tab>strlen.S: No such file" is only about the source.
    complaints = [printable(line) for line in lines if line.strip() and not re.match(r"\d+\t", line)]
    doubt = next((line for line in complaints if _DOUBTS.search(line)), "")
    if doubt or has_threads:
        return doubt[:300]
    return f"gdb: {complaints[-1][:300]}" if complaints else "gdb found no threads"


def _frame(match: re.Match[str]) -> Frame:
    number = match["line"]
    return Frame(
        language="c",
        function=printable(match["function"]).removeprefix("__GI_"),  # glibc's prefix for internal calls
        file=printable(match["file"] or ""),
        line=int(number) if number else None,
        module=printable(match["module"] or ""),
    )
