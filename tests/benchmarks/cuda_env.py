"""cuda-env beside torch.utils.collect_env and DeepSpeed's ds_report: its time, and their reports on broken set-ups.

Whole commands, start to exit, interleaved; then one table: does a tool name the fault, does its command fix it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import pytest  # noqa: E402
from toolkit import nvcc  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "7"))
CACHE = Path(tempfile.gettempdir(), f"distdiag-bench-{os.getuid()}")
# DeepSpeed and its dependencies beside torch. --no-deps: its "torch" without a number would fetch another torch.
DEEPSPEED = (
    *("deepspeed", "einops", "hjson", "msgpack", "ninja"),
    *("numpy", "psutil", "py-cpuinfo", "pydantic", "tqdm"),
)
SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension
extension = CUDAExtension("probe", ["probe.cpp", "probe_cuda.cu"])
extension.libraries = ["cudart"]  # a CPU build of torch has no c10_cuda to link with
setup(name="probe", ext_modules=[extension], cmdclass={"build_ext": BuildExtension})
"""
SOURCES = {
    "setup.py": SETUP,
    "probe.cpp": "#include <cuda_runtime_api.h>\nint probe() { return CUDART_VERSION; }\n",
    "probe_cuda.cu": "__global__ void kernel() {}\n",
}
WORDS = ("names it", "shows it")
LEGEND = """
Toolkit {}. In all rows but that of the CPU build, torch's version.py names a CUDA, and its cpp_extension.py looks for
CUDA_HOME as in a CUDA build. ds_report runs with DS_ACCELERATOR=cuda.
names it: says that this is wrong. shows it: prints the value, and not that it is wrong. -: neither.
mends it: the exports that it prints were run, and then the build passes.
"""
GCC = """#!/bin/sh
case "$*" in
  *-dump*version*) echo {number}.1.0; exit ;;
  --version) echo "gcc (GCC) {number}.1.0"; echo "Copyright (C) Free Software Foundation, Inc."; exit ;;
esac
exec {gcc} -U__GNUC__ -D__GNUC__={number} "$@"
"""


@dataclass(frozen=True)
class Setup:
    """A set-up, and the text searched in a tool's whole output, blanks folded.

    `names`: it reports the fault. `shows`: it prints the value, for readers able to judge it.
    `command`: a line that may mend it; only lines of exports are tried. None: as it is where nothing is wrong.
    """

    title: str
    names: str
    shows: str
    command: str
    torch: str | None = None
    path: tuple[str, ...] | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Said:
    """What a command printed, without colours, and its status."""

    text: str
    status: int

    @property
    def words(self) -> str:
        return " ".join(self.text.split())

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.text.splitlines()]


class Bench:
    """The interpreter that all tools run in, a toolkit, and a folder for set-ups."""

    def __init__(self, python: Path, folder: Path, toolkit: Path) -> None:
        self.python, self.folder, self.toolkit = python, folder, toolkit
        reported = subprocess.run([toolkit / "bin/nvcc", "--version"], capture_output=True, text=True, check=True)
        self.release = re.findall(r"release (\d+\.\d+)", reported.stdout)[0]
        self.torch = torch_for(folder, self.release)

    def environment(self, setup: Setup) -> dict[str, str]:
        """Take nothing over from the user; an empty variable is none."""
        first = (f"{self.toolkit}/bin",) if setup.path is None else setup.path
        own = {
            "PATH": ":".join((*first, str(self.python.parent), "/usr/bin", "/bin")),
            "PYTHONPATH": self.torch if setup.torch is None else setup.torch,
            "HOME": str(self.folder),
            "LC_ALL": "C.UTF-8",
            "CUDA_HOME": str(self.toolkit),
            "TORCH_CUDA_ARCH_LIST": "8.0",
            "DS_ACCELERATOR": "cuda",  # what DeepSpeed takes where there are GPUs; else it is silent about CUDA
            **setup.env,
        }
        return {name: value for name, value in own.items() if value}

    def ask(self, tool: str, setup: Setup) -> Said:
        return said(commands(self.python)[tool], self.environment(setup))

    def build(self, setup: Setup, first: tuple[str, ...] = ()) -> Said:
        """Build a small extension by setup.py, as flash-attn does; `first` are lines of a shell."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            for name, text in SOURCES.items():
                Path(folder, name).write_text(text)
            lines = [*first, f"cd {folder}", f"exec {shlex.quote(str(self.python))} setup.py build_ext"]
            return said(["sh", "-ec", "\n".join(lines)], self.environment(setup))


def commands(python: Path) -> dict[str, list[str]]:
    """Give the command of each tool, in one interpreter."""
    own = [str(python), "-m", "distdiag", "cuda-env"]
    return {
        "cuda-env --goal build": [*own, "--goal", "build"],
        "cuda-env": own,
        "collect_env": [str(python), "-m", "torch.utils.collect_env"],
        "ds_report": [str(python.with_name("ds_report"))],
    }


def said(command: list[str], environment: dict[str, str]) -> Said:
    """Run a command, and keep all that it says."""
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    )
    return Said(re.sub(r"\x1b\[[0-9;]*m", "", done.stdout), done.returncode)


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch is not installed here"
    assert spec.origin is not None
    return Path(spec.origin).parent


def with_deepspeed() -> tuple[Path, str]:
    """Give a Python with our packages and DeepSpeed, kept between runs, and its version; else ours, and why."""
    CACHE.mkdir(mode=0o700, exist_ok=True)
    assert CACHE.stat().st_uid == os.getuid(), f"{CACHE} is somebody else's"
    python = CACHE / f"deepspeed-{sys.implementation.cache_tag}" / "bin/python"
    try:
        if not python.with_name("ds_report").exists():
            _install(python)
        place = next(python.parents[1].glob("lib/python*/site-packages"))
        (place / "ours.pth").write_text(f"import site; site.addsitedir({str(torch_folder().parent)!r})\n")
        version = "import deepspeed, torch; print(deepspeed.__version__, torch.__file__)"
        reported = subprocess.run([python, "-c", version], check=True, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        return Path(sys.executable), f"cannot be had, and is left out: {lines[-1]}"
    number, used = reported.stdout.split()[-2:]
    assert Path(used).parent == torch_folder(), f"another torch: {used}"
    return python, number


def _install(python: Path) -> None:
    environment = {**os.environ, "DS_BUILD_OPS": "0"}
    made = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(python.parents[1])]
    subprocess.run(made, check=True, capture_output=True, text=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", *DEEPSPEED]
    subprocess.run(pip, env=environment, check=True, capture_output=True, text=True, timeout=300)


def mirror(real: Path, copy: Path, edits: dict[str, list[tuple[str, str]]]) -> Path:
    """Link to all files of a folder; those in `edits` become copies: (regular expression, new text)."""
    copy.mkdir(parents=True)
    for entry in real.iterdir():
        inside = {name.partition("/")[2]: how for name, how in edits.items() if name.startswith(entry.name + "/")}
        if inside:
            mirror(entry, copy / entry.name, inside)
        elif entry.name in edits:
            text = entry.read_text()
            for pattern, new in edits[entry.name]:
                text, count = re.subn(pattern, new, text, flags=re.MULTILINE)
                assert count == 1, f"{entry}: {pattern} is there {count} times"
            (copy / entry.name).write_text(text)
        elif entry.name != "__pycache__":  # what Python compiles of the copies must not get into the real ones
            (copy / entry.name).symlink_to(entry)
    return copy


def torch_for(folder: Path, cuda: str) -> str:
    """Make our torch look for CUDA_HOME as a build for CUDA does on a node without a GPU; what to put on PYTHONPATH."""
    edits = {
        "version.py": [
            (r"^(cuda\b.*=) .*", rf"\1 {cuda!r}"),
            (r"^__version__ = '([^+']*).*", rf"__version__ = '\1+cu{cuda.replace('.', '')}'"),
        ],
        "utils/cpp_extension.py": [(r"torch\.cuda\._is_compiled\(\) and torch\.version\.cuda", "torch.version.cuda")],
    }
    return str(mirror(torch_folder(), folder / f"torch-{cuda}" / "torch", edits).parent)


def toolkit_in(folder: Path) -> Path:
    """Give the tests' toolkit in a folder of its own, with libcudart.so if it is of wheels, which have none."""
    real = nvcc().parents[1]
    copy = mirror(real, folder / "cuda", {"bin/": [], "lib/": []})
    for file in (real / "bin").iterdir():
        if file.is_file():  # nvcc looks for its profile beside itself, links not followed
            (copy / "bin" / file.name).unlink()
            shutil.copy2(file, copy / "bin" / file.name)
    if not (copy / "lib64").exists():
        (copy / "lib64").symlink_to("lib")
    if not (copy / "lib/libcudart.so").exists():
        (copy / "lib/libcudart.so").symlink_to(next((copy / "lib").glob("libcudart.so.*")).name)
    return copy


HEALTHY = Setup("(nothing is wrong)", r"\bFAIL\b", "", "")


def setups(bench: Bench) -> list[Setup]:
    return [HEALTHY, _cpu_torch(), *_odd_nvccs(bench), _new_gcc(bench), *_variables(bench), _other_torch(bench)]


def _cpu_torch() -> Setup:
    return Setup(
        "torch is a CPU build; CUDA_HOME is right",
        r"built without CUDA|built for the CPU only|install torch CUDA",
        r"version:? [. ]*\S+\+cpu\b|torch cuda version \.+ None|CUDA used to build PyTorch: Could not",
        r"pip install .*torch.*/cu\d+",
        torch="",
    )


def _odd_nvccs(bench: Bench) -> list[Setup]:
    link = bench.folder / "home/bin/nvcc"
    link.parent.mkdir(parents=True)
    link.symlink_to(bench.toolkit / "bin/nvcc")
    script = _program(bench.folder / "local/bin/nvcc", f'#!/bin/sh\nexec {bench.toolkit}/bin/nvcc "$@"\n')
    return [
        Setup(
            "nvcc on PATH is a symlink to the toolkit's; no CUDA_HOME",
            r"it is a symlink|nvcc cannot compile|nvcc\.profile|cuda_runtime\.h: No such",
            rf"{re.escape(str(link))}|CUDA_HOME='{re.escape(str(link.parents[1]))}'",
            r"export .*CUDA_HOME=",
            path=(str(link.parent),),
            env={"CUDA_HOME": ""},
        ),
        Setup(
            "nvcc on PATH is a script that starts the toolkit's; no CUDA_HOME",
            r"is a script|no \S+/cuda_runtime_api\.h|cuda_runtime_api\.h: No such",
            rf"CUDA_HOME='{re.escape(str(script.parents[1]))}'",
            r"export .*CUDA_HOME=",
            path=(str(script.parent),),
            env={"CUDA_HOME": ""},
        ),
    ]


def _new_gcc(bench: Bench) -> Setup:
    """Put a gcc first on PATH that gives itself out for one too new: nvcc's own header then refuses it."""
    header = (bench.toolkit / "include/crt/host_config.h").read_text()
    most = int(re.findall(r"gcc versions later than (\d+)", header)[0])
    script = GCC.format(number=most + 1, gcc=shutil.which("gcc", path="/usr/bin:/bin"))
    gcc = _program(bench.folder / "new/gcc", script)
    return Setup(
        f"nvcc calls gcc {most + 1}; its header allows {most}",
        # A headline about something else does not count, even with the right lines quoted below it.
        rf"^(?!.*finds no host compiler).*(unsupported GNU version|it allows gcc <= {most}|later than {most})",
        rf"\b{most + 1}\.1\.0\b",
        r"export .*CCBIN=",
        path=(str(gcc.parent), f"{bench.toolkit}/bin"),
    )


def _variables(bench: Bench) -> list[Setup]:
    return [
        Setup(
            "CUDA_HOME=:/path, from CUDA_HOME=$CUDA_HOME:/path",
            r"a stray ':'|nvcc missing|nvcc not found|CUDA_HOME\S* (is invalid|does not exist)",
            rf"':{re.escape(str(bench.toolkit))}'",
            r"export .*CUDA_HOME=",
            env={"CUDA_HOME": f":{bench.toolkit}"},
        ),
        Setup(
            "TORCH_CUDA_ARCH_LIST=8.0,8.6",
            r"does not understand|Unknown CUDA arch",
            r"8\.0,8\.6",
            r"export .*TORCH_CUDA_ARCH_LIST=",
            env={"TORCH_CUDA_ARCH_LIST": "8.0,8.6"},
        ),
    ]


def _other_torch(bench: Bench) -> Setup:
    older = f"{int(bench.release.split('.')[0]) - 1}.8"
    return Setup(
        f"torch is for CUDA {older}, the toolkit is {bench.release}",
        r"(?i)mismatch|and torch \S+ was built with",
        rf"{re.escape(older)}.*\b{re.escape(bench.release)}",
        r"pip install .*torch.*/cu\d+",
        torch=torch_for(bench.folder, older),
    )


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def complaint(bench: Bench, build: Said) -> str:
    """Give the error of a build that says most: the compiler's, or torch's."""
    if build.status == 0:
        return "(builds)"
    errors = [line for line in build.lines if re.search(r"fatal error:|#error|^\w*Error: |^error: ", line)]
    words = re.sub(r"^\S+:\d+:\d+: ", "", (errors or build.lines)[0]).replace(str(bench.folder), "")
    return f"`{words[:90].replace('|', '/').replace('`', '')}`"


def judged(bench: Bench, setup: Setup, reported: Said, calm: str) -> str:
    """Format a cell: a tool's finding, the effect of its command, its exit status; `calm`: its text if healthy."""
    patterns = [one for one in (setup.names, setup.shows) if one]
    said_of_all = [one for one in patterns if re.search(one, calm)]
    assert setup is HEALTHY or not said_of_all, f"{setup.title}: proves nothing: {said_of_all}"
    found = next((word for one, word in zip(patterns, WORDS, strict=False) if re.search(one, reported.words)), "-")
    lines = [line for line in reported.lines if setup.command and re.search(setup.command, line)]
    if found == WORDS[0] and lines:
        found += ", " + mended(bench, setup, lines)
    return f"{found}; exit {reported.status}"


def mended(bench: Bench, setup: Setup, lines: list[str]) -> str:
    """Build again after the commands, if they only set variables."""
    if not all(re.match(r"export \w+=", line) for line in lines):
        shown = re.sub(r"^\S+/python", "python", lines[0])
        return f"prints `{shown}` (not run)"
    return "mends it" if bench.build(setup, tuple(lines)).status == 0 else "its command DOES NOT MEND IT"


def findings(python: Path, tools: tuple[str, ...]) -> None:
    """Print a build's message for each set-up, and the tools' reports."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        bench = Bench(python, Path(folder), toolkit_in(Path(folder)))
        calm = dict(zip(tools, pool.map(lambda tool: bench.ask(tool, HEALTHY).words, tools), strict=True))
        print(LEGEND.format(bench.release))
        print(f"| set-up | a build says | {' | '.join(tools)} |\n|---|---|{'---|' * len(tools)}")

        def row(setup: Setup) -> str:
            cells = [judged(bench, setup, bench.ask(tool, setup), calm[tool]) for tool in tools]
            return f"| {setup.title} | {complaint(bench, bench.build(setup))} | {' | '.join(cells)} |"

        for line in pool.map(row, setups(bench)):
            print(line, flush=True)


def times(python: Path, peers: tuple[str, ...]) -> None:
    """Print the medians of whole commands, as they are typed here, and their ratios to the peers'."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        known = commands(python)
        ways = {name: (known[name], plain) for name in ("cuda-env --goal build", "cuda-env")}
        cuda = {**plain, "PYTHONPATH": torch_for(Path(folder), "13.0")}
        ways["cuda-env, importing torch"] = known["cuda-env"], cuda
        ways.update({peer: (known[peer], plain) for peer in peers})
        took: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS + 1):
            for name, (command, environment) in ways.items():
                began = time.perf_counter()
                said(command, environment)
                took[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(each[1:]) for name, each in took.items()}
    print(f"| | median | spread |{''.join(f' / {peer} |' for peer in peers)}\n|---|---|---|{'---|' * len(peers)}")
    for name, each in took.items():
        ratios = "".join(f" {medians[name] / medians[peer]:.2f} |" for peer in peers)
        print(f"| {name} | {medians[name]:.2f} s | {max(each[1:]) - min(each[1:]):.2f} |{ratios}", flush=True)


def main() -> None:
    python, deepspeed = with_deepspeed()
    peers = ("collect_env", "ds_report") if python != Path(sys.executable) else ("collect_env",)
    load = f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores"
    print(f"{load}, medians of {ROUNDS} interleaved runs after one that does not count; DeepSpeed {deepspeed}")
    print("cuda-env does not import a torch that was built for the CPU only; one built for CUDA it does\n", flush=True)
    times(python, peers)
    try:
        findings(python, ("cuda-env --goal build", *peers))
    except pytest.skip.Exception as why:
        print(f"\nThe table of broken set-ups is left out: {why}")


if __name__ == "__main__":
    main()
