"""All findings of cuda-env, by id without the command's name, and what each means; --only and --ignore choose."""

from __future__ import annotations

import re

from distdiag.errors import UsageError
from distdiag.knowledge.cuda import arch_of

CHECKS = {
    "python": "the interpreter to examine does not run",
    "torch.build": "torch is missing, or built without CUDA",
    "torch.import": "torch cannot be imported, or does not come back",
    "driver.present": "no driver, or none that this program or container can reach",
    "driver.hangs": "the driver does not answer",
    "driver.unasked": "the driver could not be asked in time",
    "driver.init": "the driver does not start (cuInit)",
    "driver.userland-kernel": "the kernel's driver and its libraries are of different versions",
    "driver.min": "the driver is too old for torch's CUDA",
    "driver.compat-lib": "a cuda-compat package that does not fit",
    "driver.stub": "the toolkit's stub is taken for the driver",
    "driver.wsl": "a Linux driver inside WSL",
    "gpu.visible": "GPUs that cannot be seen",
    "gpu.torch": "torch sees fewer GPUs than the driver",
    "gpu.fabric": "the NVSwitch fabric is not ready",
    "gpu.mig": "GPUs cut into MIG instances",
    "arch.torch": "torch has no code for a GPU",
    "arch.ext": "an extension has no code for a GPU",
    "libs.shadow": "LD_LIBRARY_PATH replaces libraries that torch brings",
    "libs.versions": "packages that are not of the versions that torch, or what needs torch, asks for",
    "libs.duplicate-wheels": "two NVIDIA wheels own the same files",
    "libs.ext-soname": "an extension was built for another CUDA",
    "libs.path-empty": "an empty element in LD_LIBRARY_PATH",
    "libs.path-missing": "a directory in LD_LIBRARY_PATH that is not there",
    "toolkit.found": "no nvcc",
    "toolkit.path-missing": "a directory on PATH that is not there",
    "toolkit.home": "CUDA_HOME, or what torch takes for it, is no toolkit",
    "toolkit.multiple": "several toolkits",
    "toolkit.nvcc-broken": "nvcc answers and does not compile",
    "toolkit.version-sources": "a toolkit of two versions",
    "toolkit.torch-mismatch": "nvcc and torch are of different CUDA versions",
    "toolkit.headers": "a toolkit's headers are missing, or where torch does not look",
    "toolkit.cudart-devlink": "no libcudart.so to link against",
    "cc.nvcc": "nvcc's host compiler is missing or too new",
    "cc.torch": "torch's C++ compiler is missing, too new or too old",
    "cc.flags": "NVCC_PREPEND_FLAGS or NVCC_APPEND_FLAGS change the compiler",
    "archlist.syntax": "TORCH_CUDA_ARCH_LIST cannot be read",
    "archlist.nvcc": "TORCH_CUDA_ARCH_LIST asks for what nvcc does not compile",
    "archlist.gpus": "TORCH_CUDA_ARCH_LIST leaves a GPU out",
    "archlist.unset-nogpu": "no TORCH_CUDA_ARCH_LIST and no GPU to take it from",
    "build.ninja": "no ninja",
    "build.python-h": "no Python.h",
    "build.libaio": "no libaio for DeepSpeed's async_io",
    "build.jobs": "more compilers than memory carries",
    "build.cache-stale": "extensions that another torch built",
    "deepspeed.cuda13": "DeepSpeed refuses minor versions of CUDA 13 that torch accepts",
    "deepspeed.cuda-minor": "DeepSpeed refuses a minor version that torch accepts",
    "deepspeed.wheel": "DeepSpeed's prebuilt ops are for another torch",
    "sys.shm": "little shared memory",
    "no-answer": "a host that was reached did not tell its facts",
    "nodes-differ": "nodes that are not alike",
    "log": "what a log says (--explain)",
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
            f"--gpu {gpu!r}: this name is not known",
            hint="name its capability, as nvidia-smi --query-gpu=compute_cap --format=csv says it there: --gpu 8.6",
        )
    return found


def chosen(given: str) -> str:
    """Read an id, or the beginning of several ("toolkit"), with or without the command's name.

    Raises:
        UsageError: there is no such id.
    """
    plain = given.strip().removeprefix("cuda-env.").rstrip(".*")
    if not any(matches(id_, plain) for id_ in CHECKS):
        raise UsageError(f"{given!r} is no id of cuda-env", hint="one of: " + ", ".join(CHECKS))
    return plain


def matches(id_: str, prefix: str) -> bool:
    """Return whether an id is meant."""
    return id_ == prefix or id_.startswith(prefix + ".")
