"""Facts of one node: launchers and ranks waiting for others to start, and the state of their rendezvous.

Each rendezvous is tried as torch does, with the same resolver and a connect, closed at once, which torch's store drops
silently. If few nodes are asked, a store elsewhere is also read. Nothing is judged here.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import field
from functools import partial

from distdiag.agent import port_scan
from distdiag.facts import deadlines, machine, programs
from distdiag.facts.network import interfaces as network
from distdiag.facts.network import listeners, nics, sockets, tcp_bytes, tcp_store
from distdiag.facts.network.tcp_store import Store  # noqa: TC001 - decoded by its annotations
from distdiag.facts.process import launch_options, procs
from distdiag.facts.process.launch_options import Launch
from distdiag.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.facts.network.sockets import Namespace

_CONNECT_S = 3.2
"""Three SYNs."""
_RESOLVE_S = 5.0
_STORE_S = 2.0
_NAMES = (
    *(
        b"PET_",
        b"GLOO_SOCKET_IFNAME=",
        b"NCCL_SOCKET_IFNAME=",
        b"MASTER_ADDR=",
        b"MASTER_PORT=",
        b"WORLD_SIZE=",
        b"RANK=",
        b"SLURM_STEP_NUM_TASKS=",
        b"OMPI_COMM_WORLD_SIZE=",
        b"SLURM_STEP_NODELIST=",
        b"SLURM_JOB_NODELIST=",
        b"SLURM_JOB_ID=",
    ),
)
"""Prefixes of the variables to read."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SLURM_JOB = "SLURM_JOB_ID"
_PASSED = (b"MASTER_ADDR=", b"MASTER_PORT=")
"""Variables that mpirun and srun pass on to the ranks."""
_TASKS = ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_MOST_HOSTS = 256
"""Maximum number of a job's nodes to resolve."""
_LONGEST_COMMAND = 2000
_ABOVE = 4


@record
class Meeting:
    """A rendezvous, as seen from this node.

    `addresses`: in the resolver's order; `error`: why resolving failed. `is_here`: one of them is local. `state`: see
    port_scan.PortResult; empty if not tried. `server`, `command`: the local process that listens there. `clients`: the
    addresses connected to it. `silent`: the address torch tries first does not answer, but the next one is open.
    `store`: the members known to a store elsewhere; None if it was not read.
    """

    host: str
    port: int
    addresses: tuple[str, ...] = ()
    error: str = ""
    is_here: bool = False
    state: str = ""
    server: int | None = None
    command: str = ""
    clients: tuple[str, ...] = ()
    silent: bool = False
    store: Store | None = None


@record
class Start:
    """A process waiting for others to start. `rank`, `world_size`: of a rank. `waited_s`: since its own start.

    `knocks`: remote ends that do not answer it. `interfaces`: its settings for Gloo and NCCL, by variable. `meeting`:
    None if its command line names no rendezvous, or it is in another network namespace. `tasks`: number of processes
    started by the mpirun or srun above it; `hosts`: their nodes, by mpirun's options. `above`: of a rank, the launcher
    on its node that chooses the rendezvous. `command`: the command line of that launcher, or of mpirun or srun with the
    variables it passes on, quoted for a shell and without secrets; empty if very long. `joined`: it has a connection to
    the rendezvous port. `answered`: the other end of that connection has sent data, as any store does at once; None if
    unknown.
    """

    pid: int
    launch: Launch
    waited_s: float
    meeting: Meeting | None = None
    rank: int | None = None
    world_size: int | None = None
    knocks: tuple[str, ...] = ()
    interfaces: dict[str, str] = field(default_factory=dict)
    tasks: int | None = None
    hosts: tuple[str, ...] = ()
    above: Launch | None = None
    command: str = ""
    joined: bool | None = None
    answered: bool | None = None


@record
class Starts:
    """The waiting processes of one node. `addresses`: the node's, by interface.

    `expected`: the job's nodes by deepspeed's or SLURM's list, each with its addresses by the local resolver; read only
    on the node of the rendezvous, or where its store was read.
    """

    starts: tuple[Start, ...]
    addresses: dict[str, tuple[str, ...]]
    expected: dict[str, tuple[str, ...]] = field(default_factory=dict)


def read(launchers: Iterable[int], ranks: Iterable[int], *, stores: bool) -> Starts:
    """Read these launchers, and these ranks in init_process_group; with `stores`, also the members in their stores."""
    tables = sockets.Tables()
    environments = {pid: procs.variables_named(pid, _NAMES) for pid in (*launchers, *ranks)}
    launches = {pid: launch_options.read(procs.command_words(pid), environments[pid]) for pid in launchers}
    launches.update({pid: _of_rank(environments[pid]) for pid in ranks})
    known = {pid: launch for pid, launch in launches.items() if launch is not None and launch.program != "deepspeed"}
    here = machine.network_namespace(os.getpid())
    places = {(known[pid].host, known[pid].port) for pid in known if machine.network_namespace(pid) == here}
    namespace = tables.of(os.getpid())
    reads = {place: partial(_meet, *place, namespace, stores=stores) for place in places if all(place)}
    met, _ = deadlines.together(reads, patience_s=_RESOLVE_S + _CONNECT_S + _STORE_S + 1.0)
    sruns = _sruns() if any(_SLURM_JOB in environment for environment in environments.values()) else {}
    starts = [
        _start(pid, launch, environments[pid], met, tables.of(pid), sruns.get(environments[pid].get(_SLURM_JOB, "")))
        for pid, launch in known.items()
    ]
    shows_members = any(start.meeting is not None and (start.meeting.server or start.meeting.store) for start in starts)
    expected = _expected(starts, [environments[start.pid] for start in starts]) if shows_members else {}
    return Starts(tuple(starts), nics.addresses(), expected)


def _expected(starts: Sequence[Start], environments: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    listed = (start.above.hosts if start.above is not None else start.hosts for start in starts)
    names = {host: None for hosts in listed for host in hosts}
    if not names:
        least = max(start.launch.nodes[0] for start in starts)
        folded = {each[name]: None for name in _NODELISTS for each in environments if name in each}
        for nodes in list(folded)[:2]:
            names = names if len(names) >= least else dict.fromkeys(_hostnames(nodes))
    found, late = deadlines.each(list(names)[:_MOST_HOSTS], network.resolve, patience_s=_RESOLVE_S)
    return {name: found[name][0] for name in names if name in found} if not late else {}


def _hostnames(nodes: str) -> list[str]:
    """Expand SLURM's "node[1-4]"; empty if scontrol does not run here."""
    try:
        done = programs.run(["scontrol", "show", "hostnames", nodes], timeout_s=_RESOLVE_S)
    except programs.CannotRun:
        return []
    return done.stdout.decode("utf-8", "replace").split()


def _start(
    pid: int,
    launch: Launch,
    environment: Mapping[str, str],
    met: Mapping[tuple[str, int], Meeting],
    namespace: Namespace,
    srun: int | None,
) -> Start:
    proc = procs.read(pid)
    started_s = proc.started / os.sysconf("SC_CLK_TCK") if proc is not None else 0.0
    own = {inode: namespace.sockets[inode] for inode in sockets.inodes(pid) if inode in namespace.sockets}
    joined = [
        inode for inode, sock in own.items() if sock.state == "ESTABLISHED" and sock.remote.endswith(f":{launch.port}")
    ]
    starter = _starter_of(pid, srun) if launch.program == "environment" else pid
    words = procs.command_words(starter) if starter is not None else []
    above = launch_options.read(words, {}) if starter != pid else None
    passed = {} if starter is None or starter == pid or above is not None else procs.variables_named(starter, _PASSED)
    command = machine.redacted(shlex.join([*(f"{name}={value}" for name, value in passed.items()), *words]))
    return Start(
        pid=pid,
        launch=launch,
        waited_s=time.clock_gettime(time.CLOCK_BOOTTIME) - started_s,
        meeting=met.get((launch.host, launch.port)),
        rank=launch_options.number(environment.get("RANK", "")),
        world_size=launch_options.number(environment.get("WORLD_SIZE", "")),
        knocks=tuple(sorted(sock.remote for sock in own.values() if sock.state == "SYN_SENT")),
        interfaces={name: environment[name] for name in _INTERFACES if name in environment},
        tasks=next((number for name in _TASKS if (number := launch_options.number(environment.get(name, "")))), None),
        hosts=launch_options.mpi_hosts(words, f"/proc/{starter}/cwd") if launch_options.is_mpirun(words) else (),
        above=above,
        command=command if len(command) <= _LONGEST_COMMAND else "",
        joined=bool(joined),
        answered=_answered(pid, joined) if joined else None,
    )


def _answered(pid: int, connections: Iterable[int]) -> bool | None:
    try:
        known = tcp_bytes.tcp_bytes(pid)
    except OSError:
        return None
    taken = [known[inode].taken for inode in connections if inode in known]
    return any(taken) if taken else None


def _starter_of(pid: int, srun: int | None) -> int | None:
    """Return the launcher above a rank, or this srun (its ranks have another daemon as parent); None if neither."""
    for _ in range(_ABOVE):
        proc = procs.read(pid)
        if proc is None or proc.parent < 1:
            break
        pid = proc.parent
        words = procs.command_words(pid)
        if launch_options.is_mpirun(words) or launch_options.read(words, {}) is not None:
            return pid
    return srun


def _sruns() -> dict[str, int]:
    """Return the local srun of each SLURM job, by job id."""
    pids = {pid: proc.parent for pid, proc in procs.table().items() if proc.comm == "srun"}
    found: dict[str, list[int]] = {}
    for pid in pids:
        if pids[pid] not in pids:  # srun forks a second process
            job = procs.variables_named(pid, (b"SLURM_JOB_ID=",)).get(_SLURM_JOB, "")
            found.setdefault(job, []).append(pid)
    return {job: own[0] for job, own in found.items() if len(own) == 1}


def _of_rank(environment: Mapping[str, str]) -> Launch | None:
    port = launch_options.number(environment.get("MASTER_PORT", ""))
    if "MASTER_ADDR" not in environment or port is None:
        return None
    return Launch("environment", environment["MASTER_ADDR"], port, "env", (1, 1))


def _meet(host: str, port: int, namespace: Namespace, *, stores: bool) -> Meeting:
    addresses, error = ((host,), "") if network.is_address(host) else network.resolve(host)
    own = [address.partition("/")[0] for addresses in nics.addresses().values() for address in addresses]
    is_here = any(address in own or network.is_loopback(address) for address in addresses)
    if is_here:
        found = next((each for each in listeners.listeners() if each.port == port), None)
        state = port_scan.OPEN if found is not None else port_scan.CLOSED
        pid, command = (found.pid, found.command) if found is not None else (None, "")
        return Meeting(host, port, addresses, error, True, state, pid, command, _clients(namespace, port))
    states = [port_scan.try_port(address, port, timeout_s=_CONNECT_S) for address in addresses[:2]]
    state = port_scan.OPEN if port_scan.OPEN in states else (states or [""])[0]
    silent = state == port_scan.OPEN and states[0] == port_scan.FILTERED
    is_first = states[:1] == [port_scan.OPEN]
    store = tcp_store.read(addresses[0], port, timeout_s=_STORE_S) if stores and is_first else None
    return Meeting(host, port, addresses, error, state=state, silent=silent, store=store)


def _clients(namespace: Namespace, port: int) -> tuple[str, ...]:
    ends = {
        sock.remote.rpartition(":")[0].strip("[]")
        for sock in namespace.sockets.values()
        if sock.state == "ESTABLISHED" and sock.local.rpartition(":")[2] == str(port)
    }
    return tuple(sorted(end.removeprefix("::ffff:") for end in ends))
