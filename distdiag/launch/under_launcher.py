"""A command run as the processes of a torchrun, srun or mpirun job: rank 0 reports, the others serve it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from distdiag.agent import agent as node_agent
from distdiag.agent import boot, connect_back
from distdiag.agent.protocol import Leave
from distdiag.agent.wire import Writer
from distdiag.cluster import links
from distdiag.cluster.fleet import Fleet, Limits
from distdiag.cluster.hosts import Host, fold_ranks, name_ranks
from distdiag.cluster.start_fleet import silence_s
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts import machine
from distdiag.facts.process.rank_identity import Identity, contradiction, nested_tasks
from distdiag.launch import rank_report
from distdiag.launch.collect import master_addr_leads_elsewhere
from distdiag.launch.join import JoinTransport, name_of
from distdiag.launch.rank0_discovery import Home, find_home
from distdiag.launch.record import Inventory, NodeSlot, NotStarted, SavedRun
from distdiag.launch.types import NodeFacts
from distdiag.launch.wording import found
from distdiag.output import say
from distdiag.report import Finding, Where, quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.cluster.acceptor import Acceptor
    from distdiag.cluster.node import Node
    from distdiag.cluster.start_fleet import Agent
    from distdiag.launch.record import Asked, Data, Job
    from distdiag.launch.types import Request
    from distdiag.output import Progress

_LEFT_ALONE = 3
_UNSET = "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE"
_INTERRUPTED = 130
_GOODBYE_S = 1.0


def carry_out(
    job: Job[Asked, Data],
    me: Identity,
    progress: Progress,
    run: Callable[[Job[Asked, Data], Fleet, Inventory, Progress], SavedRun],
) -> SavedRun:
    """Run as a rank: rank 0 returns the record, every other process exits with rank 0's status.

    Raises:
        UsageError: options that contradict the launcher.
        DistdiagError: the ranks do not find each other.
    """
    if me.rank != 0 and me.launcher != "environment":
        return _as_other_rank(lambda: _carry_out(job, me, progress, run))
    return _carry_out(job, me, progress, run)


def _as_other_rank(work: Callable[[], SavedRun]) -> NoReturn:
    """Exit as a rank without a report, which rank 0 prints: two documents on a shared stdout would not be JSON."""
    status = _INTERRUPTED
    try:
        work()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except DistdiagError as error:
        say(f"distdiag: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
        status = error.exit_code
    except KeyboardInterrupt:
        pass
    sys.stderr.flush()
    os._exit(status)


def _carry_out(
    job: Job[Asked, Data],
    me: Identity,
    progress: Progress,
    run: Callable[[Job[Asked, Data], Fleet, Inventory, Progress], SavedRun],
) -> SavedRun:
    request = job.request
    _check_options(request, me)
    tasks = nested_tasks(os.environ, machine.ancestors(os.getpid()))
    if tasks:
        _leave_it_to_rank_0(me, 1)
        return SavedRun.of_none(NotStarted(scene=Inventory(places=()), why=(_nested(me, tasks, request),)))
    home, hub = find_home(me, os.environ)
    if hub is None:
        sys.exit(_serve(me, home, job.agent, request.timeout_s))
    return _lead(job, me, hub, progress, run)


def _check_options(request: Request, me: Identity) -> None:
    """Refuse options that every process would repeat; only rank 0 reports it. Raises UsageError."""
    trouble, hint = "", ""
    typed = [name for name, _ in request.cluster.typed() if name not in ("--python", "--env", "--setup")]
    if typed:
        trouble = (
            f"according to {_launcher(me)} this is one of {me.world_size} processes, and {typed[0]} would make each of "
            "them start its own ranks"
        )
        hint = f"leave {typed[0]} out, or start distdiag once, without {me.launcher}"
        if me.launcher == "environment":
            hint = f"if no other process was started, clear these variables: {_UNSET}"
    elif request.nproc is not None and (me.local_world_size or 1) > 1:
        trouble = f"{me.launcher} started {me.local_world_size} processes on this node; --nproc would add ranks to each"
        hint = "leave --nproc out, or start one process per node"
    if trouble:
        _leave_it_to_rank_0(me, UsageError.exit_code)
        raise UsageError(trouble, hint=hint)


def _leave_it_to_rank_0(me: Identity, status: int) -> None:
    """Exit as a non-zero rank, slightly after rank 0: mpirun kills all processes as soon as one exits.

    If only variables claim other ranks, this may be the only process, and it reports its own error.
    """
    if me.rank != 0 and me.launcher != "environment":
        time.sleep(_GOODBYE_S)
        sys.exit(status)


def _serve(me: Identity, home: Home, agent: Agent, timeout_s: float) -> int:
    """Find rank 0 and follow its orders; return the exit status it sends."""
    places = [(address, port) for address in home.addresses for port in home.ports]
    identity = {"rank": me.rank, "local_rank": me.local_rank or 0, "local_world_size": me.local_world_size or 1}
    connection = connect_back.find(places, home.key, identity, timeout_s=timeout_s)
    if connection is None:
        raise DistdiagError(
            f"rank {me.rank} on {machine.host_name()} did not find rank 0 at {', '.join(home.addresses)}, ports "
            f"{fold_ranks(home.ports)}, within {timeout_s:g} s",
            hint="check that rank 0 was started, and that these ports are open on its node",
        )
    boot.carried.update(agent.sources())
    fd = connection.detach()
    config = agent.config({}, silence_s=silence_s(me.world_size), untrusted=True)
    return node_agent.serve(config, fd, Writer(fd), _left_alone)


def _left_alone() -> int:
    sys.stderr.write(f"distdiag: {machine.host_name()} lost contact with rank 0 and exits\n")
    return _LEFT_ALONE


def _lead(
    job: Job[Asked, Data],
    me: Identity,
    hub: Acceptor,
    progress: Progress,
    run: Callable[[Job[Asked, Data], Fleet, Inventory, Progress], SavedRun],
) -> SavedRun:
    request = replace(job.request, program=_program(me, job.request.program))
    payload = job.agent.pack(request.cluster, here=False, hosts=me.world_size)
    transport = JoinTransport(hub, payload, patience_s=request.timeout_s)
    hosts = [Host(name=name_of(rank)) for rank in range(me.world_size)]
    with Fleet(hosts, transport, b"", NodeFacts, Limits(facts_s=60.0)) as fleet:
        status = DistdiagError.exit_code
        try:
            progress.news(f"rank 0 of {me.world_size} ({_launcher(me)}): waiting for the others")
            fleet.gather(lambda now: progress.now(f"{len(now.up)} of {me.world_size} ranks connected"))
            led = replace(job, request=request)
            record = replace(_run(led, me, transport, fleet, progress, run), program=request.program)
            status = rank_report.report_of(led, record).exit_code(strict=request.strict)
        except DistdiagError as error:
            status = error.exit_code
            raise
        except KeyboardInterrupt:
            status = _INTERRUPTED
            raise
        finally:
            # After our report is out: mpirun and torchrun kill all processes once one exits with a fault.
            others = [fleet.nodes.pop(name) for name in list(fleet.nodes) if name != name_of(0)]
            atexit.register(_dismiss, others, status)
        return record


def _dismiss(members: list[Node], status: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for node in members:
        node.order(Leave(status=status))
    links.close_all([node.link for node in members], _GOODBYE_S)


def _run(
    job: Job[Asked, Data],
    me: Identity,
    transport: JoinTransport,
    fleet: Fleet,
    progress: Progress,
    run: Callable[[Job[Asked, Data], Fleet, Inventory, Progress], SavedRun],
) -> SavedRun:
    scene = _scene(me, transport, fleet)
    request = job.request
    trouble = (*_missing(me, fleet, request), *_doubles(transport, request))
    if trouble:
        return SavedRun.of_none(NotStarted(scene=scene, why=trouble))
    record = run(job, fleet, scene, progress)
    return replace(record, extra=_contradiction(request) or _stale_variables(request, scene))


def _scene(me: Identity, transport: JoinTransport, fleet: Fleet) -> Inventory:
    doors: dict[str, str] = {}
    places = []
    for node in fleet.up:
        identity = transport.said.get(node.name, {})
        if node.name == name_of(0):
            identity = {"local_rank": me.local_rank, "local_world_size": me.local_world_size}
        local = (_number(identity.get("local_rank"), 0), max(1, _number(identity.get("local_world_size"), 1)))
        door = doors.setdefault(node.hello.machine, node.name)
        places.append(NodeSlot(node=node.name, host=node.host, slots=None, facts=node.reply, local=local, door=door))
    return Inventory(places=tuple(places))


def _number(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**20 else otherwise


def _missing(me: Identity, fleet: Fleet, request: Request) -> list[Finding]:
    late = [rank for rank in range(me.world_size) if name_of(rank) not in {node.name for node in fleet.up}]
    if not late:
        return []
    connected = [node.host for node in fleet.up]
    if master_addr_leads_elsewhere():
        return [_led_elsewhere(me, late, request)]
    reasons = dict.fromkeys(refusal.message for refusal in fleet.refusals.values())
    alone = me.launcher == "environment"
    return [
        found(
            "rank-absent" if alone else "rank-not-connected",
            request,
            Where(ranks=tuple(late)),
            ranks=name_ranks(late),
            size=me.world_size,
            why="; ".join(reasons),
            launcher=_launcher(me),
            number=len(connected),
            hosts=", ".join(dict.fromkeys(connected)),
            unset=_UNSET,
        )
    ]


def _led_elsewhere(me: Identity, late: list[int], request: Request) -> Finding:
    """Return a MASTER_ADDR that leads the other ranks to a host without rank 0."""
    address, here = os.environ["MASTER_ADDR"], machine.host_name()
    return found(
        "master-addr-elsewhere",
        request,
        Where(hosts=(here,)),
        address=address,
        here=here,
        ranks=name_ranks(late),
        size=me.world_size,
        set=f"export MASTER_ADDR={quoted(here)}",
    )


def _doubles(transport: JoinTransport, request: Request) -> list[Finding]:
    if not transport.doubles:
        return []
    ranks = sorted(set(transport.doubles))
    return [found("rank-double", request, Where(ranks=tuple(ranks)), ranks=name_ranks(ranks))]


def _contradiction(request: Request) -> Finding | None:
    if (contradicting := contradiction(os.environ)) is None:
        return None
    launcher, plain = contradicting
    return found(
        "rank-contradicts-launcher",
        request,
        plain=f"RANK={plain.rank} WORLD_SIZE={plain.world_size}",
        launcher=launcher.launcher,
        set=f"rank {launcher.rank} of {launcher.world_size}",
    )


def _stale_variables(request: Request, scene: Inventory) -> Finding | None:
    """Return variables that contradict the launcher, left over from another job or set in a login file."""
    groups: dict[str, list[NodeSlot]] = {}
    for place in scene.places:
        for variable in place.facts.stale_variables:
            groups.setdefault(variable, []).append(place)
    if not groups:
        return None
    ranks = {name: [int(place.node.rpartition(" ")[2]) for place in those] for name, those in groups.items()}
    listed = "; ".join(f"{name} in {name_ranks(those)}" for name, those in ranks.items())
    hosts = tuple(dict.fromkeys(place.host for those in groups.values() for place in those))
    at = Where(hosts=hosts, ranks=tuple(sorted({rank for those in ranks.values() for rank in those})))
    return found("stale-variables", request, at, listed=listed)


def _program(me: Identity, program: str) -> str:
    """Return the command that restarts all ranks, for commands to paste."""
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
    return found("nested-launchers", request, tasks=tasks, size=me.world_size)
