"""Runs as `python -c`: queries NVIDIA's libraries, and prints their answers as JSON lines.

The driver is initialised here and never in the agent, because a wedged one never returns; lines printed before remain
known. No context is created on a GPU: it would take memory from a training job.
"""

from __future__ import annotations

import ctypes
import json
import os

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, cuda.h


# Redirect the output of libraries: stdout is for our records.
_OUT = os.dup(1)
os.dup2(2, 1)


def say(**words: object) -> None:
    """Print one record, unbuffered."""
    os.write(_OUT, (json.dumps(words) + "\n").encode())


def where(name: str) -> str:
    """Return the file chosen by the loader for a library."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith(name):
                return "/" + path
    return ""


def load(name: str, kind: str) -> ctypes.CDLL | None:
    """Load a library and report its file, or the error."""
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        say(about=kind, error=str(error))
        return None
    say(about=kind, path=where(name.partition(".so")[0] + ".so"))
    return library


def ask_management(nvml: ctypes.CDLL) -> None:
    """Query NVML, which sees all GPUs regardless of CUDA_VISIBLE_DEVICES."""
    status = nvml.nvmlInit_v2()
    say(about="nvml-init", status=status)
    if status:
        return
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlSystemGetDriverVersion(text, 96) == 0:
        say(about="nvml-driver", version=text.value.decode())
    number = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(number)):
        return
    for index in range(number.value):
        device = ctypes.c_void_p()
        status = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        if status:
            say(about="nvml-gpu", index=index, status=status)
            continue
        nvml.nvmlDeviceGetName(device, text, 96)
        major, minor = ctypes.c_int(), ctypes.c_int()
        nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        now, later = ctypes.c_uint(), ctypes.c_uint()
        mig = nvml.nvmlDeviceGetMigMode(device, ctypes.byref(now), ctypes.byref(later)) == 0 and now.value == 1
        name, capability = text.value.decode("utf-8", "replace"), [major.value, minor.value]
        say(about="nvml-gpu", index=index, status=0, name=name, capability=capability, mig=mig)


def ask_driver(cuda: ctypes.CDLL) -> None:
    """Query the driver's own library, as every CUDA program does."""
    version = ctypes.c_int()
    status = cuda.cuDriverGetVersion(ctypes.byref(version))
    say(about="cuda-version", status=status, version=version.value)
    say(about="cuda-init-began")
    status = cuda.cuInit(0)
    count = ctypes.c_int()
    if status == 0:
        status = cuda.cuDeviceGetCount(ctypes.byref(count))
    say(about="cuda-init", status=status, count=count.value)
    text = ctypes.create_string_buffer(96)
    for index in range(count.value):
        device, values = ctypes.c_int(), [ctypes.c_int(), ctypes.c_int()]
        if cuda.cuDeviceGet(ctypes.byref(device), index):
            continue
        cuda.cuDeviceGetName(text, 96, device)
        for attribute, value in zip((_MAJOR, _MINOR), values):
            cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        name = text.value.decode("utf-8", "replace")
        say(about="cuda-gpu", index=index, name=name, capability=[value.value for value in values])


if __name__ == "__main__":
    say(about="begun")
    if (_nvml := load("libnvidia-ml.so.1", "nvml")) is not None:
        ask_management(_nvml)
    if (_cuda := load("libcuda.so.1", "cuda")) is not None:
        ask_driver(_cuda)
    say(about="end")
