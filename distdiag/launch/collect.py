"""Facts of one node before ranks start: the driver's GPUs, memory, shared memory."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections import Counter

from distdiag.agent.protocol import Fields
from distdiag.facts import machine
from distdiag.facts.host import pcie

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
_RESOLVER_S = 3.0
_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "MASTER_ADDR")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, cuda.h


class Ask(Fields):
    """Without `gpus`, the driver is skipped. Not a dataclass, see distdiag.agent.protocol."""

    gpus: bool


class Gpus(Fields):
    """distdiag.launch.types.Gpus."""

    driver_present: bool
    visible: int | None
    error: str


_NO_DRIVER = Gpus(driver_present=False, visible=0, error="")


def facts(ask: Ask) -> dict[str, object]:
    """Read this node: distdiag.launch.types.NodeFacts, a dataclass."""
    shm = machine.shared_memory_bytes()
    rdma_bits_per_s, rdma_ports = _rdma()
    return {
        "host": machine.host_name(),
        "kernel": os.uname().release,
        "python": sys.executable,
        "gpus": find_gpus() if ask.gpus else _NO_DRIVER,
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "memory_available_bytes": machine.available_memory_bytes(),
        "shm_free_bytes": shm[0] if shm else None,
        "shm_total_bytes": shm[1] if shm else None,
        "cpus": len(os.sched_getaffinity(0)),
        "rdma_bits_per_s": rdma_bits_per_s,
        "rdma_ports": rdma_ports,
        "pcie": pcie.look(),
        "nvidia_driver": _driver_version(),
        "machine": machine.read_text("/sys/class/dmi/id/product_name").strip(),
        "variables": machine.variables(_PREFIXES),
        "limits": _limits(),
        "stale_variables": _stale_variables(),
    }


def _limits() -> dict[str, str]:
    found = {}
    for letter, number, unit in (("-n", resource.RLIMIT_NOFILE, 1), ("-l", resource.RLIMIT_MEMLOCK, 1024)):
        soft = resource.getrlimit(number)[0]
        found[letter] = "unlimited" if soft == resource.RLIM_INFINITY else str(soft // unit)
    return found


def _stale_variables() -> list[str]:
    """List variables for scripts that contradict the launcher, left over from another job."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} & os.environ.keys():
        return []
    from distdiag.facts.process import rank_identity  # lazy: its imports cost every node 10 ms

    me = rank_identity.identify(os.environ)
    if me is None or me.launcher in ("environment", "torchrun"):
        return []
    right = {"RANK": me.rank, "WORLD_SIZE": me.world_size, "LOCAL_RANK": me.local_rank}
    set_to = {name: os.environ[name] for name in right if name in os.environ}
    found = [f"{name}={value}" for name, value in set_to.items() if value != str(right[name])]
    return [
        *found,
        *([f"MASTER_ADDR={os.environ['MASTER_ADDR']}"] if me.rank == 0 and master_addr_leads_elsewhere() else []),
    ]


def master_addr_leads_elsewhere() -> bool:
    """Return whether MASTER_ADDR is set, and does not resolve to an address of this node, which has rank 0."""
    from distdiag.facts.network import interfaces as network

    name = os.environ.get("MASTER_ADDR", "")
    if name in ("", os.uname().nodename):
        return False
    addresses = (name,) if network.is_address(name) else _resolved_in_time(name)
    own = {entry.partition("/")[0] for interface in network.interfaces() for entry in interface.addresses}
    return addresses is not None and not any(network.is_loopback(address) or address in own for address in addresses)


def _resolved_in_time(name: str) -> tuple[str, ...] | None:
    """Resolve a name; empty if unknown, None if the resolver is too slow."""
    from distdiag.facts.network import interfaces as network

    found: list[tuple[str, ...]] = []
    asking = threading.Thread(target=lambda: found.append(network.resolve(name)[0]), daemon=True)
    asking.start()
    asking.join(_RESOLVER_S)
    return found[0] if found else None


def _rdma() -> tuple[int | None, dict[str, int]]:
    if not os.path.isdir("/sys/class/infiniband"):
        return None, {}
    from distdiag.facts.network import nics

    active = [port for port in nics.ib_ports() if port.state == "ACTIVE"]
    kinds = Counter(f"{port.link}, {(port.rate_bits_per_s or 0) / 1e9:g} Gb/s" for port in active)
    return sum(port.rate_bits_per_s or 0 for port in active) or None, dict(sorted(kinds.items()))


def _driver_version() -> str:
    """Read the loaded module's version: "NVRM version: NVIDIA UNIX ... Kernel Module  570.124.06  Wed ..."."""
    line = machine.read_text("/proc/driver/nvidia/version").partition("\n")[0]
    return next((word for word in line.split() if word.partition(".")[0].isdigit() and "." in word), "")


def find_gpus() -> Gpus:
    """Count the GPUs usable by a program started here. Skipped without a driver."""
    devices = os.listdir("/dev") if os.path.isdir("/dev") else []
    if not (
        any(name.startswith("nvidia") and name[6:].isdigit() for name in devices)
        or os.path.exists("/proc/driver/nvidia/version")
        or os.path.exists("/dev/dxg")
    ):
        return _NO_DRIVER
    from distdiag.facts import programs  # lazy: its imports cost a node without a GPU 10 ms

    done = programs.run([sys.executable, "-c", _COUNT_GPUS], timeout_s=_DRIVER_TIMEOUT_S)
    if done.timed_out:
        return _gpus(None, f"no answer from the driver within {_DRIVER_TIMEOUT_S:g} s")
    words = done.stdout.split()
    if done.status != 0 or len(words) != 2:
        complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return _gpus(None, complaint[-1] if complaint else f"the driver check exited with status {done.status}")
    status, count = int(words[0]), int(words[1])
    if status in (0, _NO_DEVICE):
        return _gpus(count)
    return _gpus(None, f"cuInit failed with error {status}")


def _gpus(visible: int | None, error: str = "") -> Gpus:
    return Gpus(driver_present=True, visible=visible, error=error)
