"""From what was typed and what the node has to what will be run; or to the finding that says why not. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.commands.gpu_test.model import Backend, Device, Plan
from distdiag.commands.gpu_test.words import again
from distdiag.errors import UsageError
from distdiag.report import Finding, Fix, Level, Where

if TYPE_CHECKING:
    from distdiag.commands.gpu_test.collect import NodeFacts
    from distdiag.commands.gpu_test.model import Request

RANKS_WITHOUT_GPU = 2
MEMORY_ON_CPU_BYTES = 64 * 2**20
MEMORY_FRACTION = 0.5
_FLOAT_BYTES = 4


def check_request(request: Request) -> None:
    """Refuse what contradicts itself, whatever the machine. Raises UsageError."""
    if request.size_bytes < _FLOAT_BYTES:
        raise UsageError("--size is less than one float32 element", hint="give at least 4 bytes")
    if request.backend is Backend.NCCL and request.device is Device.CPU:
        raise UsageError("nccl moves data between GPUs only", hint="leave out --device cpu, or use --backend gloo")


def make_plan(request: Request, facts: NodeFacts) -> Plan | Finding:
    """Decide on ranks, backend and device for one node."""
    wants_cuda = request.device is Device.CUDA or request.backend is Backend.NCCL
    wants_best = request.device is Device.AUTO and request.backend is Backend.AUTO
    if facts.gpus.visible is None and (wants_cuda or wants_best):
        return _driver_trouble(request, facts)
    gpus = facts.gpus.visible or 0
    on_cuda = wants_cuda or (wants_best and gpus > 0)
    device = Device.CUDA if on_cuda else Device.CPU
    backend = request.backend
    if backend is Backend.AUTO:
        backend = Backend.NCCL if on_cuda else Backend.GLOO
    nproc = request.nproc or (gpus if on_cuda else RANKS_WITHOUT_GPU)
    if on_cuda and (gpus == 0 or (backend is Backend.NCCL and nproc > gpus)):
        return _too_few_gpus(request, facts, max(nproc, 1))
    if request.fault is not None and request.fault.rank >= nproc:
        raise UsageError(
            f"--inject names rank {request.fault.rank}, and there are ranks 0 to {nproc - 1}",
            hint=f"give a smaller rank, or --nproc {request.fault.rank + 1}",
        )
    memory = MEMORY_ON_CPU_BYTES
    if request.memory_fraction is not None and facts.memory_available_bytes is not None:
        memory = int(facts.memory_available_bytes * request.memory_fraction / nproc)
    return Plan(
        nproc=nproc,
        backend=backend,
        device=device,
        memory_bytes=memory,
        memory_fraction=request.memory_fraction or MEMORY_FRACTION,
        sharing=-(-nproc // gpus) if on_cuda else 1,
    )


def _driver_trouble(request: Request, facts: NodeFacts) -> Finding:
    return Finding(
        id="gpu-test.cuda-unavailable",
        level=Level.FAIL,
        title=f"{facts.host} has an NVIDIA driver that does not work: {facts.gpus.error}",
        detail="No rank was started: none could use a GPU.",
        where=Where(hosts=(facts.host,)),
        fix=Fix(
            text="see what the driver itself says; to test the ranks on the CPU meanwhile, use --device cpu",
            commands=("nvidia-smi", again(request, device="cpu", backend="gloo")),
        ),
    )


def _too_few_gpus(request: Request, facts: NodeFacts, nproc: int) -> Finding:
    gpus = facts.gpus.visible or 0
    hidden = facts.cuda_visible_devices
    evidence = () if hidden is None else (f"CUDA_VISIBLE_DEVICES={hidden}",)
    if gpus == 0:
        why = "CUDA_VISIBLE_DEVICES hides them" if facts.gpus.driver_present else "there is no NVIDIA driver"
        title = f"{facts.host} shows no GPU: {why}"
        cpu = again(request, device="cpu", backend="gloo")
        fix = Fix(text="to test the ranks on the CPU instead", commands=(cpu,))
    else:
        title = f"{facts.host} shows {gpus} GPU(s), and nccl needs one for each of {nproc} ranks"
        fix = Fix(text="start one rank per GPU", commands=(again(request, nproc=str(gpus)),))
    return Finding(
        id="gpu-test.too-few-gpus",
        level=Level.FAIL,
        title=title,
        detail="No rank was started.",
        where=Where(hosts=(facts.host,)),
        evidence=evidence,
        fix=fix,
    )
