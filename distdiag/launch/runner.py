"""Runs of ranks, from a command's request to the record that rank_report.py judges."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from distdiag.agent import handshake
from distdiag.agent.protocol import KeepLogs, Logs
from distdiag.cluster.fleet import hint_here
from distdiag.cluster.hosts import name_ranks
from distdiag.cluster.rendezvous_test import RendezvousProbe
from distdiag.cluster.start_fleet import open_fleet
from distdiag.cluster.targets import describe, find_targets
from distdiag.diagnosis.nic_selection import RendezvousOverrides, rendezvous_addresses
from distdiag.errors import DistdiagError, NodeFailed, UsageError
from distdiag.facts import machine
from distdiag.facts.process.rank_identity import identify
from distdiag.launch import findings, rank_report, rank_runs, under_launcher
from distdiag.launch.environment_checks import hangs
from distdiag.launch.plan import check_request, make_plan
from distdiag.launch.record import Inventory, NodeSlot, NotStarted, RunRecord, SavedRun
from distdiag.launch.types import Device, Request
from distdiag.report import Finding
from distdiag.runner import Subcommand
from distdiag.saved_facts import Gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import RenderableType

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.rendezvous_test import RendezvousTest
    from distdiag.cluster.targets import Targets
    from distdiag.launch.record import Allocation, Asked, Data, Job, Plan
    from distdiag.launch.types import Fault
    from distdiag.output import Progress
    from distdiag.report import Report

_LOOPBACK = "127.0.0.1"
_WAITING_IS_NEWS_S = 5.0
_LOGS_S = 5.0


def carry_out(job: Job[Asked, Data], progress: Progress) -> SavedRun:
    """Run the ranks on this node, or on all requested nodes.

    Raises:
        UsageError: the request contradicts itself or the machine.
        DistdiagError: the agent failed, or the requested logs cannot be kept.
    """
    request = job.request
    check_request(request)
    _check_working_directory()
    me = identify(os.environ)
    if me is not None and me.world_size > 1:
        return under_launcher.carry_out(job, me, progress, run)
    targets = find_targets(request.cluster, os.environ)
    if targets.launcher is None:
        _refuse_network_options(request)
    with open_fleet(request.cluster, targets, job.agent) as fleet:
        if targets.launcher is not None:
            progress.news(f"connecting to {describe(targets)}")
        try:
            reached = "{} of {} hosts reached, {} failed"
            fleet.gather(lambda now: progress.now(reached.format(len(now.up), len(now.hosts), len(now.refusals))))
            scene = _scene(fleet, targets)
            if not scene.places:
                return SavedRun.of_none(NotStarted(scene=scene))
            return run(job, fleet, scene, progress)
        except KeyboardInterrupt:
            if targets.launcher is None:
                raise
            return SavedRun.of_none(NotStarted(scene=_scene(fleet, targets), interrupted=True))


def subcommand(
    name: str,
    request: type[Asked],
    job_of: Callable[[Asked], Job[Asked, Data]],
    view: Callable[[Asked, Report[Data]], Iterable[RenderableType]],
    saved_as: str = "",
) -> Subcommand[Asked, SavedRun, Data]:
    """Return a command that starts ranks."""

    def collect(request: Asked, progress: Progress) -> Gathered[SavedRun]:
        return Gathered(facts=[carry_out(job_of(request), progress)])

    return Subcommand(
        name=name,
        request=request,
        facts=SavedRun,
        collect=collect,
        diagnose=lambda request, gathered: rank_report.report_of(job_of(request), gathered.facts[0]),
        view=lambda request, _, report: view(request, report),
        saved_as=saved_as,
        by_every_rank=True,
    )


def run(job: Job[Asked, Data], fleet: Fleet, scene: Inventory, progress: Progress) -> SavedRun:
    """Plan, test the paths, and run the ranks on connected nodes."""
    plan = make_plan(job.request, scene.places)
    if isinstance(plan, Finding):
        return SavedRun.of_none(NotStarted(scene=scene, why=(plan,)))
    if (why := hangs(job.request, scene.places)) is not None:
        return SavedRun.of_none(NotStarted(scene=scene, why=(why,), plan=plan))
    try:
        return _run(job, fleet, scene, plan, progress)
    except DistdiagError as error:
        if len(scene.places) == 1 or isinstance(error, UsageError):
            raise
        why = findings.not_started(error, job.request)
        return SavedRun.of_none(NotStarted(scene=_scene_now(scene, fleet), why=(why,), plan=plan))


def _run(job: Job[Asked, Data], fleet: Fleet, scene: Inventory, plan: Plan, progress: Progress) -> SavedRun:
    request = job.request
    head = fleet.nodes[plan.shares[0].node]
    door = rank_runs.take_port(fleet, head, request.master_port)
    if door.error:
        why = findings.port_not_free(head.host, door, request)
        return SavedRun.of_none(NotStarted(scene=scene, why=(why,), plan=plan))
    meeting = None
    doors = list(dict.fromkeys(share.door for share in plan.shares))
    if len(doors) == 1 and not scene.refusals:
        _refuse_network_options(request)
    if len(doors) > 1:
        progress.news("testing the paths between the nodes")
        overrides = RendezvousOverrides(request.master_addr, request.ifname)
        meeting = RendezvousProbe(fleet, doors, door.port, partial(rendezvous_addresses, overrides=overrides)).run()
        if not meeting.is_open:
            return SavedRun.of_none(NotStarted(scene=_scene_now(scene, fleet), plan=plan, meeting=meeting))
    log_dirs = _keep_logs(fleet, plan, request) if request.nccl_debug else {}
    key = handshake.new_key()
    specs = {share.node: _specs(job, plan, share, (door.port, key), meeting) for share in plan.shares}
    narrator = _ProgressReporter(job, plan, progress)
    ranks = rank_runs.Run(fleet, specs, job.rank, request.stages, narrator.report)
    outcome = ranks.wait(request.timeout_s)
    course = RunRecord(outcome, list(ranks.traces.values()), log_dirs, ranks.stalled_s, meeting, ranks.lost)
    return SavedRun(host=machine.host_name(), scene=scene, plan=plan, course=course)


def _refuse_network_options(request: Request) -> None:
    """Refuse network options for a single node. Raises UsageError."""
    options = (("--ifname", request.ifname), ("--master-addr", request.master_addr))
    typed = [name for name, value in options if value]
    if typed:
        raise UsageError(
            f"{' and '.join(typed)} would have no effect: all ranks are on one machine and use {_LOOPBACK}",
            hint="leave it out, or name several hosts: --hosts node[1-2]",
        )


def _scene(fleet: Fleet, targets: Targets) -> Inventory:
    """Return the state of the hosts before ranks start."""
    places: list[NodeSlot] = []
    twins: list[tuple[str, str]] = []
    machines: dict[str, str] = {}
    slots = {host.name: host.slots for host in targets.hosts}
    for node in fleet.up:
        same = machines.setdefault(node.hello.machine or node.name, node.name)
        if same != node.name:
            twins.append((node.name, same))
            continue
        places.append(NodeSlot(node=node.name, host=node.host, slots=slots[node.name], facts=node.reply))
    if targets.launcher is None and fleet.refusals:
        refusal = next(iter(fleet.refusals.values()))
        raise NodeFailed(
            f"cannot start the distdiag agent on this machine: {refusal.message}",
            hint=hint_here(refusal),
        )
    return Inventory(
        places=tuple(places),
        rows=() if targets.launcher is None else fleet.rows,
        refusals=dict(fleet.refusals),
        duplicates=targets.duplicates,
        twins=tuple(twins),
    )


def _scene_now(scene: Inventory, fleet: Fleet) -> Inventory:
    """Update the rows of hosts that failed since; one node, or a launcher, has no rows."""
    return replace(scene, rows=fleet.rows, refusals=dict(fleet.refusals)) if scene.rows else scene


def _check_working_directory() -> None:
    """Refuse to start in a deleted directory: every rank would fail for that reason alone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise DistdiagError(
            "the working directory no longer exists; torch cannot be imported from there", hint="cd ~"
        ) from None


class _ProgressReporter:
    """Reports on stderr when all ranks have reached a stage, and which ranks the others are waiting for."""

    def __init__(self, job: Job[Asked, Data], plan: Plan, progress: Progress) -> None:
        self._stages = job.request.stages
        self._report_more = job.report_progress
        self._progress = progress
        self._reported = -1
        self._reported_waiting = False
        progress.news(f"starting {plan.nproc} ranks on {plan.device}, {plan.backend}")

    def report(self, run: rank_runs.Run) -> None:
        """Report news of all ranks."""
        at = {trace.rank: trace.position(self._stages) for trace in run.traces.values()}
        lowest = min(at.values())
        stage = min(lowest[0], len(self._stages) - 1)
        if any(trace.pid is None and trace.is_live for trace in run.traces.values()):
            stage = -1  # importing, before the fork
        while self._reported < stage:
            self._reported += 1
            self._reported_waiting = False
            pids = ", ".join(f"{trace.rank}={trace.pid}" for trace in run.traces.values())
            first = f" (pids {pids})" if self._reported == 0 else ""
            self._progress.news(f"{self._stages[self._reported]}: all ranks{first}")
        so_far = self._report_more(run, self._progress) if self._report_more is not None else ""
        behind = name_ranks(rank for rank, place in at.items() if place == lowest)
        waiting = f"waiting for {behind} in {self._stages[max(stage, 0)]} ({run.silent_s:.0f} s)"
        self._progress.now(f"{so_far}; {waiting}" if so_far else waiting)
        if run.silent_s > _WAITING_IS_NEWS_S and not self._reported_waiting:
            self._reported_waiting = True
            self._progress.news(waiting)


def _keep_logs(fleet: Fleet, plan: Plan, request: Request) -> dict[str, str]:
    nodes = [fleet.nodes[share.node] for share in plan.shares]
    for node in nodes:
        node.order(KeepLogs())
    answers = fleet.expect(Logs, nodes, _LOGS_S)
    folders = {}
    for node in nodes:
        answer = answers.get(node.name) or Logs(folder=None, error="no answer")
        if answer.folder is None:
            raise DistdiagError(
                f"cannot create a directory for the ranks' logs on {node.host}: {answer.error}",
                hint=f'use a writable directory: TMPDIR="$HOME" distdiag {request.command} --nccl-debug',
            )
        folders[node.host] = answer.folder
    return folders


def _specs(
    job: Job[Asked, Data], plan: Plan, share: Allocation, door: tuple[int, str], meeting: RendezvousTest | None
) -> list[rank_runs.RankSpec]:
    request = job.request
    port, key = door
    address = meeting.address if meeting is not None else _LOOPBACK
    shared = {
        "world_size": plan.nproc,
        "address": address,
        "port": port,
        "key": key,
        "backend": plan.backend,
        "device": plan.device,
        "timeout_s": request.timeout_s,
    }
    common = {
        "WORLD_SIZE": str(plan.nproc),
        "LOCAL_WORLD_SIZE": str(share.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        **({"NCCL_DEBUG": "INFO"} if request.nccl_debug else {}),
        **_interface(request, share, meeting),
    }
    specs = []
    ranks = range(share.first_rank, share.first_rank + share.nproc)
    for local_rank, rank in enumerate(ranks, share.first_local_rank):
        config = {**shared, "rank": rank, "local_rank": local_rank, **job.config(request, plan, share, rank)}
        env = {**common, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        # On GPUs each rank imports its own torch, as in the real job.
        forked = plan.device is Device.CPU and share.nproc > 1 and not _fault_before_torch(request.fault, rank)
        specs.append(rank_runs.RankSpec(rank=rank, local_rank=local_rank, config=config, env=env, forked=forked))
    return specs


def _fault_before_torch(fault: Fault | None, rank: int) -> bool:
    """Return whether a rank's fault is injected at startup, which needs a process of its own."""
    return fault is not None and rank in fault.ranks and (fault.kind == "no-import" or fault.place == "start")


def _interface(request: Request, share: Allocation, meeting: RendezvousTest | None) -> dict[str, str]:
    """Return the variables that give Gloo and NCCL the tested interface, unless the node's environment sets one."""
    if meeting is None:
        return {}
    network = meeting.networks[share.door]
    chosen = request.ifname or meeting.interfaces.get(share.door, "")
    variables = {}
    if chosen and (request.ifname or not network.wanted_gloo):
        variables["GLOO_SOCKET_IFNAME"] = chosen
    if chosen and (request.ifname or not network.wanted_nccl):
        variables["NCCL_SOCKET_IFNAME"] = chosen
    return variables
