# ruff: noqa: E501 - the programs below have lines as long as those that they stand for
"""Machines to examine: real directory trees with tiny real programs, a real virtual environment, a small driver.

Nothing of distdiag is replaced. The nvcc here is a script that does what nvcc does with an empty file: it finds its
nvcc.profile beside itself, takes the first gcc of its own directory and PATH, and lets that preprocess the headers.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdiag.cluster.targets import Cluster
from distdiag.commands.cuda_env.collect import Ask, CudaFacts, look
from distdiag.commands.cuda_env.diagnose import diagnose
from distdiag.commands.cuda_env.types import Goal, Request
from distdiag.facts.cuda import driver
from distdiag.facts.cuda.places import Places
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest
    from support import Result

    from distdiag.commands.cuda_env.types import CudaEnv
    from distdiag.report import Finding, Report

GCC = shutil.which("gcc") or "/usr/bin/gcc"

_NVCC = r"""#!/bin/sh
# A tiny nvcc {version}. Symlinks to itself are not resolved, as nvcc does not.
here=${{0%/*}}
case " $* " in
*" --version "*) echo "nvcc: NVIDIA (R) Cuda compiler driver"; echo "Cuda compilation tools, release {version}, V{version}.88"; exit 0;;
*" --list-gpu-arch "*) for arch in {archs}; do echo "compute_$arch"; done; exit 0;;
esac
cc=gcc
test -n "$NVCC_CCBIN" && cc=$NVCC_CCBIN
case " $* " in *" -ccbin "*) cc="$*"; cc=${{cc#*-ccbin }}; cc=${{cc%% *}};; esac
case "$NVCC_APPEND_FLAGS" in *bogus*) echo "nvcc fatal   : Unknown option '$NVCC_APPEND_FLAGS'" >&2; exit 1;; esac
include=
case "$NVCC_APPEND_FLAGS" in *allow-unsupported*) include=-D__NV_NO_HOST_COMPILER_CHECK;; esac
PATH="$here/../nvvm/bin:$here:$PATH"
top=$here/..
case " $* " in
*" --dryrun "*) echo "#\$ _HERE_=$here" >&2; echo "#\$ TOP=$top" >&2; echo "#\$ $cc -D__CUDA_ARCH_LIST__=750 -E -x c++ /dev/null" >&2; exit 0;;
esac
if ! command -v "$cc" >/dev/null; then
  echo "sh: 1: $cc: not found" >&2; echo "nvcc fatal   : Failed to preprocess host compiler properties." >&2; exit 1
fi
include="$include -I/nowhere"
test -f "$here/nvcc.profile" && include="$include -I$top/include"
test -d "$top/targets" && include="$include -I$top/targets/x86_64-linux/include"
"$cc" $include -include cuda_runtime.h -E -x c++ /dev/null -o /dev/null || exit
all="$*"
case " $all " in *" -c "*) printf '\177ELF' >"${{all##* -o }}";; esac
"""

_HOST_CONFIG = """
#if defined(__GNUC__) && !defined(__NV_NO_HOST_COMPILER_CHECK)
#if __GNUC__ > {gcc}
#error -- unsupported GNU version! gcc versions later than {gcc} are not supported! The nvcc flag '-allow-unsupported-compiler' can be used to override this version check
#endif
#endif
#if defined(__clang__)
#if (__clang_major__ >= {clang}) || (__clang_major__ < 3)
#error -- unsupported clang version! clang version must be less than {clang} and greater than 3.2 . The nvcc flag
#endif
#endif
"""

_COMPILER = """#!/bin/sh
# Says that it is {family} {version}; preprocesses as that version would.
case " $* " in
*" -dumpfullversion "*) echo {version}; exit 0;;
*" --version "*) echo "{banner}"; exit 0;;
esac
exec {gcc} -U__GNUC__ -D__GNUC__={major} "$@"
"""

_TORCH = """
__version__ = {version!r}
class _Version: cuda = {cuda!r}; hip = {hip!r}
version = _Version
class cuda:
    @staticmethod
    def get_arch_list(): return {archs!r}
    @staticmethod
    def is_available(): return {seen} > 0
    @staticmethod
    def device_count(): return {seen}
"""

_DRIVER = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* A driver of a few lines: what it sees stands in FAKE_GPUS, "name:capability;...", in FAKE_CUDA, FAKE_INIT, FAKE_DRIVER. */
static int number(const char *name, int otherwise) { const char *text = getenv(name); return text ? atoi(text) : otherwise; }
static int gpus(void) { const char *t = getenv("FAKE_GPUS"); int n = t && *t; for (; t && *t; t++) n += *t == ';'; return n; }
static void gpu(int index, char *name, int *major, int *minor) {
  const char *t = getenv("FAKE_GPUS"); while (index && *t) index -= *t++ == ';';
  const char *colon = strchr(t, ':'); memcpy(name, t, colon - t); name[colon - t] = 0;
  *major = atoi(colon + 1); *minor = atoi(strchr(colon, '.') + 1);
}
static int seen(void) {
  const char *t = getenv("CUDA_VISIBLE_DEVICES"); if (!t) return gpus();
  int n = 0; char *end;
  for (;;) { long i = strtol(t, &end, 10); if (end == t || i < 0 || i >= gpus()) return n; n++; if (*end != ',') return n; t = end + 1; }
}
int cuDriverGetVersion(int *v) { *v = number("FAKE_CUDA", 12080); return 0; }
int cuInit(unsigned f) { if (number("FAKE_HANG", 0)) pause(); int s = number("FAKE_INIT", 0); return s ? s : seen() ? 0 : 100; }
int cuDeviceGetCount(int *n) { *n = seen(); return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *t, int n, int d) { int a, b; gpu(d, t, &a, &b); return 0; }
int cuDeviceGetAttribute(int *v, int what, int d) { char t[96]; int a, b; gpu(d, t, &a, &b); *v = what == 75 ? a : b; return 0; }
int nvmlInit_v2(void) { return number("FAKE_NVML", 0); }
int nvmlSystemGetDriverVersion(char *t, unsigned n) { const char *v = getenv("FAKE_DRIVER"); strcpy(t, v ? v : "570.124.06"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = gpus(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **d) { *d = (void *)(long)(i + 1); return i < number("FAKE_OPEN", 99) ? 0 : number("FAKE_HANDLE", 17); }
int nvmlDeviceGetName(void *d, char *t, unsigned n) { int a, b; gpu((long)d - 1, t, &a, &b); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *d, int *a, int *b) { char t[96]; gpu((long)d - 1, t, a, b); return 0; }
int nvmlDeviceGetMigMode(void *d, unsigned *now, unsigned *later) { *now = number("FAKE_MIG", 0); return 0; }
"""

# Of one CUDA version: the newest gcc and the first clang refused by its header, and the targets of its nvcc.
_LIMITS = {
    "11.0": (9, 10, "35 50 60 70 75 80"),
    "11.8": (11, 15, "35 50 60 70 75 80 86 89 90"),
    "12.1": (12, 16, "50 60 70 75 80 86 89 90"),
    "12.3": (12, 17, "50 60 70 75 80 86 89 90"),
    "12.4": (13, 18, "50 60 70 75 80 86 89 90"),
    "12.8": (14, 20, "50 60 70 75 80 86 89 90 100 101 120"),
    "13.0": (15, 21, "75 80 86 89 90 100 103 110 120 121"),
    "13.1": (15, 22, "75 80 86 89 90 100 103 110 120 121"),
}


def is_for_cpu(result: Result) -> bool:
    """Return whether the torch of the tests was built without CUDA: what pip takes depends on the machine."""
    return not result.report["data"]["nodes"][0]["facts"]["torch"]["cuda"]


@dataclass
class Machine:
    """One machine below a directory: `root` for the paths of the system, `env` for its variables."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = self.folder / "root"
        self.bin = self.folder / "bin"
        self.home = self.folder / "home"
        for folder in (self.root, self.bin, self.home):
            folder.mkdir(parents=True)
        self.env["HOME"] = str(self.home)

    def write(self, path: str | Path, text: str, *, mode: int = 0o644) -> Path:
        """Write a file; an absolute path is one of this machine's system."""
        place = (
            Path(f"{self.root}{path}")
            if str(path).startswith("/") and str(self.folder) not in str(path)
            else Path(path)
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)
        return place

    def toolkit(
        self, version: str, where: str | Path | None = None, *, profile: bool = True, lib: str = "lib64"
    ) -> Path:
        """Install a toolkit in /usr/local/cuda-<version>, or elsewhere; gives its directory."""
        gcc, clang, archs = _LIMITS[version]
        top = Path(where) if where is not None else Path(f"{self.root}/usr/local/cuda-{version}")
        number = int(version.split(".")[0]) * 1000 + int(version.split(".")[1]) * 10
        self.write(top / "bin/nvcc", _NVCC.format(version=version, archs=archs), mode=0o755)
        if profile:
            self.write(top / "bin/nvcc.profile", "")
        self.write(top / "include/cuda.h", f"#define CUDA_VERSION {number}\n")
        self.write(top / "include/cuda_runtime.h", "#include <crt/host_config.h>\n")
        self.write(top / "include/cuda_runtime_api.h", "")
        self.write(top / "include/crt/host_config.h", _HOST_CONFIG.format(gcc=gcc, clang=clang))
        self.write(top / f"{lib}/libcudart.so", "")
        return top

    def compiler(self, name: str, version: str, *, family: str = "gcc") -> Path:
        """Put a compiler on PATH, such as g++-13; a g++ comes with each gcc."""
        banner = f"{name} (GCC) {version}" if family == "gcc" else f"clang version {version}"
        text = _COMPILER.format(family=family, version=version, banner=banner, gcc=GCC, major=version.split(".")[0])
        if name.startswith("gcc"):
            self.write(self.bin / name.replace("gcc", "g++", 1), text, mode=0o755)
        return self.write(self.bin / name, text, mode=0o755)

    def python(self) -> Path:
        """Make the virtual environment; gives its site-packages."""
        folder = self.folder / "venv"
        packages = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
        if not folder.exists():
            venv.create(folder, symlinks=True)
            (packages / "pip").mkdir()
            (packages / "pip/__init__.py").touch()
        return packages

    def torch(self, version: str, cuda: str | None, *, hip: str | None = None, archs: str = "", seen: int = 0) -> Path:
        """Install a torch of a few lines, with the real tables of the torch that the tests run with."""
        import importlib.util

        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        real = Path(spec.origin).parent
        folder = self.python() / "torch"
        names = [("compute_" if one.startswith("p") else "sm_") + one.lstrip("p") for one in archs.split()]
        self.write(folder / "__init__.py", _TORCH.format(version=version, cuda=cuda, hip=hip, archs=names, seen=seen))
        self.write(folder / "version.py", f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n")
        for name in ("utils/cpp_extension.py", "cuda/__init__.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(real / name, folder / name)
        # The class above is torch.cuda here; the file is only there for its table.
        self.package("torch", version)
        return folder

    def package(self, name: str, version: str, files: tuple[str, ...] = ()) -> Path:
        """Install a distribution that owns these files, which are made if they are not there."""
        packages = self.python()
        folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        self.write(folder / "RECORD", "".join(f"{file},,\n" for file in files))
        self.write(folder / "METADATA", f"Name: {name}\nVersion: {version}\n")
        for file in files:
            if not (packages / file).exists():
                self.write(packages / file, "")
        return folder

    def driver(self, version: str, gpus: str = "", *, cuda: int = 12080, **more: object) -> None:
        """Install a driver with these GPUs, "NVIDIA H100:9.0;...", in kernel and libraries."""
        self.write(
            "/proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Feb 27 08:32:06 UTC 2025\n",
        )
        self.libcuda(version, self.folder / "driver")
        self.env |= {"FAKE_GPUS": gpus, "FAKE_CUDA": str(cuda), "FAKE_DRIVER": version}
        self.env |= {f"FAKE_{name.upper()}": str(value) for name, value in more.items()}

    def libcuda(self, version: str, folder: Path) -> Path:
        """Put libcuda and NVML into a directory, and let the loader find them first."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("libcuda", "libnvidia-ml"):
            shutil.copy(_driver_library(name), folder / f"{name}.so.{version}")
        # A library already loaded takes precedence over any search by the same soname: no LD_LIBRARY_PATH is needed.
        self.env["LD_PRELOAD"] = f"{folder}/libcuda.so.{version} {folder}/libnvidia-ml.so.{version}"
        return folder

    def paste(self, commands: Iterable[str]) -> None:
        """Run commands in a shell of this machine, and keep the variables that it has then."""
        env = {**self.env, "PATH": ":".join([*self.path, str(self.bin), "/usr/bin", "/bin"])}
        text = "\n".join(["set -e", *commands, "env -0"])
        done = subprocess.run(["bash", "-c", text], env={**env, "LD_PRELOAD": ""}, check=True, capture_output=True)
        after = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
        preload = after.get("LD_PRELOAD") or (self.env.get("LD_PRELOAD", "") if "LD_PRELOAD" in after else "")
        self.env = {**{name: after[name] for name in after if name not in ("_", "PWD", "SHLVL")}, "LD_PRELOAD": preload}
        self.path = self.env.pop("PATH").removesuffix(f":{self.bin}:/usr/bin:/bin").split(":")

    def examine(self, monkeypatch: pytest.MonkeyPatch, goal: str = "all", timeout_s: float = 20.0) -> CudaFacts:
        """Take this machine's facts."""
        self._enter(monkeypatch)
        python = self.folder / "venv/bin/python"
        self.python()
        return look(Ask(goal, timeout_s, str(python), root=str(self.root)))

    def ask_driver(self, monkeypatch: pytest.MonkeyPatch, facts: CudaFacts, **variables: str) -> CudaFacts:
        """Return facts with what the driver answers under these variables, as a whole examination would."""
        self._enter(monkeypatch, **variables)
        known = {name: variables[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in variables}
        answered = driver.look(Places(str(self.root), dict(os.environ)), ask=True, timeout_s=20.0)
        return replace(facts, variables={**facts.variables, **known}, driver=answered)

    def _enter(self, monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
        for name in list(os.environ):
            if name not in ("COVERAGE_PROCESS_START", "TMPDIR"):
                monkeypatch.delenv(name)
        path = ":".join([*self.path, str(self.bin)])
        for name, value in {**self.env, **variables, "PATH": path}.items():
            monkeypatch.setenv(name, value)

    def report(
        self,
        monkeypatch: pytest.MonkeyPatch,
        goal: str = "all",
        timeout_s: float = 20.0,
        **asked: Any,  # noqa: ANN401 - fields of a Request
    ) -> Report[CudaEnv]:
        """Examine and judge this machine."""
        return judged(self.examine(monkeypatch, goal, timeout_s), goal=goal, **asked)


def judged(*nodes: CudaFacts, goal: str = "all", **asked: Any) -> Report[CudaEnv]:  # noqa: ANN401
    """Judge facts."""
    return diagnose(Request(cluster=Cluster(), goal=Goal(goal), **asked), Gathered(facts=list(nodes)))


def found(report: Report[CudaEnv]) -> dict[str, Finding]:
    """Give the findings by id without the command's name."""
    return {one.id.removeprefix("cuda-env."): one for one in report.findings}


@functools.cache
def _driver_library(name: str) -> Path:
    """Compile the driver of a few lines, once."""
    import atexit
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="distdiag-driver-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "driver.c").write_text(_DRIVER)
    library = folder / f"{name}.so.1"
    subprocess.run(
        [GCC, "-shared", "-fPIC", "-O1", "-w", "-o", library, folder / "driver.c", f"-Wl,-soname,{name}.so.1"],
        check=True,
    )
    return library
