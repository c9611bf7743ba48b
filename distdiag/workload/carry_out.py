"""collect -> launch -> diagnose, for every command that works on ranks."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdiag.cluster import access, launch, recipes
from distdiag.cluster.access import open_fleet
from distdiag.cluster.hosts import name_ranks
from distdiag.cluster.meeting import Scout, Wish
from distdiag.cluster.rows import HostState, Refusal
from distdiag.cluster.targets import THIS_NODE, Cluster, describe, find_targets
from distdiag.errors import DistdiagError, NodeFailed
from distdiag.node import machine, rendezvous
from distdiag.node.identity import identify
from distdiag.report import Finding
from distdiag.workload import findings, join, judge
from distdiag.workload.blame import position
from distdiag.workload.collect import find_gpus
from distdiag.workload.facts import NodeFacts
from distdiag.workload.model import Course, Device, NotRun, Place, Request, Scene
from distdiag.workload.plan import RANKS_WITHOUT_GPU, check_request, make_plan

if TYPE_CHECKING:
    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.meeting import Meeting
    from distdiag.cluster.recipes import Recipe
    from distdiag.cluster.targets import Targets
    from distdiag.deliver import Progress
    from distdiag.report import Report
    from distdiag.workload.job import Asked, Data, Job
    from distdiag.workload.model import Plan, Share

_LOOPBACK = "127.0.0.1"
_WAITING_IS_NEWS_S = 5.0
_LOGS_S = 5.0


def carry_out(job: Job[Asked, Data], progress: Progress) -> Report[Data]:
    """Run the ranks of this node, or of all nodes that are asked for, and judge.

    Raises:
        UsageError: the request contradicts itself or the machine.
        DistdiagError: the node side failed, or the logs asked for cannot be kept.
    """
    request = job.request
    check_request(request)
    _look_around()
    me = identify(os.environ)
    if me is not None and me.world_size > 1:
        return join.carry_out(job, me, progress, run)
    targets = find_targets(request.cluster, os.environ)
    with open_fleet(request.cluster, targets, job.agent) as fleet:
        if targets.launcher is not None:
            progress.news(f"reaching {describe(targets)}")
        try:
            fleet.gather(lambda now: _tell_reached(now, progress))
            scene = _scene(fleet, targets)
            if not scene.places:
                return judge.not_run(job, NotRun(scene=scene))
            return run(job, fleet, scene, progress)
        except KeyboardInterrupt:
            if targets.launcher is None:
                raise
            return judge.not_run(job, NotRun(scene=_scene(fleet, targets), interrupted=True))


def explain(job: Job[Any, Any], recipe: Recipe | None) -> list[str]:
    """Write how the hosts would be reached, or the lines that start the same under a launcher."""
    request = job.request
    check_request(request)
    targets = find_targets(request.cluster, os.environ)
    if recipe is None:
        return access.explain(request.cluster, targets, job.agent)
    hosts = [machine.host_name() if host is THIS_NODE else host.name for host in targets.hosts]
    gpus = (find_gpus()["visible"] or 0) if request.device is not Device.CPU else 0
    nproc = request.nproc or targets.hosts[0].slots or gpus or RANKS_WITHOUT_GPU
    plain = replace(request, nproc=None, cluster=Cluster())
    again = plain.again(**({"inject": plain.injected.option} if plain.injected is not None else {}))
    lines = recipes.lines(recipe, hosts, nproc, again, gpus=gpus > 0)
    if shutil.which("torchrun") is None:
        lines = [
            line.replace("torchrun ", f"{shlex.quote(sys.executable)} -m torch.distributed.run ") for line in lines
        ]
    return lines


def run(job: Job[Asked, Data], fleet: Fleet, scene: Scene, progress: Progress) -> Report[Data]:
    """Plan, try the ways, run the ranks on nodes that are up, and judge."""
    request = job.request
    plan = make_plan(request, scene.places)
    if isinstance(plan, Finding):
        return judge.not_run(job, NotRun(scene=scene, why=(plan,)))
    head = fleet.nodes[plan.shares[0].node]
    port, taken = launch.take_port(fleet, head, request.master_port)
    if taken is not None:
        why = findings.port_not_free(head.host, taken, request)
        return judge.not_run(job, NotRun(scene=scene, why=(why,), plan=plan))
    meeting = None
    doors = list(dict.fromkeys(share.door for share in plan.shares))
    if len(doors) > 1:
        progress.news("trying the ways between the nodes")
        meeting = Scout(fleet, doors, port, Wish(request.master_addr, request.ifname)).find()
        if not meeting.is_open:
            return judge.not_run(job, NotRun(scene=scene, plan=plan, meeting=meeting))
    log_dirs = _keep_logs(fleet, plan, request) if request.nccl_debug else {}
    nonce = rendezvous.new_nonce()
    specs = {share.node: _specs(job, plan, share, (port, nonce), meeting) for share in plan.shares}
    narrator = _Narrator(job, plan, progress)
    ranks = launch.Run(fleet, specs, job.rank, narrator.tell)
    outcome = ranks.wait(request.timeout_s)
    course = Course(outcome, list(ranks.traces.values()), log_dirs, ranks.stalled_s, meeting, ranks.lost)
    return job.diagnose(request, scene, plan, course)


def _scene(fleet: Fleet, targets: Targets) -> Scene:
    """Put together what is known of the hosts; facts that make no sense cost their host its place."""
    places: list[Place] = []
    twins: list[tuple[str, str]] = []
    machines: dict[str, str] = {}
    slots = {host.name: host.slots for host in targets.hosts}
    for node in fleet.up:
        same = machines.setdefault(str(node.hello.get("machine") or node.name), node.name)
        if same != node.name:
            twins.append((node.name, same))
            continue
        try:
            places.append(Place(node=node.name, host=node.host, slots=slots[node.name], facts=node.facts(NodeFacts)))
        except DistdiagError as error:
            fleet.refuse(node.name, Refusal(state=HostState.NONSENSE, stage="facts", message=str(error)), node.began)
    if targets.launcher is None and fleet.refusals:
        refusal = next(iter(fleet.refusals.values()))
        raise NodeFailed(
            f"distdiag's node side cannot be used on this machine: {refusal.message}",
            hint=refusal.hint or "; ".join(refusal.evidence) or "run it again; see who ends processes here",
        )
    return Scene(
        places=tuple(places),
        rows=() if targets.launcher is None else fleet.rows,
        refusals=dict(fleet.refusals),
        duplicates=targets.duplicates,
        twins=tuple(twins),
    )


def _tell_reached(fleet: Fleet, progress: Progress) -> None:
    progress.now(f"{len(fleet.up)} of {len(fleet.hosts)} hosts reached, {len(fleet.refusals)} given up")


def _look_around() -> None:
    """Refuse to start where the answer would be about something else than the ranks."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise DistdiagError(
            "the working directory does not exist any more; torch cannot load from it", hint="cd ~"
        ) from None


class _Narrator:
    """Says on stderr when all ranks have reached a stage, and who is being waited for."""

    def __init__(self, job: Job[Asked, Data], plan: Plan, progress: Progress) -> None:
        self._stages = job.request.stages
        self._tell = job.tell
        self._progress = progress
        self._told = -1
        self._told_waiting = False
        progress.news(f"starting {plan.nproc} ranks on {plan.device}, {plan.backend}")

    def tell(self, run: launch.Run) -> None:
        """Look at all ranks; tell what is new."""
        at = {trace.rank: position(trace, self._stages) for trace in run.traces.values()}
        lowest = min(at.values())
        stage = min(lowest[0], len(self._stages) - 1)
        if any(trace.pid is None and trace.is_live for trace in run.traces.values()):
            stage = -1  # importing, before they are forked
        while self._told < stage:
            self._told += 1
            self._told_waiting = False
            pids = ", ".join(f"{trace.rank}={trace.pid}" for trace in run.traces.values()) if self._told == 0 else ""
            self._progress.news(f"{self._stages[self._told]}: all ranks" + (f" (pids {pids})" if pids else ""))
        so_far = self._tell(run, self._progress) if self._tell is not None else ""
        behind = name_ranks(rank for rank, place in at.items() if place == lowest)
        waiting = f"waiting for {behind} in {self._stages[max(stage, 0)]} ({run.silent_s:.0f} s)"
        self._progress.now(f"{so_far}; {waiting}" if so_far else waiting)
        if run.silent_s > _WAITING_IS_NEWS_S and not self._told_waiting:
            self._told_waiting = True
            self._progress.news(waiting)


def _keep_logs(fleet: Fleet, plan: Plan, request: Request) -> dict[str, str]:
    nodes = [fleet.nodes[share.node] for share in plan.shares]
    for node in nodes:
        node.order("keep-logs")
    answers = fleet.expect("logs", nodes, _LOGS_S)
    folders = {}
    for node in nodes:
        answer = answers.get(node.name, {"folder": None, "error": "no answer"})
        if answer["folder"] is None:
            raise DistdiagError(
                f"no directory for the ranks' logs can be made on {node.host}: {answer['error']}",
                hint=f'name one that can be written: TMPDIR="$HOME" distdiag {request.command} --nccl-debug',
            )
        folders[node.host] = str(answer["folder"])
    return folders


def _specs(
    job: Job[Asked, Data], plan: Plan, share: Share, door: tuple[int, str], meeting: Meeting | None
) -> list[launch.RankSpec]:
    request = job.request
    port, nonce = door
    address = meeting.address if meeting is not None else _LOOPBACK
    shared = {
        "world_size": plan.nproc,
        "address": address,
        "port": port,
        "nonce": nonce,
        "backend": plan.backend,
        "device": plan.device,
        "timeout_s": request.timeout_s,
    }
    common = {
        "WORLD_SIZE": str(plan.nproc),
        "LOCAL_WORLD_SIZE": str(share.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # Torch's own switch for large pages: touching the buffers of four ranks on two cores took a quarter of the run.
        "THP_MEM_ALLOC_ENABLE": "1",
        **({"NCCL_DEBUG": "INFO"} if request.nccl_debug else {}),
        **_interface(request, share, meeting),
    }
    specs = []
    ranks = range(share.first_rank, share.first_rank + share.nproc)
    for local_rank, rank in enumerate(ranks, share.first_local_rank):
        config = {**shared, "rank": rank, "local_rank": local_rank, **job.config(request, plan, share, rank)}
        env = {**common, "RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        # On GPUs each rank imports its own torch, as each rank of the job will.
        forked = plan.device is Device.CPU and share.nproc > 1 and not _fault_before_torch(config["fault"])
        specs.append(launch.RankSpec(rank=rank, local_rank=local_rank, config=config, env=env, forked=forked))
    return specs


def _fault_before_torch(fault: dict[str, Any] | None) -> bool:
    """Whether a rank is to meet its fault while it starts: it has to be alone then."""
    return fault is not None and (fault.get("kind") == "no-import" or fault.get("stage") == "start")


def _interface(request: Request, share: Share, meeting: Meeting | None) -> dict[str, str]:
    """Tell Gloo and NCCL the interface that was tried, unless the node's own environment names one."""
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
