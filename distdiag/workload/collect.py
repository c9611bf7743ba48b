"""Facts of one node before ranks start on it: its GPUs as the driver sees them, memory, shared memory."""

from __future__ import annotations

import os
import sys

from distdiag.node import machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DRIVER_TIMEOUT_S = 10.0
# The driver's own count, which respects CUDA_VISIBLE_DEVICES; in a child, because a wedged driver never returns.
_COUNT_GPUS = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
status = cuda.cuInit(0)
count = ctypes.c_int()
if status == 0:
    status = cuda.cuDeviceGetCount(ctypes.byref(count))
print(status, count.value)
"""
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, cuda.h
_NO_DRIVER = {"driver_present": False, "visible": 0, "error": ""}


def facts(ask: dict[str, Any]) -> dict[str, Any]:
    """Look at this node: distdiag.workload.facts.NodeFacts. {"gpus": False} leaves the driver alone."""
    shm = machine.shared_memory_bytes()
    return {
        "host": machine.host_name(),
        "kernel": os.uname().release,
        "python": sys.executable,
        "gpus": find_gpus() if ask["gpus"] else _NO_DRIVER,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "memory_available_bytes": machine.available_memory_bytes(),
        "shm_free_bytes": shm[0] if shm else None,
        "shm_total_bytes": shm[1] if shm else None,
        "cpus": len(os.sched_getaffinity(0)),
        "rdma_bits_per_s": _rdma_rate(),
    }


def _rdma_rate() -> int | None:
    if not os.path.isdir("/sys/class/infiniband"):
        return None
    from distdiag.node import nics

    return sum(port.rate_bits_per_s or 0 for port in nics.ib_ports() if port.state == "ACTIVE") or None


def find_gpus() -> dict[str, Any]:
    """Count the GPUs that a program started here could use: distdiag.workload.facts.Gpus. No driver, no question."""
    devices = os.listdir("/dev") if os.path.isdir("/dev") else []
    if not (
        any(name.startswith("nvidia") and name[6:].isdigit() for name in devices)
        or os.path.exists("/proc/driver/nvidia/version")
        or os.path.exists("/dev/dxg")
    ):
        return _NO_DRIVER
    from distdiag.node import run  # not before: its imports cost a node without a GPU 10 ms

    done = run.run([sys.executable, "-c", _COUNT_GPUS], timeout_s=_DRIVER_TIMEOUT_S)
    if done.timed_out:
        return _gpus(None, f"the driver did not answer within {_DRIVER_TIMEOUT_S:g} s")
    words = done.stdout.split()
    if done.status != 0 or len(words) != 2:
        complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return _gpus(None, complaint[-1] if complaint else f"the driver's library ended with {done.status}")
    status, count = int(words[0]), int(words[1])
    if status in (0, _NO_DEVICE):
        return _gpus(count)
    return _gpus(None, f"the driver's cuInit failed with error {status}")


def _gpus(visible: int | None, error: str = "") -> dict[str, Any]:
    return {"driver_present": True, "visible": visible, "error": error}
