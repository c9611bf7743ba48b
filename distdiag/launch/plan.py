"""The plan of a run, from the request and the nodes' facts, or the finding that rules it out. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distdiag.cluster.hosts import fold
from distdiag.diagnosis.wording import counted
from distdiag.errors import UsageError
from distdiag.launch.record import Allocation, Plan
from distdiag.launch.types import MOST_RANKS, Backend, Device
from distdiag.launch.wording import found
from distdiag.report import Finding, Where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.launch.record import NodeSlot
    from distdiag.launch.types import Request

RANKS_WITHOUT_GPU = 2


def check_request(request: Request) -> None:
    """Refuse contradictory options that no machine could satisfy. Raises UsageError."""
    if request.backend is Backend.NCCL and request.device is Device.CPU:
        raise UsageError("nccl works between GPUs only", hint="leave out --device cpu, or use --backend gloo")


def make_plan(request: Request, places: Sequence[NodeSlot]) -> Plan | Finding:
    """Decide on ranks, backend and device for all nodes."""
    needs_cuda = request.device is Device.CUDA or request.backend is Backend.NCCL
    is_auto = request.device is Device.AUTO and request.backend is Backend.AUTO
    broken = [place for place in places if place.facts.gpus.visible is None]
    if broken and (needs_cuda or is_auto):
        return _driver_trouble(request, broken)
    on_cuda = needs_cuda or (is_auto and any(place.facts.gpus.visible for place in places))
    device = Device.CUDA if on_cuda else Device.CPU
    backend = request.backend
    if backend is Backend.AUTO:
        backend = Backend.NCCL if on_cuda else Backend.GLOO
    shares: list[Allocation] = []
    for place in places:
        share = _share(request, place, sum(planned.nproc for planned in shares), on_cuda=on_cuda)
        gpus = place.facts.gpus.visible or 0
        if on_cuda and (gpus == 0 or (backend is Backend.NCCL and share.nproc > gpus)):
            return _too_few_gpus(request, place, places, max(share.nproc, 1))
        shares.append(share)
    plan = Plan(shares=tuple(shares), backend=backend, device=device)
    highest = max(request.fault.ranks, default=None) if request.fault is not None else None
    if highest is not None and highest >= plan.nproc:
        raise UsageError(
            f"--inject names rank {highest}, but the ranks are 0 to {plan.nproc - 1}",
            hint=f"use a lower rank, or --nproc {highest + 1}",
        )
    return plan


def _share(request: Request, place: NodeSlot, first_rank: int, *, on_cuda: bool) -> Allocation:
    gpus = place.facts.gpus.visible or 0
    if place.local is not None:
        nproc = request.nproc or 1
    else:
        nproc = request.nproc or place.slots or (gpus if on_cuda else RANKS_WITHOUT_GPU)
    if nproc > MOST_RANKS:
        raise UsageError(
            f"{nproc} ranks on {place.host}: the limit is {MOST_RANKS}", hint="correct its slots, or use --nproc N"
        )
    local_rank, local_world_size = place.local if place.local is not None and nproc == 1 else (0, nproc)
    return Allocation(
        node=place.node,
        host=place.host,
        first_rank=first_rank,
        nproc=nproc,
        memory_available_bytes=place.facts.memory_available_bytes,
        cpus=place.facts.cpus,
        sharing=-(-local_world_size // gpus) if on_cuda and gpus else 1,
        first_local_rank=local_rank,
        local_world_size=local_world_size,
        door=place.door or place.node,
    )


def _driver_trouble(request: Request, broken: Sequence[NodeSlot]) -> Finding:
    hosts = tuple(place.host for place in broken)
    return found(
        "driver-broken",
        request,
        Where(hosts=hosts),
        hosts=fold(hosts),
        error=broken[0].facts.gpus.error,
        again=request.again(device="cpu", backend="gloo"),
    )


def _too_few_gpus(request: Request, place: NodeSlot, places: Sequence[NodeSlot], nproc: int) -> Finding:
    facts = place.facts
    gpus = facts.gpus.visible or 0
    hidden = facts.cuda_visible_devices
    evidence = () if hidden is None else (f"CUDA_VISIBLE_DEVICES={hidden}",)
    if gpus == 0:
        why = "CUDA_VISIBLE_DEVICES hides them" if facts.gpus.driver_present else "there is no NVIDIA driver"
        title = f"no GPU is visible on {place.host}: {why}"
        others = [other.host for other in places if other.facts.gpus.visible]
        if others:
            title += f" ({fold(others)} {'has' if len(others) == 1 else 'have'} GPUs)"
        fix, again = "test the ranks on the CPU instead", request.again(device="cpu", backend="gloo")
    else:
        title = f"{place.host} has {counted(gpus, 'visible GPU')}, but nccl needs one per rank ({nproc} ranks)"
        fix, again = "start one rank per GPU", request.again(nproc=str(gpus))
    at = Where(hosts=(place.host,))
    return found("too-few-gpus", request, at, evidence=evidence, title=title, fix=fix, again=again)
