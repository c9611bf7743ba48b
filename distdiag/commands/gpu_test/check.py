"""collect -> launch -> diagnose, for gpu-test."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from distdiag.cluster import launch
from distdiag.cluster.hosts import name_ranks
from distdiag.cluster.node import Node
from distdiag.commands.gpu_test import diagnose, findings
from distdiag.commands.gpu_test.blame import position
from distdiag.commands.gpu_test.collect import NodeFacts
from distdiag.commands.gpu_test.model import STAGES, Course, Device
from distdiag.commands.gpu_test.plan import check_request, make_plan
from distdiag.errors import DistdiagError, UsageError
from distdiag.node import rendezvous
from distdiag.node.identity import identify
from distdiag.report import Finding

if TYPE_CHECKING:
    from distdiag.commands.gpu_test.model import GpuTest, Plan, Request
    from distdiag.deliver import Progress
    from distdiag.report import Report

_HERE = "distdiag.commands.gpu_test"
_ADDRESS = "127.0.0.1"
_WAITING_IS_NEWS_S = 5.0


def check(request: Request, progress: Progress) -> Report[GpuTest]:
    """Test the ranks of this node.

    Raises:
        UsageError: the request contradicts itself or the machine.
        DistdiagError: the node side failed, or the logs asked for cannot be kept.
    """
    check_request(request)
    _look_around()
    ask = {"gpus": request.device is not Device.CPU}
    with Node("this node", collect=f"{_HERE}.collect", ask=ask, rank=f"{_HERE}.rank") as node:
        facts = node.facts(NodeFacts)
        node.host = facts.host
        plan = make_plan(request, facts)
        if isinstance(plan, Finding):
            return diagnose.not_run(request, facts, plan)
        port, taken = launch.take_port(node, request.master_port)
        if taken is not None:
            return diagnose.not_run(request, facts, findings.port_not_free(facts, taken, request), plan)
        log_dir = _keep_logs(node) if request.nccl_debug else None
        run = launch.Run(node, _specs(request, plan, port), f"{_HERE}.rank", _Narrator(plan, progress).tell)
        outcome = run.wait(request.timeout_s)
        traces = list(run.traces.values())
    return diagnose.diagnose(request, facts, plan, Course(outcome, traces, log_dir, run.stalled_s))


def _look_around() -> None:
    """Refuse to start where the answer would be about something else than the ranks."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise DistdiagError(
            "the working directory does not exist any more; torch cannot load from it", hint="cd ~"
        ) from None
    me = identify(os.environ)
    if me is None or (me.local_world_size or 1) < 2:
        return
    # Each of us would start ranks on all GPUs, at the same time.
    here = f"rank {me.rank} of {me.world_size}, {me.local_world_size} on this node; gpu-test starts the ranks itself"
    if me.launcher == "environment":
        raise UsageError(
            f"RANK and WORLD_SIZE in the environment say that this is {here}",
            hint="forget them: unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
        )
    raise UsageError(
        f"{me.launcher} started this as {here}",
        hint=f"start it once on a node, without the launcher: distdiag gpu-test --nproc {me.local_world_size}",
    )


class _Narrator:
    """Says on stderr when all ranks have reached a stage, and who is being waited for."""

    def __init__(self, plan: Plan, progress: Progress) -> None:
        self._progress = progress
        self._told = -1
        self._told_waiting = False
        progress.news(f"starting {plan.nproc} ranks on {plan.device}, {plan.backend}")

    def tell(self, run: launch.Run) -> None:
        """Look at all ranks; tell what is new."""
        at = {trace.rank: position(trace) for trace in run.traces.values()}
        lowest = min(at.values())
        stage = min(lowest[0], len(STAGES) - 1)
        while self._told < stage:
            self._told += 1
            self._told_waiting = False
            pids = ", ".join(f"{trace.rank}={trace.pid}" for trace in run.traces.values()) if self._told == 0 else ""
            self._progress.news(f"{STAGES[self._told]}: all ranks" + (f" (pids {pids})" if pids else ""))
        behind = name_ranks(rank for rank, place in at.items() if place == lowest)
        waiting = f"waiting for {behind} in {STAGES[max(stage, 0)]} ({run.silent_s:.0f} s)"
        self._progress.now(waiting)
        if run.silent_s > _WAITING_IS_NEWS_S and not self._told_waiting:
            self._told_waiting = True
            self._progress.news(waiting)


def _keep_logs(node: Node) -> str:
    node.order("keep-logs")
    answer = node.expect("logs", 5.0)
    if answer["folder"] is None:
        raise DistdiagError(
            f"no directory for the ranks' logs can be made: {answer['error']}",
            hint='name one that can be written: TMPDIR="$HOME" distdiag gpu-test --nccl-debug',
        )
    return str(answer["folder"])


def _specs(request: Request, plan: Plan, port: int) -> list[launch.RankSpec]:
    shared = {
        "world_size": plan.nproc,
        "address": _ADDRESS,
        "port": port,
        "nonce": rendezvous.new_nonce(),
        "backend": plan.backend,
        "device": plan.device,
        "size_bytes": request.size_bytes,
        "memory_bytes": plan.memory_bytes,
        "memory_fraction": plan.memory_fraction,
        "sharing": plan.sharing,
        "timeout_s": request.timeout_s,
    }
    return [
        launch.RankSpec(
            rank=rank,
            local_rank=rank,
            config={**shared, "rank": rank, "local_rank": rank, "fault": _fault_for(request, rank)},
            env=_environment(rank, plan.nproc, port, nccl_debug=request.nccl_debug),
        )
        for rank in range(plan.nproc)
    ]


def _fault_for(request: Request, rank: int) -> dict[str, object] | None:
    fault = request.fault
    if fault is None or fault.rank != rank:
        return None
    return {"kind": fault.kind, "stage": fault.stage, "seconds": 2 * request.timeout_s + 5}


def _environment(rank: int, world_size: int, port: int, *, nccl_debug: bool) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": _ADDRESS,
        "MASTER_PORT": str(port),
        # Torch's own switch for large pages: touching the buffers of four ranks on two cores took a quarter of the run.
        "THP_MEM_ALLOC_ENABLE": "1",
        **({"NCCL_DEBUG": "INFO"} if nccl_debug else {}),
    }
