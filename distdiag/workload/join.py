"""A command as the processes of a job that torchrun, srun or mpirun started: rank 0 reports, the others serve it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from distdiag.cluster import links
from distdiag.cluster.access import SILENCE_S
from distdiag.cluster.fleet import Fleet, Limits
from distdiag.cluster.home import Home, find_home
from distdiag.cluster.hosts import Host, fold_ranks, name_ranks
from distdiag.cluster.transports.join import JoinTransport, name_of
from distdiag.errors import DistdiagError, UsageError
from distdiag.node import agent as node_agent
from distdiag.node import boot, call_home, machine
from distdiag.node.identity import Identity, contradiction, nested_tasks
from distdiag.node.wire import Writer
from distdiag.report import Finding, Fix, Level, Report, Where
from distdiag.workload import judge
from distdiag.workload.facts import NodeFacts
from distdiag.workload.model import NotRun, Place, Scene

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.cluster.access import Agent
    from distdiag.cluster.hub import Hub
    from distdiag.cluster.node import Node
    from distdiag.deliver import Progress
    from distdiag.workload.job import Asked, Data, Job
    from distdiag.workload.model import Request

_LEFT_ALONE = 3
_INTERRUPTED = 130
_GOODBYE_S = 1.0


def carry_out(
    job: Job[Asked, Data],
    me: Identity,
    progress: Progress,
    run: Callable[[Job[Asked, Data], Fleet, Scene, Progress], Report[Data]],
) -> Report[Data]:
    """Be one of the ranks: rank 0 returns the report, every other process ends here with rank 0's exit status.

    Raises:
        UsageError: options that contradict the launcher.
        DistdiagError: the ranks do not find each other.
    """
    request = job.request
    _check_options(request, me)
    tasks = nested_tasks(os.environ, machine.ancestors(os.getpid()))
    if tasks:
        _leave_it_to_rank_0(me, 1)
        return judge.not_run(job, NotRun(scene=Scene(places=()), why=(_nested(me, tasks, request),)))
    home, hub = find_home(me, os.environ, timeout_s=request.timeout_s)
    if hub is None:
        sys.exit(_serve(me, home, job.agent, request.timeout_s))
    return _lead(job, me, hub, progress, run)


def _check_options(request: Request, me: Identity) -> None:
    """Refuse what would be done once by every process; only rank 0 says so."""
    trouble, hint = "", ""
    typed = [name for name, _ in request.cluster.typed() if name not in ("--python", "--env", "--setup")]
    if typed:
        trouble = (
            f"{me.launcher} started {me.world_size} of us, and {typed[0]} would let each of them start its own ranks"
        )
        hint = f"leave {typed[0]} out; or start distdiag once, without {me.launcher}"
    elif request.nproc is not None and (me.local_world_size or 1) > 1:
        trouble = f"{me.launcher} started {me.local_world_size} of us on this node, and --nproc would add ranks to each"
        hint = "leave --nproc out, or start one process per node"
    if trouble:
        _leave_it_to_rank_0(me, UsageError.exit_code)
        raise UsageError(trouble, hint=hint)


def _leave_it_to_rank_0(me: Identity, status: int) -> None:
    """End here as any other rank, a little later than rank 0: mpirun ends all of us as soon as one leaves."""
    if me.rank != 0:
        time.sleep(_GOODBYE_S)
        sys.exit(status)


def _serve(me: Identity, home: Home, agent: Agent, timeout_s: float) -> int:
    """As any other rank, find rank 0 and do what it says; gives the exit status that it tells."""
    places = [(address, port) for address in home.addresses for port in home.ports]
    said = {"rank": me.rank, "local_rank": me.local_rank or 0, "local_world_size": me.local_world_size or 1}
    connection = call_home.find(places, home.key, said, timeout_s=timeout_s)
    if connection is None:
        raise DistdiagError(
            f"rank {me.rank} on {machine.host_name()} found no rank 0 at {', '.join(home.addresses)}, ports "
            f"{fold_ranks(home.ports)}, within {timeout_s:g} s",
            hint="see whether rank 0 was started, and whether these ports are open there",
        )
    boot.carried.update(agent.sources())
    fd = connection.detach()
    config = agent.config_for_guest(silence_s=SILENCE_S)
    return node_agent.serve(config, fd, Writer(fd), _left_alone)


def _left_alone() -> int:
    sys.stderr.write(f"distdiag: rank 0 went away, so {machine.host_name()} ends too\n")
    return _LEFT_ALONE


def _lead(
    job: Job[Asked, Data],
    me: Identity,
    hub: Hub,
    progress: Progress,
    run: Callable[[Job[Asked, Data], Fleet, Scene, Progress], Report[Data]],
) -> Report[Data]:
    request = replace(job.request, program=_program(me, job.request.program))
    payload = job.agent.pack(request.cluster, here=False)
    transport = JoinTransport(hub, payload, patience_s=request.timeout_s)
    hosts = [Host(name=name_of(rank)) for rank in range(me.world_size)]
    with Fleet(hosts, transport, b"", Limits(facts_s=60.0)) as fleet:
        status = DistdiagError.exit_code
        try:
            progress.news(f"rank 0 of {me.world_size} by {_launcher(me)}; waiting for the others")
            fleet.gather(lambda now: progress.now(f"{len(now.up)} of {me.world_size} ranks are here"))
            report = _judge(replace(job, request=request), me, transport, fleet, progress, run)
            status = report.exit_code(strict=request.strict)
        except DistdiagError as error:
            status = error.exit_code
            raise
        except KeyboardInterrupt:
            status = _INTERRUPTED
            raise
        finally:
            # Only when our report is out: mpirun and torchrun end all of us as soon as one leaves with a fault.
            others = [fleet.nodes.pop(name) for name in list(fleet.nodes) if name != name_of(0)]
            atexit.register(_dismiss, others, status)
        return report


def _dismiss(members: list[Node], status: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for node in members:
        node.order("leave", status=status)
    links.close_all([node.link for node in members], _GOODBYE_S)


def _judge(
    job: Job[Asked, Data],
    me: Identity,
    transport: JoinTransport,
    fleet: Fleet,
    progress: Progress,
    run: Callable[[Job[Asked, Data], Fleet, Scene, Progress], Report[Data]],
) -> Report[Data]:
    scene = _scene(me, transport, fleet)
    request = job.request
    trouble = (*_missing(me, fleet, request), *_doubles(transport, request))
    if trouble:
        return judge.not_run(job, NotRun(scene=scene, why=trouble))
    report = run(job, fleet, scene, progress)
    extra = _contradiction(request)
    if extra is None:
        return report
    return Report(
        command=report.command,
        data=report.data,
        findings=(*report.findings, extra),
        summary=report.summary if report.verdict not in ("ok",) else f"{report.summary}; but {extra.title}",
        interrupted=report.interrupted,
    )


def _scene(me: Identity, transport: JoinTransport, fleet: Fleet) -> Scene:
    doors: dict[str, str] = {}
    places = []
    for node in fleet.up:
        said = transport.said.get(node.name, {})
        if node.name == name_of(0):
            said = {"local_rank": me.local_rank, "local_world_size": me.local_world_size}
        local = (_number(said.get("local_rank"), 0), max(1, _number(said.get("local_world_size"), 1)))
        door = doors.setdefault(str(node.hello.get("machine")), node.name)
        facts = node.facts(NodeFacts)
        places.append(Place(node=node.name, host=node.host, slots=None, facts=facts, local=local, door=door))
    return Scene(places=tuple(places))


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**20 else otherwise


def _missing(me: Identity, fleet: Fleet, request: Request) -> list[Finding]:
    late = [rank for rank in range(me.world_size) if name_of(rank) not in {node.name for node in fleet.up}]
    if not late:
        return []
    came = [node.host for node in fleet.up]
    reasons = dict.fromkeys(refusal.message for refusal in fleet.refusals.values())
    forget = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
    return [
        Finding(
            id=f"{request.command}.rank-missing",
            level=Level.FAIL,
            title=f"{name_ranks(late)} of {me.world_size} never came: {'; '.join(reasons)}",
            detail=f"By {_launcher(me)} there are {me.world_size} ranks. {len(came)} came, on "
            f"{', '.join(dict.fromkeys(came))}; no test was run.",
            where=Where(ranks=tuple(late)),
            fix=Fix(
                text="start all of them; if you meant this node alone, forget what the environment says"
                if me.launcher == "environment"
                else f"see what {me.launcher} says of them, and whether their node lets them connect to rank 0",
                commands=(forget,) if me.launcher == "environment" else (),
            ),
        )
    ]


def _doubles(transport: JoinTransport, request: Request) -> list[Finding]:
    if not transport.doubles:
        return []
    ranks = sorted(set(transport.doubles))
    return [
        Finding(
            id=f"{request.command}.rank-double",
            level=Level.FAIL,
            title=f"more than one process says that it is {name_ranks(ranks)}",
            detail="Each would wait for the others for ever, or mix their data.",
            where=Where(ranks=tuple(ranks)),
            fix=Fix(text="see how RANK is set: it has to be different in every process"),
        )
    ]


def _contradiction(request: Request) -> Finding | None:
    found = contradiction(os.environ)
    if found is None:
        return None
    launcher, plain = found
    return Finding(
        id=f"{request.command}.rank-variables",
        level=Level.WARN,
        title=f"RANK={plain.rank} WORLD_SIZE={plain.world_size} in the environment, and {launcher.launcher} says rank "
        f"{launcher.rank} of {launcher.world_size}",
        detail="A script that reads RANK and WORLD_SIZE takes itself for another rank than it is; with WORLD_SIZE=1 "
        "each process trains alone.",
        fix=Fix(
            text="do not export them before the launcher; set them from its variables in each process",
            commands=("unset RANK WORLD_SIZE LOCAL_RANK",),
        ),
    )


def _program(me: Identity, program: str) -> str:
    """Write how all ranks are started again, for the commands that paste."""
    per_node = me.local_world_size or 1
    nodes = max(1, me.world_size // per_node)
    return {
        "srun": f"srun -N {nodes} -n {me.world_size} {program}",
        "Open MPI": f"mpirun -np {me.world_size} {program}",
        "MPICH": f"mpirun -np {me.world_size} {program}",
        "torchrun": f"torchrun --nproc-per-node {per_node} -m distdiag",
    }.get(me.launcher, program)


def _launcher(me: Identity) -> str:
    return "RANK and WORLD_SIZE" if me.launcher == "environment" else me.launcher


def _nested(me: Identity, tasks: int, request: Request) -> Finding:
    return Finding(
        id=f"{request.command}.nested-launchers",
        level=Level.FAIL,
        title=f"mpirun runs in each of the {tasks} tasks of an srun step: {tasks} copies of a {me.world_size}-rank job",
        detail="No test was run: the copies would fight for the same GPUs.",
        fix=Fix(
            text="start mpirun once, from the batch script; or let srun alone start the ranks",
            commands=(f"srun -n {me.world_size} distdiag {request.command}",),
        ),
    )
