"""All findings of cuda-env, by id without the command's name, and what each means; GPUs by name."""

from __future__ import annotations

import re

from distdiag.errors import UsageError
from distdiag.knowledge.cuda import arch_of

CHECKS = {
    "python": "the Python interpreter to check does not run",
    "torch.build": "torch is missing, or built without CUDA",
    "torch.import": "torch cannot be imported, or its import hangs",
    "driver.present": "no driver, or none that this program or container can use",
    "driver.hangs": "the driver does not respond",
    "driver.not-queried": "the driver could not be queried in time",
    "driver.init": "the driver fails to initialize (cuInit)",
    "driver.userland-kernel": "the kernel driver and its user-space libraries have different versions",
    "driver.min": "the driver is too old for torch's CUDA",
    "driver.compat-lib": "a cuda-compat package that does not fit the driver or the GPU",
    "driver.stub": "the loader finds the toolkit's stub libcuda instead of the driver's",
    "driver.wsl": "a Linux driver inside WSL",
    "gpu.visible": "GPUs are not visible",
    "gpu.torch": "torch sees fewer GPUs than the driver",
    "gpu.fabric": "the NVSwitch fabric is not ready",
    "gpu.mig": "GPUs are split into MIG instances",
    "arch.torch": "torch has no code for a GPU",
    "arch.ext": "an extension has no code for a GPU",
    "libs.shadow": "LD_LIBRARY_PATH overrides libraries that torch ships",
    "libs.versions": "package versions that torch, or a package built on torch, does not accept",
    "libs.duplicate-wheels": "two NVIDIA wheels own the same files",
    "libs.ext-soname": "an extension was built for another CUDA version",
    "libs.path-empty": "an empty element in LD_LIBRARY_PATH",
    "libs.path-missing": "a directory in LD_LIBRARY_PATH does not exist",
    "toolkit.found": "no nvcc",
    "toolkit.path-missing": "a directory in PATH does not exist",
    "toolkit.home": "CUDA_HOME, or what torch uses in its place, is not a CUDA toolkit",
    "toolkit.multiple": "several toolkits",
    "toolkit.nvcc-broken": "nvcc starts but cannot compile",
    "toolkit.version-sources": "files of two versions in one toolkit",
    "toolkit.torch-mismatch": "nvcc and torch have different CUDA versions",
    "toolkit.headers": "the toolkit's headers are missing, or not where torch looks",
    "toolkit.cudart-devlink": "no libcudart.so to link against",
    "cc.nvcc": "nvcc's host compiler is missing or too new",
    "cc.torch": "torch's C++ compiler is missing, too new or too old",
    "cc.flags": "NVCC_PREPEND_FLAGS, NVCC_APPEND_FLAGS or another variable changes the compiler, or breaks nvcc",
    "archlist.syntax": "TORCH_CUDA_ARCH_LIST is invalid",
    "archlist.nvcc": "TORCH_CUDA_ARCH_LIST has architectures that nvcc cannot compile for",
    "archlist.gpus": "TORCH_CUDA_ARCH_LIST does not cover a GPU",
    "archlist.unset-nogpu": "TORCH_CUDA_ARCH_LIST is not set, and there is no GPU to detect it from",
    "build.ninja": "ninja is not installed",
    "build.python-h": "Python.h is missing",
    "build.libaio": "libaio, which DeepSpeed's async_io needs, is missing",
    "build.jobs": "more parallel compile jobs than memory allows",
    "build.cache-stale": "cached extensions that were built by another torch",
    "deepspeed.cuda13": "DeepSpeed rejects a CUDA 13 minor version that torch accepts",
    "deepspeed.cuda-minor": "DeepSpeed rejects a CUDA minor version that torch accepts",
    "deepspeed.wheel": "DeepSpeed's prebuilt ops are for another torch",
    "sys.shm": "/dev/shm is small",
    "no-answer": "a host was reached, but returned no facts",
    "nodes-differ": "nodes that differ from each other",
    "log": "errors explained from a log (--explain)",
}


def capability(gpu: str) -> str:
    """Read what --gpu names: "RTX 3090", "H100", "8.6" or "sm_86" -> "8.6".

    Raises:
        UsageError: the name is not known.
    """
    plain = re.fullmatch(r"(?:(?:sm|compute)_?)?(\d{1,2})\.?(\d)", gpu.strip())
    found = f"{plain[1]}.{plain[2]}" if plain else arch_of(gpu)
    if not found:
        raise UsageError(
            f"--gpu {gpu!r}: unknown GPU",
            hint="give its compute capability, as nvidia-smi --query-gpu=compute_cap --format=csv prints it: --gpu 8.6",
        )
    return found
