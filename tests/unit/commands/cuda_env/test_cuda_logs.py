"""Logs of builds and loads of CUDA extensions: what went wrong in each.

The texts of tests/recorded/cuda_logs begin with two lines of ours: where the text is from, and the ids in their order.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from loops import each

from distdiag.commands.cuda_env.problems import checks
from distdiag.knowledge.known_lines import BUILDS, JOBS, KnownLine, _rows, known_builds
from distdiag.knowledge.logs import read_log

RECORDED = sorted((Path(__file__).parents[3] / "recorded" / "cuda_logs").glob("*.txt"))

# Printed in healthy runs too, or part of a text with another line for the fault.
HARMLESS = [
    "c++ -DKilled -c x.cpp",
    "x.cpp:3:5: warning: unused variable 'Killed' [-Wunused-variable]",
    "struct NotKilled",
    "[1/2] nvcc -c /usr/include/cuda_runtime.h -I/usr/include/thrust/ -lcuda -o Python.h.o -D_GLIBCXX_USE_CXX11_ABI=0",
    "In file included from /usr/local/cuda/include/crt/host_config.h:137,",
    "  137 | #error -- unsupported GNU version! gcc versions later than 11 are not supported!",
    "/usr/include/crt/host_config.h:137: note: unsupported GNU version is what this header rejects",
    "    5 | #error C++17 or later compatible compiler is required to use PyTorch.",
    "There are no x86_64-linux-gnu-g++ version bounds defined for CUDA version 13.1",
    "The detected CUDA version (12.6) has a minor version mismatch with the version that was used to compile PyTorch "
    "(12.8). Most likely this shouldn't be a problem.",
    "Installed CUDA version 12.4 does not match the version torch was compiled with 12.1 but since the APIs are "
    "compatible, accepting this combination",
    "torch/_subclasses/functional_tensor.py:368: UserWarning: Failed to initialize NumPy: No module named 'numpy'",
    "    raise OSError('CUDA_HOME environment variable is not set. '",
    '        raise RuntimeError("Ninja is required to load C++ extensions (pip install ninja to get it)")',
    '    raise ValueError(f"Unknown CUDA arch ({arch}) or GPU not supported")',
    "fatal: not a git repository (or any of the parent directories): .git",
    '          "ERROR: Can not execute `setup.py` since setuptools is not available in "',
    "[WARNING] Unable to import torch, pre-compiling ops will be disabled.",
    "DEPRECATION: --build-option and --global-option are deprecated.",
    "/sbin/ldconfig.real: /usr/lib/wsl/lib/libcuda.so.1 is not a symbolic link",
    "-- Looking for pthread_create in pthreads - not found",
    "-- Could NOT find nvtx3 (missing: nvtx3_dir)",
    "nvcc warning : Support for offline compilation for architectures prior to '<compute/sm/lto>_75' will be removed",
    "Successfully installed torch-2.12.0 nvidia-nccl-cu13-2.29.7",
    "returned non-zero exit status 1.",
]


def recorded(path: Path) -> tuple[list[str], str]:
    """Read the ids that are expected, and the text."""
    source, ids, text = path.read_text("utf-8").split("\n", 2)
    assert source.startswith("# ")
    return [one for one in ids.removeprefix("# ").split() if one != "nothing"], text


def ids(text: str) -> list[str]:
    return [match.known.id for match in read_log(text)]


@each("path", RECORDED)
def test_a_recorded_log_is_explained(path: Path) -> None:
    expected, text = recorded(path)
    assert ids(text) == expected


def test_every_known_failure_has_a_recorded_text() -> None:
    seen = {one for path in RECORDED for one in recorded(path)[0]}
    assert seen == known_builds().keys()


@each("text", HARMLESS)
def test_what_only_looks_alike_is_no_failure(text: str) -> None:
    assert ids(f"{text}\n") == []


@each("known", known_builds().values())
def test_a_known_failure_is_well_written(known: KnownLine) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", known.id)
    assert known.role in {"cause", "consequence", "note"}
    assert all([known.means, known.breaks, known.fix, known.source])
    assert set(known.checks) <= checks().keys()
    assert all(re.fullmatch(r"\w+", word, re.ASCII) for word in known.words)


@each("known", known_builds().values())
def test_a_known_failure_fills_in_only_what_its_pattern_has(known: KnownLine) -> None:
    groups = {name.rstrip("0123456789") for name in re.compile(known.pattern).groupindex}
    words = " ".join([known.means, known.breaks, known.fix, *known.commands])
    # {package}: the log names it elsewhere.
    assert set(re.findall(r"(?<!\$)\{(\w+)\}", words)) <= groups | {"package"}


@each("known", known_builds().values())
def test_a_pattern_repeats_nothing_without_a_bound(known: KnownLine) -> None:
    # Allowed repetition: digits, and white space for a space. Each ends at the start of the next character.
    unbounded = re.sub(r"\\[sd][*+]|\[\\d\.\][*+]", "", known.pattern)
    assert not re.search(r"(?<!\\)[*+](?![^\[]*\])", unbounded), unbounded


def test_ids_are_unique() -> None:
    for names in ([known.id for name in JOBS for known in _rows(name)], [known.id for known in _rows(BUILDS)]):
        assert len(names) == len(set(names))


def test_nobody_is_told_to_link_one_version_to_the_name_of_another() -> None:
    advice = " ".join(" ".join([known.fix, *known.commands]) for known in known_builds().values())
    assert "ln -s" not in advice
    assert "export NVCC_APPEND_FLAGS" not in advice


def test_the_first_line_is_told_and_all_are_counted() -> None:
    log = "".join(f"[{n}/9] nvcc\nnvcc fatal   : Unsupported gpu architecture 'compute_70'\n" for n in range(5000))
    (match,) = read_log(log)
    assert (match.known.id, match.line, match.count) == ("arch-unknown-to-nvcc", 2, 5000)


def test_a_failure_far_down_has_its_line() -> None:
    log = "\n" * 100_000 + "ok\n" * 100_000 + "  virtual memory exhausted: Cannot allocate memory\nok\n"
    (match,) = read_log(log)
    assert (match.line, match.quote) == (200_001, "virtual memory exhausted: Cannot allocate memory")


def test_causes_come_first_in_the_order_of_the_log() -> None:
    consequence, note = "ninja: build stopped: subcommand failed.\n", "No CUDA runtime is found, using CUDA_HOME='/x'\n"
    late, early = "/usr/bin/ld: cannot find -laio\n", "nvcc fatal   : Unknown option '--foo'\n"
    assert ids(note + consequence + "x\n" * 9000 + early + "x\n" * 9000 + late) == [
        "nvcc-refused",
        "link-libaio",
        "build-stopped",
        "built-without-gpu",
    ]


def test_a_specific_failure_owns_its_line() -> None:
    assert ids("a.cpp:1:1: fatal error: Python.h: No such file or directory\n") == ["python-h-missing"]
    assert ids("a.cpp:1:1: fatal error: Pyjama.h: No such file or directory\n") == ["header-missing"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    "before", ["", "      ", "#19 35.57 ", "515.6       ", "[rank3]: ", "2025-02-11T22:19:10.45Z "]
)
def test_what_stands_before_a_line_does_not_hide_it(before: str, end: str) -> None:
    lines = ["make", "Killed", "RuntimeError: operator torchvision::nms does not exist", "c++: not found"]
    found = read_log("".join(f"{before}{line}{end}" for line in lines))
    assert [(match.known.id, match.line) for match in found] == [("out-of-memory", 2), ("torchvision-other-torch", 3)]


@pytest.mark.parametrize("shell", ["/bin/sh: 1: nvcc: not found", "bash: line 1: nvcc: command not found"])
def test_both_shells_are_understood(shell: str) -> None:
    assert ids(shell) == ["nvcc-missing"]


def test_colours_and_progress_bars_are_taken_away() -> None:
    log = (
        "Collecting torch\n"
        "\r   0% |          | 1/99\r  50% |#####     | 50/99\r\x1b[31mgcc: \x1b[1mfatal error: \x1b[0m\x1b[K"
        "Killed signal terminated program cc1plus\x1b[0m\rdone\r\n"
        "next\n"
    )
    (match,) = read_log(log)
    assert (match.line, match.quote) == (2, "gcc: fatal error: Killed signal terminated program cc1plus")


def test_a_quote_is_printable_and_short() -> None:
    log = "é" * 5000 + "\x07\u202e\udc80\tundefined symbol: ncclCommResume\x00 " + "y" * 5000
    (match,) = read_log(log)
    assert len(match.quote) <= 200
    assert "undefined symbol: ncclCommResume" in match.quote
    assert match.quote.isprintable()


def test_a_cut_is_marked_and_spares_the_path_and_the_error() -> None:
    _, text = recorded(next(path for path in RECORDED if path.stem == "gcc_too_new"))
    (match,) = read_log(text)
    assert match.quote.startswith("./tk/bin/../targets/x86_64-linux/include/crt/host_config.h:137:2: error: ")
    assert match.quote.endswith("...")
    (far,) = read_log(f"nvcc {'-I/include ' * 40}undefined symbol: ncclCommResume {'y' * 300}\n")
    assert far.quote.startswith("nvcc -I/include -I/include")
    assert "... undefined symbol: ncclCommResume y" in far.quote
    assert (far.quote.endswith("..."), len(far.quote) <= 200) == (True, True)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gcc_too_new", "./tk/bin/../targets/x86_64-linux/include/crt/host_config.h"),
        ("cmake_gcc_too_new", "/home/user/tk/bin/../targets/x86_64-linux/include/crt/host_config.h"),
        ("gcc_headers_unreadable", "/usr/include/c++/11/bits/std_function.h"),
        ("ninja_missing", ""),
    ],
)
def test_the_file_of_a_compilers_message_is_known(name: str, file: str) -> None:
    _, text = recorded(next(path for path in RECORDED if path.stem == name))
    assert read_log(text)[0].file == file


def test_a_sentence_may_go_over_the_end_of_a_block() -> None:
    sentence = "RuntimeError:\nThe detected CUDA version (11.8) mismatches the version that was used to compile\n"
    for before in range(8100, 8200):
        (match,) = read_log("x" * before + "\n" + sentence + "PyTorch (12.4). Please make sure\n")
        assert match.known.means.endswith("12.4")


def test_what_the_log_says_is_filled_in() -> None:
    _, text = recorded(next(path for path in RECORDED if path.stem == "toolkit_mismatch_percent_s"))
    match = read_log(text)[0]
    assert match.known.means == "nvcc is CUDA 12.9, but torch was built with another major version, 13.0"
    assert "export CUDA_HOME=/usr/local/cuda-13.0 PATH=/usr/local/cuda-13.0/bin:$PATH" in match.known.commands


def test_what_the_log_does_not_say_is_left_out() -> None:
    _, text = recorded(next(path for path in RECORDED if path.stem == "toolkit_mismatch_buildkit"))
    match = read_log(text)[0]
    assert match.known.means == "nvcc is CUDA 12.1, but torch was built with another major version"
    assert match.known.commands == ("ls -d /usr/local/cuda-*",)


def test_a_log_cannot_put_a_command_into_the_fix() -> None:
    (match,) = read_log("ImportError: x.so: undefined symbol: $(reboot)\x1b[31m;`reboot`\n")
    assert match.known.commands == ("echo '$(reboot' | c++filt",)


def test_text_that_is_no_text_is_read() -> None:
    assert read_log("") == ()
    assert read_log("\x00\x1b\x1b[\x1b]" * 9000 + "\udc80\ufeff\U0001f600") == ()
    assert ids("\udcff undefined symbol: ncclCommResume") == ["nccl-replaced"]


@each("filler", [" ", "a", "0", "./", "'", "\r", "\x1b[", "a "])
def test_time_grows_with_the_length_only(filler: str) -> None:
    """Stretch every recorded line at three places, as a hostile log would: 300 kB, and lines of 80 kB.

    A pattern whose time grows with the square needs minutes.
    """
    lines = [line for path in RECORDED for line in recorded(path)[1].split("\n") if 20 < len(line) < 300]
    pump = filler * (300_000 // (len(lines) * 3 * len(filler)))
    cuts = [(line, len(line) * part // 4) for line in lines for part in (1, 2, 3)]
    start = time.process_time()
    read_log("\n".join(line[:cut] + pump + line[cut:] for line, cut in cuts))
    read_log("\n".join(f"{lines[n]}{filler * 40_000}{lines[n]}" for n in range(0, len(lines), 100)))
    assert time.process_time() - start < 1.5


def test_a_failure_repeated_on_one_line_costs_little() -> None:
    start = time.process_time()
    for path in RECORDED:
        text = recorded(path)[1].replace("\n", " ")
        read_log(text * (20_000 // len(text)))
    assert time.process_time() - start < 4
