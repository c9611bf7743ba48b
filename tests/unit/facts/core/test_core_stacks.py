"""Stacks of Python and C frames: what gdb and pystack say alone, where that is wrong, and that ours is right."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
import venv
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from cores import cores_in, make_core, names_its_functions, need_cores
from loops import each
from support import need
from support_warm import distdiag

from distdiag.cluster import bundle
from distdiag.facts import programs
from distdiag.facts.core import core_file, pystack, source_lines, stacks, unwinder
from distdiag.facts.core.binary import Functions
from distdiag.facts.core.call_frames import CannotUnwind
from distdiag.facts.core.source_lines import has_debug_information
from distdiag.facts.core.stacks import Frame, Stacks, ThreadStack
from distdiag.facts.core.unwinder import CFrames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RECORDED = Path(__file__).parents[3] / "recorded" / "core_stacks"
PROGRAM = os.path.realpath(sys.executable)
GUILTY = """
void fail(void) __attribute__((noreturn));
__attribute__((noreturn, noinline, aligned(1))) void guilty(void) { fail(); }
__attribute__((noinline, aligned(1))) int innocent(int x) { return x + 1; }
int start(int x) { if (x) guilty(); return innocent(x); }
"""
"""guilty() ends with a call, so that what it returns to is where innocent() begins."""
FAIL = "void abort(void); void fail(void) { abort(); }"
LIBRARIES = {
    "ends_in_a_call": (GUILTY, FAIL),
    "dies_at_its_end": ("void abort(void); __attribute__((destructor)) static void at_end(void) { abort(); }", ""),
    # Its unwind information marks the caller's frame as undefined.
    "without_a_stack": (
        '__asm__(".globl outer\\nouter: .cfi_startproc\\nsub $8,%rsp\\n.cfi_adjust_cfa_offset 8\\n"'
        '".cfi_undefined %rsp\\ncall abort@PLT\\n.cfi_endproc");',
        "",
    ),
    "goes_deep": (
        "void abort(void); int deep(volatile int n) { int x; if (!n) abort(); x = deep(n - 1); return x + n; }",
        "",
    ),
    "with_lines": (
        "void abort(void);\nstatic inline int inlined(int x) { if (x) abort(); return x; }\n"
        "int outer(int x) { return inlined(x) + 1; }",
        "",
    ),
    "in_a_c_thread": (
        "#include <pthread.h>\nstatic void *run(void *x) { ((void (*)(void)) 0xDEAD0)(); return x; }\n"
        "void start(void) { pthread_t t; pthread_create(&t, 0, run, 0); }",
        "",
    ),
    # The handler runs on memory of outer: above the interrupted frame, unlike any callee's stack.
    "on_a_stack_above": (
        "#define _GNU_SOURCE\n#include <signal.h>\n#include <stdlib.h>\nstatic void handle(int n) { abort(); }\n"
        "__attribute__((noinline)) static int work(void) { return raise(SIGUSR1) + 1; }\n"
        "int outer(void) { char above[1 << 16]; stack_t own = {.ss_sp = above, .ss_size = sizeof above};\n"
        "struct sigaction act = {.sa_handler = handle, .sa_flags = SA_ONSTACK};\n"
        "sigaltstack(&own, 0); sigaction(SIGUSR1, &act, 0); return work() + above[0]; }",
        "",
    ),
}


def read_pystack(name: str) -> Stacks:
    threads, error = pystack.parse((RECORDED / f"pystack_{name}.json").read_text(), Functions(()))
    return Stacks("pystack", threads, error, 0.0)


def shown(frames: Sequence[Frame]) -> list[str]:
    """Write the essential frames short, those of Python in brackets."""
    return [f"[{one.function}]" if one.language == "python" else one.function for one in stacks.essential(frames)]


def c(*functions: str) -> list[Frame]:
    return c_in("", *functions)


def c_in(module: str, *functions: str) -> list[Frame]:
    return [Frame("c", name, "", None, module) for name in functions]


def python(*names: str) -> list[Frame]:
    return [Frame("python", name, "train.py", 1, "", entry=name == names[-1]) for name in names]


@pytest.fixture(scope="module")
def needs_both() -> None:
    """Skip where gdb or pystack is missing; fail where all is promised."""
    need("gdb")
    if importlib.util.find_spec("pystack") is None:
        if os.environ.get("DISTDIAG_TESTS_REQUIRE_ALL"):
            pytest.fail("required here and not installed: pystack")
        pytest.skip("not installed: pystack")


@pytest.fixture(scope="module")
def core_of(needs_both: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make each core once."""
    made: dict[str, Path] = {}
    native = tmp_path_factory.mktemp("native")

    def core(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = _die(name, folder) if name in PROGRAMS else make_core(name, folder, str(native))
        return made[name]

    return core


PROGRAMS = {
    "jumps_nowhere": "import ctypes\ndef jump(): ctypes.CFUNCTYPE(None)(0xDEAD0)()\njump()",
    "ends_in_a_call": "import ctypes\ndef call(): ctypes.CDLL('./libcheck.so').start(1)\ncall()",
    "in_a_handler": "import ctypes\nlibc = ctypes.CDLL(None)\n"
    "@ctypes.CFUNCTYPE(None, ctypes.c_int)\ndef handle(number): ctypes.string_at(0xDEAD0)\n"
    "libc.signal(10, handle)\ndef work(): libc['raise'](10)\nwork()",
    "frees_twice": "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.free.argtypes = [ctypes.c_void_p]\n"
    "data = ctypes.create_string_buffer(100)\nlibc.free(ctypes.addressof(data) + 16)",
    "many_threads": "import os, threading\nlock = threading.Lock()\nlock.acquire()\n"
    "for _ in range(100): threading.Thread(target=lock.acquire, daemon=True).start()\nos.abort()",
    "calls_back": "import ctypes\nlibc = ctypes.CDLL(None)\n"
    "@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)\n"
    "def compare(a, b): ctypes.string_at(0xDEAD0)\nlibc.qsort((ctypes.c_int * 3)(3, 2, 1), 3, 4, compare)",
    "dies_at_its_end": "import ctypes\nctypes.CDLL('./libcheck.so')",
    "without_a_stack": "import ctypes\nctypes.CDLL('./libcheck.so').outer()",
    "on_a_stack_above": "import ctypes\nctypes.CDLL('./libcheck.so').outer()",
    "with_lines": "import ctypes\nctypes.CDLL('./libcheck.so').outer(1)",
    "goes_deep": "import ctypes\nctypes.CDLL('./libcheck.so').deep(5000)",
    "in_a_c_thread": "import ctypes, time\ndef training_loop(): ctypes.CDLL('./libcheck.so').start(); time.sleep(60)\n"
    "training_loop()",
    "forks_in_c": "import ctypes, os\ndef child(): os.abort()\nif ctypes.CDLL(None).fork(): os.wait()\nelse: child()",
    "recurses": "import ctypes, sys\nsys.setrecursionlimit(10**6)\n"
    "def descend(n): return descend(n - 1) if n else ctypes.string_at(0xDEAD0)\ndescend(8_000)",
}


def _die(name: str, folder: Path) -> Path:
    need_cores()
    (folder / "train.py").write_text(PROGRAMS[name])
    if "libcheck" in PROGRAMS[name]:
        need("gcc")
        texts = LIBRARIES[name]
        for source, text in zip(("guilty.c", "fail.c"), texts, strict=True):
            (folder / source).write_text(text)
        build = ["gcc", "-O1", "-fPIC", "-shared", "-fno-toplevel-reorder", "-o", "libcheck.so", "guilty.c", "fail.c"]
        build += ["-g"] if name == "with_lines" else []
        subprocess.run(build, cwd=folder, check=True)
    command = ["sh", "-c", 'ulimit -c unlimited && exec "$@"', "sh", sys.executable, "train.py"]
    subprocess.run(command, cwd=folder, check=False, capture_output=True, timeout=60)
    return cores_in(folder)[0]


def by_pystack(core: str, executable: str = PROGRAM, *, python: str = "", all_by_pystack: bool = False) -> Stacks:
    """Read a core by pystack, with our C frames where the command would take them."""
    notes = core_file.read(core)
    own = None
    if not all_by_pystack:
        unlike = {*core_file.changed_files(core, notes), *core_file.missing_files(core, notes)}
        with contextlib.suppress(CannotUnwind):
            own = CFrames(core, notes.files, unlike)
    return pystack.of_core(core, executable, notes.files, own, timeout_s=30, python=python)


@functools.cache
def stacks_of(core: Path) -> Stacks:
    """Read a core by pystack once."""
    return by_pystack(str(core))


def read_core(core: Path) -> tuple[ThreadStack, ...]:
    """Read a core like the command."""
    crashed = core_file.read(str(core)).threads[0].tid
    return stacks.crashed_first(stacks_of(core), crashed)


OWN_CORES = ["dies_by_sigbus", "dies_in_cpp_thread", "dies_by_cpp_exception", "dies_with_faulthandler"]
OWN_CORES += ["dies_in_torch", "in_a_handler", "calls_back", "many_threads", "ends_in_a_call", "on_a_stack_above"]


@pytest.mark.parametrize("name", OWN_CORES)
def test_c_frames_are_those_that_pystack_follows(name: str, core_of: Callable[[str], Path]) -> None:
    core = core_of(name)
    files = core_file.read(str(core)).files
    # Else pystack would be asked for all, and be compared with itself.
    assert CFrames(str(core), files, ()).whole
    ours, theirs = stacks_of(core), by_pystack(str(core), all_by_pystack=True)
    assert (ours.error, theirs.error) == ("", "")
    found, expected = ({one.tid: essential(one) for one in either.threads} for either in (ours, theirs))
    assert found == expected
    assert all(one.aligned for one in ours.threads)


def test_the_handler_of_faulthandler_is_told_from_its_callers(core_of: Callable[[str], Path]) -> None:
    first, *_ = read_core(core_of("dies_with_faulthandler"))
    assert first.aligned
    assert "<signal handler called>" in shown(first.frames)


def test_where_pystack_takes_a_thread_for_another_it_is_asked_for_all(core_of: Callable[[str], Path]) -> None:
    """Python does not know that it was forked: the one thread has the number of its parent's."""
    core = str(core_of("forks_in_c"))
    found = by_pystack(core)
    assert found.threads == by_pystack(core, all_by_pystack=True).threads
    assert "[child]" in [name for thread in found.threads for name in shown(thread.frames)]


def test_what_a_thread_of_c_did_hides_no_python(core_of: Callable[[str], Path]) -> None:
    result = distdiag("core-bt", "--json", str(core_of("in_a_c_thread")))
    (core,) = result.report["data"]["cores"]
    # The compiler may jump to the last function that run calls.
    assert [frame["function"] for frame in core["crash_thread"]["frames"]][:2] in (
        ["??", "run"],
        ["??", "start_thread"],
    )
    (main,) = core["threads"]
    assert "training_loop" in [frame["function"] for frame in main["frames"]]


def essential(stack: ThreadStack) -> ThreadStack:
    """Leave the essential frames without what addr2line (2.40) knows less of: the file of inlined code, and clones.

    Debug information calls a clone as its function; only the symbols of its file have the "name.part.0".
    """
    frames = (replace(one, file="", function=one.function.partition(".")[0]) for one in stacks.essential(stack.frames))
    return replace(stack, frames=tuple(frames), gil=stack.gil or None)


def test_a_function_that_ends_in_a_call_has_its_own_name_and_not_the_next_ones(core_of: Callable[[str], Path]) -> None:
    first, *_ = read_core(core_of("frees_twice"))
    functions = [one.function for one in first.frames]
    # It calls __libc_message, which does not return.
    if has_debug_information(next(one.module for one in first.frames if "libc" in one.module)):
        assert "malloc_printerr" in functions


def test_frames_are_not_followed_through_what_is_no_longer_what_it_was(core_of: Callable[[str], Path]) -> None:
    core = str(core_of("ends_in_a_call"))
    files = core_file.read(core).files
    library = next(one.path for one in files if one.path.endswith("libcheck.so"))

    def followed(unlike: set[str], files: Sequence[core_file.MappedFile] = files, core: str = core) -> unwinder.CStack:
        (stack,) = unwinder.unwind(core, files, unlike).values()
        return stack

    whole = followed(set())
    paths = [location.path for location in whole.locations]
    assert (whole.whole, library in paths) == (True, True)
    # Up to the first frame in it, which is known by its file alone.
    until = followed({library})
    assert (until.whole, [location.path for location in until.locations]) == (False, paths[: paths.index(library) + 1])
    assert [location.begin is None for location in until.locations] == [False] * paths.index(library) + [True]
    gone = followed(set(), [replace(one, path=f"{one.path} (deleted)") for one in files])
    assert [(location.path, location.begin) for location in gone.locations] == [(f"{paths[0]} (deleted)", None)]
    assert [location.path for location in followed(set(), ()).locations] == [""]
    # Its stack is cut off, but not its registers.
    cut = Path(core).with_name("cut")
    cut.write_bytes(Path(core).read_bytes()[: 2**20])
    assert [location.address for location in followed(set(), core=str(cut)).locations] == [whole.locations[0].address]
    cut.write_bytes(Path(core).read_bytes()[:2_000])
    with pytest.raises(CannotUnwind):
        followed(set(), core=str(cut))


def test_c_code_with_debug_information_has_its_lines_and_inlined_calls(core_of: Callable[[str], Path]) -> None:
    core = core_of("with_lines")
    expected = [("inlined", "guilty.c", 2), ("outer", "guilty.c", 3)]
    result = distdiag("core-bt", "--json", str(core))
    (found,) = result.report["data"]["cores"]
    assert lines_in_library(found) == expected
    # The C frames only have them as well.
    result = distdiag("core-bt", "--json", "--exe", "/nowhere/python", str(core))
    (found,) = result.report["data"]["cores"]
    assert lines_in_library(found) == expected
    assert found["tools"][-1].startswith("distdiag: C frames only")
    assert "without source lines" not in found["tools"][-1]


def lines_in_library(core: dict[str, Any]) -> list[tuple[str, str, int]]:
    frames = [frame for frame in core["crash_thread"]["frames"] if frame["module"].endswith("libcheck.so")]
    return [(frame["function"], os.path.basename(frame["file"]), frame["line"]) for frame in frames]


@pytest.mark.parametrize(
    ("program", "says"), [("", "addr2line (binutils) is not installed"), ("exec sleep 60", "did not answer in time")]
)
def test_without_lines_there_are_frames(
    program: str, says: str, core_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    core = str(core_of("with_lines"))
    monkeypatch.setattr(source_lines, "_MAX_S", 1.0)
    monkeypatch.setenv("PATH", str(tmp_path) + (":/usr/bin:/bin" if program else ""))
    if program:
        (tmp_path / "addr2line").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "addr2line").chmod(0o755)
    found = by_pystack(core)
    (thread,) = found.threads
    assert {"outer", "[<module>]"} < set(shown(thread.frames))
    assert thread.aligned
    assert (found.error.startswith("no source lines of C code: "), says in found.error) == (True, True), found.error


def test_a_program_that_dies_after_python_has_gone_has_c_frames(core_of: Callable[[str], Path]) -> None:
    found = by_pystack(str(core_of("dies_at_its_end")))
    (thread,) = found.threads
    assert thread.frames[[one.function for one in thread.frames].index(ABORT) + 1].module.endswith("libcheck.so")
    assert "no Python frames found" in found.error
    assert stacks.reaches_start(thread.frames)


def test_a_thread_that_crashed_is_there_whatever_its_number() -> None:
    assert stacks.crashed_first(Stacks("pystack", (), "damaged", 0.0), 0) == (ThreadStack(0, "", (), None),)


def test_a_frame_whose_callers_stack_nobody_knows_is_the_last(core_of: Callable[[str], Path]) -> None:
    core = str(core_of("without_a_stack"))
    (stack,) = unwinder.unwind(core, core_file.read(core).files, ()).values()
    assert (stack.whole, stack.locations[-1].path.endswith("libcheck.so")) == (False, True)
    assert [one.function for one in by_pystack(core).threads[0].frames]


def test_a_stack_without_end_is_not_followed_to_it(core_of: Callable[[str], Path]) -> None:
    core = str(core_of("goes_deep"))
    (stack,) = unwinder.unwind(core, core_file.read(core).files, ()).values()
    assert (stack.whole, len(stack.locations)) == (False, 2048)


def test_a_library_that_was_cut_off_since_ends_the_stack(core_of: Callable[[str], Path]) -> None:
    core = core_of("ends_in_a_call")
    files = core_file.read(str(core)).files
    library = core.with_name("libcheck.so")
    whole = library.read_bytes()
    try:
        library.write_bytes(whole[: len(whole) // 8])
        (stack,) = unwinder.unwind(str(core), files, ()).values()
    finally:
        library.write_bytes(whole)
    assert (stack.whole, stack.locations[-1].path, stack.locations[-1].begin) == (False, str(library), None)


def test_each_thread_is_as_whoever_knows_most_of_it_has_it() -> None:
    def thread(tid: int, frames: list[Frame]) -> ThreadStack:
        return ThreadStack(tid, "", tuple(frames), None)

    known = (thread(1, c("??")), thread(2, python("train")), thread(3, c("a", "b")))
    ours = (thread(1, c("strlen")), thread(2, c(EVAL, "x")), thread(3, c("a")), thread(4, c("z")))
    found, is_more = stacks.longer(known, ours)
    assert (found, is_more) == ((ours[0], known[1], known[2], ours[3]), True)
    assert stacks.longer(known, known) == (known, False)


class Alone(NamedTuple):
    """What one tool makes of a core: `wrong` is in its words and should not be, `silent` is not and should be."""

    core: str
    tool: str
    wrong: str
    silent: str
    merged: list[str]
    """Of the crashed thread, without what comes before."""


PYSTACK, PYSTACK_ALL, GDB = "pystack core", "pystack core --native-all", "gdb"
ABORT = "abort"
OF_PYTHON = ("mmap_subscript", "_call_function_pointer", "_ctypes_callproc", "PyCFuncPtr_call")
JUMPED = ["ffi_call", "_call_function_pointer", "_ctypes_callproc", "PyCFuncPtr_call", "[jump]", "[<module>]"]
ALONE = [
    Alone("dies_by_sigbus", PYSTACK_ALL, "segmentation fault", "SIGBUS", ["mmap_subscript", "[read_shard]", "[train]"]),
    Alone("dies_in_cpp_thread", PYSTACK, "wait_for_batches", "check_batch", [ABORT, "check_batch()"]),
    Alone("dies_in_cpp_thread", GDB, "", "wait_for_batches", [ABORT, "check_batch()", "prefetch_batches()"]),
    Alone("ends_in_a_call", PYSTACK_ALL, "innocent", "guilty", [ABORT, "fail", "guilty", "start"]),
    Alone("jumps_nowhere", PYSTACK_ALL, "Unable to merge", "ffi_call", JUMPED),
    Alone("recurses", PYSTACK_ALL, "", "descend", ["PyCFuncPtr_call", "[string_at]", "[descend]", "[descend]"]),
]


@pytest.mark.parametrize("row", ALONE, ids=lambda row: f"{row.core}-{row.tool.replace(' ', '_')}")
def test_one_tool_alone_is_wrong_or_silent_and_merged_is_right(row: Alone, core_of: Callable[[str], Path]) -> None:
    core = core_of(row.core)
    ask = [str(Path(sys.executable).with_name("pystack")), "core", str(core), PROGRAM, "--no-color"]
    ask += ["--native-all"] if row.tool == PYSTACK_ALL else []
    if row.tool == GDB:
        ask = ["gdb", "-batch", "-nx", PROGRAM, str(core), "-ex", "thread apply all bt -frame-arguments none"]
    said = programs.run(ask, timeout_s=60).stdout.decode()
    assert row.wrong in said
    assert row.silent not in said
    first, *_ = read_core(core)
    frames = shown(first.frames)
    assert first.aligned
    merged = row.merged
    if not names_its_functions():
        merged, frames = [name for name in merged if name not in OF_PYTHON], [name for name in frames if name != "??"]
    assert merged[0] in frames
    start = frames.index(merged[0])
    assert frames[start : start + len(merged)] == merged


@pytest.mark.parametrize(("name", "threads"), [("core_thread", 3), ("core_handler", 2), ("core_interpreters", 2)])
def test_each_thread_is_one_row_whose_python_frames_have_their_places(name: str, threads: int) -> None:
    found = read_pystack(name).threads
    assert (len(found), len({thread.tid for thread in found})) == (threads, threads)
    assert all(thread.aligned for thread in found)


def test_c_frames_that_pystack_lost_are_noted() -> None:
    waiting, jumped = read_pystack("core_pointer").threads
    assert (waiting.aligned, jumped.aligned) == (True, False)


def test_the_crashed_thread_is_first() -> None:
    found = read_pystack("core_thread")
    last = found.threads[-1]
    first, *others = stacks.crashed_first(found, last.tid)
    assert (first.tid, len(others)) == (last.tid, len(found.threads) - 1)


def test_a_deep_stack_keeps_both_ends() -> None:
    frames = stacks.shorten(c(*(str(number) for number in range(10_000))))
    assert len(frames) == stacks.MAX_FRAMES + 1
    assert (frames[0].function, frames[-1].function) == ("0", "9999")
    assert frames[384].function == "(9488 frames left out)"


EVAL = "_PyEval_EvalFrameDefault"


@each(
    "loops, native, expected, aligned",
    [
        ([["f", "g"], ["m"]], ["x", EVAL, "y", EVAL, "_start"], "x [f] [g] y [m] _start", True),
        # The innermost Python function is gone already, or not there yet.
        ([["m"]], ["x", EVAL, "y", EVAL, "_start"], f"x {EVAL} y [m] _start", False),
        # More Python than C frames: the excess is innermost.
        ([["f"], ["g"], ["m"]], ["x", EVAL, "y", EVAL, "_start"], "x [f] [g] y [m] _start", False),
        # The C frames are lost on the way out.
        ([["f"], ["m"]], ["x", EVAL, "y"], "x [f] y [m]", False),
        ([["f"], ["m"]], ["x"], "x [f] [m]", False),
        ([], ["x", EVAL, "clone3"], f"x {EVAL} clone3", False),
    ],
)
def test_frames_are_interleaved(loops: list[list[str]], native: list[str], expected: str, aligned: bool) -> None:
    frames, fits = stacks.interleave([python(*names) for names in loops], c(*native))
    assert " ".join(f"[{f.function}]" if f.language == "python" else f.function for f in frames) == expected
    assert fits is aligned


def test_calls_of_the_interpreter_are_left_out_but_not_where_it_crashed() -> None:
    inside = c("_PyObject_MakeTpCall", "cfunction_call", "list_sort", "PyObject_Vectorcall", "PyObject_CallOneArg")
    assert [one.function for one in stacks.essential([*inside, *c("start_thread", "clone3")])] == [
        "_PyObject_MakeTpCall",
        "cfunction_call",
        "list_sort",
    ]
    # The same name in another module is a user's own function.
    assert not stacks.is_interpreter(Frame("c", "main", "", None, "/srv/job/server"))
    assert stacks.is_interpreter(Frame("c", "main", "", None, "/usr/bin/python3.11"))


def test_a_core_that_was_cut_off_names_the_thread_that_crashed_and_where(core_of: Callable[[str], Path]) -> None:
    whole = core_of("ends_in_a_call")
    cut = whole.with_name("cut")
    cut.write_bytes(whole.read_bytes()[: 2**20])
    assert by_pystack(str(cut)).error == "no Python frames found"
    (core,) = distdiag("core-bt", "--json", str(cut)).report["data"]["cores"]
    innermost = core["crash_thread"]["frames"][0]
    assert Path(innermost["module"]).name.startswith("libc")


def test_pystack_is_asked_from_where_distdiag_is_not_installed(core_of: Callable[[str], Path]) -> None:
    sources = bundle.sources(bundle.AGENT, "distdiag.facts.core.pystack")
    ask = f"pystack.of_core({str(core_of('dies_by_sigbus'))!r}, {PROGRAM!r}, (), None, timeout_s=30)"
    program = (
        f"import sys\nsources = {sources!r}\nexec(sources['distdiag.agent.boot'], globals())\n"
        "sys.meta_path.insert(0, CarriedFinder(sources))\nfrom distdiag.facts.core import pystack\n"
        f"print([one.function for one in {ask}.threads[0].frames if one.language == 'python'])\n"
    )
    done = subprocess.run([sys.executable, "-S", "-P", "-"], input=program, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("['read_shard', 'train', '<module>']\n", "")


def test_without_pystack_there_are_c_frames(core_of: Callable[[str], Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    bare = str(tmp_path / "bare" / "bin" / "python")
    core = str(core_of("dies_in_cpp_thread"))
    assert by_pystack(core, python=bare).error == (f"pystack is not installed ({bare} -m pip install pystack)")
    crashed = core_file.read(core).threads[0].tid
    first, *_ = stacks.crashed_first(CFrames(core, core_file.read(core).files, ()).stacks(), crashed)
    functions = shown(first.frames)
    assert functions[functions.index(ABORT) + 1] == "check_batch()"


@pytest.mark.parametrize(
    ("core", "executable", "says"),
    [
        ("/etc/passwd", PROGRAM, "not a core: no ELF header"),
        ("/nonexistent", PROGRAM, "No such file or directory"),
        ("", "/bin/sh", "Unable to find maps for the executable"),
    ],
)
def test_what_cannot_be_read_says_why(core: str, executable: str, says: str, core_of: Callable[[str], Path]) -> None:
    path = core or str(core_of("dies_by_sigbus"))
    try:
        error = by_pystack(path, executable).error
    except (core_file.NotACore, OSError) as refusal:  # before pystack is asked
        error = str(refusal)
    assert says in error


def test_files_and_threads_are_those_that_gdb_finds(core_of: Callable[[str], Path]) -> None:
    show = "-batch -nx -iex|set auto-load off|-iex|set auto-solib-add off|-iex|set width 0|-ex|info proc mappings"
    show += "|-ex|thread apply all -q p/x $pc"
    for program in ("dies_in_cpp_thread", "dies_in_torch"):
        path = core_of(program)
        found = core_file.read(str(path))
        argv = ["gdb", *show.replace(" ", "|", 2).split("|"), "-c", str(path)]
        said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout
        rows = re.findall(r"^ +(0x\w+) +(0x\w+) +(0x\w+) +(0x\w+) +(/.*)$", said, re.MULTILINE)
        listed = [(int(row[0], 16), int(row[1], 16), int(row[3], 16), row[4]) for row in rows]
        assert [astuple(file) for file in found.files] == listed
        assert re.findall(r"New LWP (\d+)", said) == [str(thread.tid) for thread in found.threads]
        counters = re.findall(r"^\$\d+ = (0x\w+)$", said, re.MULTILINE)
        assert counters[::-1] == [f"{thread.pc:#x}" for thread in found.threads]


def test_a_core_of_torch_is_read_at_once_and_costs_no_memory(core_of: Callable[[str], Path]) -> None:
    path = str(core_of("dies_in_torch"))
    took = []
    for _ in range(5):
        began = time.process_time()
        core_file.read(path)
        took.append(time.process_time() - began)
    assert min(took) < 0.05
    tracemalloc.start()
    try:
        found = core_file.read(path)
        core_file.build_ids(path, found)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert found.size_bytes > 50 << 20
    assert (found.signal, found.code, found.truncated) == (signal.SIGSEGV, 1, False)  # SEGV_MAPERR
