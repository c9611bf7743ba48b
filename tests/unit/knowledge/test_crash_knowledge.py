"""What a crash means: the data hold together, each known crash is recognised, and real faults are told as they are."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from loops import each
from support import need

from distdiag.knowledge import crashes
from distdiag.knowledge.crashes import core_limit, known_crashes, meaning, recognise

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ABRT, BUS, FPE, ILL, SEGV = (int(getattr(signal, f"SIG{name}")) for name in ("ABRT", "BUS", "FPE", "ILL", "SEGV"))
ABORT = ("__pthread_kill_implementation", "raise", "abort")
THROWN = (*ABORT, "__gnu_cxx::__verbose_terminate_handler", "__cxxabiv1::__terminate", "std::terminate")
IN_PYTHON = ("cfunction_call", "_PyEval_EvalFrameDefault", "Py_RunMain", "main")
WATCHDOG = "[rank2]:[E813 12:25:30.9 ProcessGroupNCCL.cpp:2106] [PG ID 0 PG GUID 0(default_pg) Rank 2] "
TIMEOUT = f"{WATCHDOG}Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE)"
ILLEGAL = (
    f"{WATCHDOG}Process group watchdog thread terminated with exception: "
    "CUDA error: an illegal memory access was encountered"
)
FATAL = "Fatal Python error: {}\nPython runtime state: initialized\n"

# The code, then the address, are those of sigaction(2); -6 is abort().
EXAMPLES: list[tuple[str, tuple[str, ...], str, int, int, int | None]] = [
    ("cuda-illegal-access", THROWN, f"{TIMEOUT}\n{ILLEGAL}", ABRT, -6, None),
    ("cuda-device-assert", THROWN, "CUDA error: device-side assert triggered", ABRT, -6, None),
    ("cuda-hardware", THROWN, "CUDA error: uncorrectable ECC error encountered", ABRT, -6, None),
    ("gloo-size-mismatch", (*THROWN, "__cxa_throw", "gloo::transport::tcp::Pair::prepareRead"), "", ABRT, -6, None),
    ("dataloader-bus-error", ("raise", "handler_SIGBUS", "<signal handler called>", "memcpy"), "", BUS, -6, None),
    ("shm-full", ("memcpy",), "/dev/shm/torch_8761_1_0", BUS, 2, 0x7F0000000000),
    ("broken-memory", ("memcpy",), "", BUS, 4, 0x7F0000000000),
    ("no-space", ("memcpy",), "/data/train.bin", BUS, 2, 0x7F0000000000),
    ("file-shortened", ("memcpy",), "/data/train.bin", BUS, 2, 0x7F0000000000),
    ("mapped-file-lost", ("memcpy",), "/data/train.bin", BUS, 2, 0x7F0000000000),
    ("heap-corruption", (*ABORT, "__libc_message", "malloc_printerr", "_int_free"), "", ABRT, -6, None),
    ("python-heap-corruption", (), FATAL.format("_PyMem_DebugRawFree: bad trailing pad byte"), ABRT, -6, None),
    ("stack-smashing", (*ABORT, "__fortify_fail", "__stack_chk_fail", "decode"), "", ABRT, -6, None),
    ("buffer-overflow", (*ABORT, "__fortify_fail", "__chk_fail", "__strcpy_chk"), "", ABRT, -6, None),
    ("python-without-gil", (*ABORT, "fatal_error", "_Py_FatalError_TstateNULL"), "", ABRT, -6, None),
    ("python-lock-at-exit", (*ABORT, "_Py_FatalErrorFormat", "_enter_buffered_busy"), "", ABRT, -6, None),
    ("python-stack-overflow", (*ABORT, "_Py_FatalErrorFunc", "_Py_CheckRecursiveCall"), "", ABRT, -6, None),
    ("python-fatal-error", (*ABORT, "fatal_error_exit", "_Py_FatalErrorFunc", "none_dealloc"), "", ABRT, -6, None),
    ("too-many-threads", (*THROWN, "std::__throw_system_error", "std::thread::_M_start_thread"), "", ABRT, -6, None),
    ("out-of-memory", (*THROWN, "__cxa_throw", "operator new"), "", ABRT, -6, None),
    ("openmp-twice", (), "OMP: Error #15: Initializing libiomp5.so, but found libomp.so already", ABRT, -6, None),
    ("openmp-error", (*ABORT, "__kmp_abort_process", "__kmp_fatal"), "", ABRT, -6, None),
    ("assertion", (*ABORT, "__assert_fail_base", "__assert_fail", "launch"), "", ABRT, -6, None),
    ("nccl-watchdog-hung", (), "ProcessGroupNCCL's watchdog got stuck for 480 seconds", ABRT, -6, None),
    ("nccl-timeout", (*THROWN, "c10d::ProcessGroupNCCL::ncclCommWatchdog"), TIMEOUT, ABRT, -6, None),
    (
        "nccl2-timeout",
        (),
        "Aborting process on rank 3 due to timeout - timeout watchdog detected operation timeout",
        ABRT,
        -6,
        None,
    ),
    ("nccl-peer-lost", (), "ncclRemoteError: A call failed possibly due to a network error", ABRT, -6, None),
    ("gloo-peer-lost", THROWN, "Connection closed by peer [10.0.0.2]:4711", ABRT, -6, None),
    ("cuda-error-late", (*THROWN, "c10_cuda_check_implementation", "c10d::ProcessGroupNCCL::x"), "", ABRT, -6, None),
    ("cuda-at-exit", ("cuEventDestroy_v2", "__run_exit_handlers", "exit"), "", SEGV, 1, 0x7F0000000000),
    ("leaves-with-threads", (*THROWN, "std::thread::~thread", "Py_FinalizeEx"), "", ABRT, -6, None),
    ("nccl-watchdog", (*THROWN, "c10d::ProcessGroupNCCL::Watchdog::run"), "", ABRT, -6, None),
    ("nccl2-watchdog", (*ABORT, "c10d::nccl2::ProcessGroupNCCL::abortProcess"), "", ABRT, -6, None),
    ("stack-overflow", ("walk", "visit") * 200, "", SEGV, 2, 0x7F0000000000),
    ("stack-overflow-of-main", ("fill",), "", SEGV, 1, 0x7FFD12345678),
    ("foreign-call", ("strlen", "ffi_call_unix64", "ffi_call_int", "_ctypes_callproc", *IN_PYTHON), "", SEGV, 1, 0),
    ("uncaught-exception", (*THROWN, "__cxa_throw", "parse"), "", ABRT, -6, None),
    ("null-pointer", ("at::Tensor::sizes", *IN_PYTHON), "", SEGV, 1, 0x10),
    ("wild-pointer", ("at::Tensor::sizes", *IN_PYTHON), "", SEGV, 128, 0),
    ("missing-instruction", ("gemm_avx512",), "", ILL, 2, 0x7F0000000000),
    ("integer-division", ("split",), "", FPE, 1, 0x7F0000000000),
    ("forbidden-call", ("syscall",), "", int(signal.SIGSYS), 1, 0x7F0000000000),
]


@each("id_, functions, text, number, code, address", EXAMPLES)
def test_each_known_crash_is_recognised(
    id_: str, functions: tuple[str, ...], text: str, number: int, code: int, address: int | None
) -> None:
    inside = {"no-space": True, "file-shortened": False}.get(id_)
    found = recognise(functions, text, number, code, address, inside=inside)
    assert found is not None
    assert found.id == id_


def test_an_older_watchdog_of_nccl_is_known_by_its_frames() -> None:
    """As torch 1.8 to 2.0 have it: an exception of NCCL is thrown again by the thread that cleans up."""
    own = ("c10d::ProcessGroupNCCL::WorkNCCL::handleNCCLGuard()", "c10d::ProcessGroupNCCL::workCleanupLoop()")
    found = recognise(
        (*THROWN, "std::rethrow_exception(std::__exception_ptr::exception_ptr)", *own), "", ABRT, -6, None
    )
    assert found is not None
    assert (found.id, found.role) == ("nccl-watchdog", "consequence")


def test_the_data_hold_together_and_every_row_has_an_example() -> None:
    ids = [crash.id for crash in known_crashes()]
    assert ids == [id_ for id_, *_ in EXAMPLES]
    assert len(set(ids)) == len(ids)
    for row in _toml()["crash"]:
        assert set(row) <= {"id", "role", "says", "fix", "commands", "source", "when"}, row["id"]
        assert set(row["when"]) <= set(crashes._When.__dataclass_fields__), row["id"]
        assert row["source"].startswith("https://")
        assert all(hasattr(signal, name) for name in row["when"].get("signals", ()))
        for pattern in (*row["when"].get("frames", ()), row["when"].get("text", "")):
            re.compile(pattern)
    for name, row in _toml()["signal"].items():
        assert hasattr(signal, name)
        assert all("{" not in words.replace("{address}", "") for words in row.get("code", {}).values())


def test_who_waited_is_a_consequence_and_who_broke_it_a_cause() -> None:
    roles = {crash.id: crash.role for crash in known_crashes()}
    assert roles["nccl-timeout"] == roles["gloo-size-mismatch"] == "consequence"
    assert roles["cuda-illegal-access"] == roles["shm-full"] == roles["heap-corruption"] == "cause"


@pytest.mark.parametrize(
    ("functions", "text", "number", "code", "address"),
    [
        pytest.param(IN_PYTHON, TIMEOUT, SEGV, 1, 0x7F0000000000, id="a timeout does not explain a segmentation fault"),
        pytest.param(ABORT, "This might be caused by something", ABRT, -6, None, id="nothing is known"),
        pytest.param(("strlen", "ffi_call", *IN_PYTHON), "", SEGV, 0, None, id="kill -SEGV by somebody else"),
        pytest.param(IN_PYTHON, "", SEGV, -6, None, id="raised again: the address is lost, so it is not called NULL"),
        pytest.param((*["a"] * 30, "_ctypes_callproc"), "", SEGV, 1, 0x7F0000000000, id="ctypes far above the fault"),
    ],
)
def test_what_is_not_known_is_not_guessed(
    functions: tuple[str, ...], text: str, number: int, code: int, address: int | None
) -> None:
    assert recognise(functions, text, number, code, address) is None


def test_a_dump_signal_from_this_rank_is_its_own_timeout() -> None:
    said = "Received a dump signal due to a collective timeout from this local rank and we will try our best"
    found = recognise((), said, ABRT, -6, None)
    assert found is not None
    assert found.id == "nccl-timeout"


@each(
    "number, code, address, sender, own, words",
    [
        (SEGV, 1, 0x7F00DEADBEEF, None, 9, "0x7f00deadbeef is not mapped (SEGV_MAPERR)"),
        (SEGV, 1, 0x18, None, 9, "(SEGV_MAPERR), a NULL pointer"),
        (SEGV, 128, 0, None, 9, "non-canonical pointer"),
        (SEGV, None, None, None, None, "invalid memory access"),
        (SEGV, -6, None, 9, 9, "the frames below the handler"),
        (BUS, 2, 0x7F0000000000, None, 9, "the file is shorter than the mapping"),
        (BUS, 4, 0x7F0000000000, None, 9, "hardware"),
        (ABRT, -6, None, 9, 9, "aborted itself"),
        (ABRT, -6, None, None, None, "aborted itself"),
        (ABRT, 0, None, 4711, 9, "sent by process 4711"),
        (ABRT, 0, None, 0, 9, "outside its container"),
        (int(signal.SIGQUIT), 0, None, 4711, 9, "sent by process 4711"),
        (int(signal.SIGKILL), 0, None, 4711, 9, "leaves no core"),
        (77, 3, None, None, None, "si_code 3"),
    ],
)
def test_a_signal_in_words(
    number: int, code: int | None, address: int | None, sender: int | None, own: int | None, words: str
) -> None:
    said = meaning(number, code, address, sender, own)
    assert words in said
    assert "{" not in said
    assert "segmentation fault" not in said.lower()


@pytest.mark.parametrize(
    ("program", "id_"),
    [
        (
            "import ctypes as c; c.CDLL(None).free(c.c_void_p(c.addressof(c.create_string_buffer(99)) + 16))",
            "heap-corruption",
        ),
        ("import ctypes; ctypes.pythonapi.Py_FatalError(b'it is all wrong')", "python-fatal-error"),
        ("import ctypes; ctypes.CDLL(None).PyThreadState_Get()", "python-without-gil"),
        ("import faulthandler, os; faulthandler.enable(); os.abort()", None),
    ],
)
def test_what_libraries_really_print_is_recognised(program: str, id_: str | None) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == -ABRT
    found = recognise((), done.stderr, ABRT, -6, None)
    assert (found.id if found else None) == id_


FAULTS = r"""
#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void tell(int number, siginfo_t *info, void *context) {
    printf("%d %d %llu\n", number, info->si_code, number == SIGABRT ? 0ULL : (unsigned long long)info->si_addr);
    fflush(stdout);
    _exit(0);
}
static int deep(int n) { volatile char frame[4096]; frame[0] = (char)n; return deep(n + 1) + frame[0]; }
static void smash(char *from) { char to[8]; strcpy(to, from); puts(to); }

int main(int count, char **words) {
    static char other[1 << 16];
    stack_t stack = {.ss_sp = other, .ss_size = sizeof other};
    struct sigaction action = {.sa_sigaction = tell, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaltstack(&stack, NULL);
    int numbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    for (int i = 0; i < 5; i++) sigaction(numbers[i], &action, NULL);
    volatile int zero = 0;
    switch (words[1][0]) {
    case 'n': return *(volatile int *)(long)(0x18 + zero);
    case 'w': return *(volatile int *)(0x4141414141414141 + zero);
    case 'b': {
        FILE *file = tmpfile();
        if (ftruncate(fileno(file), 4096)) return 9;
        volatile char *memory = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fileno(file), 0);
        if (ftruncate(fileno(file), 0)) return 9;
        return memory[0];
    }
    case 'd': return deep(0);
    case 'a': assert(zero == 1); return 0;
    case 's': smash("far too long for so small an array, by a whole sentence"); return 0;
    default: abort();
    }
}
"""


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, int, int, int]]:
    """Inject one real fault; return its output, and signal, si_code and si_addr of the kernel."""
    need("gcc")
    folder = tmp_path_factory.mktemp("faults")
    program = folder / "faults"
    (folder / "faults.c").write_text(FAULTS)
    gcc = shutil.which("gcc") or ""
    options = ["-O0", "-w", "-fstack-protector-all", "-U_FORTIFY_SOURCE"]
    subprocess.run([gcc, *options, "-o", program, folder / "faults.c"], check=True, timeout=60)

    def make(which: str) -> tuple[str, int, int, int]:
        done = subprocess.run([program, which], capture_output=True, text=True, check=True, timeout=20)
        number, code, address = map(int, done.stdout.splitlines()[-1].split())
        return done.stderr, number, code, address

    return make


@pytest.mark.parametrize(
    ("which", "id_", "words"),
    [
        ("null", "null-pointer", "0x18 is not mapped (SEGV_MAPERR), a NULL pointer"),
        ("wild", "wild-pointer", "non-canonical pointer"),
        ("bus", "mapped-file-lost", "the file is shorter"),
        ("deep", "stack-overflow-of-main", "(SEGV_MAPERR)"),
        ("assert", "assertion", "aborted itself"),
        ("smash", "stack-smashing", "aborted itself"),
    ],
)
def test_real_faults_are_told_as_they_are(
    fault: Callable[[str], tuple[str, int, int, int]], which: str, id_: str, words: str
) -> None:
    text, number, code, address = fault(which)
    found = recognise((), text, number, code, address)
    assert found is not None
    assert found.id == id_
    assert words in meaning(number, code, address, None, None)


def test_how_a_launcher_is_told_to_leave_cores() -> None:
    assert "srun --propagate=CORE python train.py" in core_limit("srun").commands
    assert core_limit("Open MPI") == core_limit("MPICH") != core_limit("shell")
    assert core_limit("Docker").commands == ("docker run --ulimit core=-1 IMAGE",)
    assert core_limit("environment") == core_limit("shell")


def test_the_command_for_mpirun_raises_the_limit_that_a_rank_gets(tmp_path: Path) -> None:
    need("bash")
    wrapped = core_limit("Open MPI").commands[0].removeprefix("mpirun ").replace("python train.py", "sh -c 'ulimit -c'")
    script = tmp_path / "run.sh"
    script.write_text(f"ulimit -S -c 0\n{wrapped}\n")
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=True, timeout=20)
    assert done.stdout == "unlimited\n"


def _toml() -> dict[str, Any]:
    return tomllib.loads(resources.files("distdiag.knowledge").joinpath("crashes.toml").read_text("utf-8"))
