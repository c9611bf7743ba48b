"""Role and job of each process: rank, helper or launcher. Pure.

DataLoader workers and other children inherit RANK: of the processes with one rank, the topmost Python with torch is the
rank, and those below are helpers. A process without a rank in its environment has none, with one exception: the process
that started the other ranks of its host and connects to them has the remaining rank.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distdiag.fold import by_key
from distdiag.jobs.servers import find_servers
from distdiag.jobs.types import Helper, Job, Member, NodeStacks
from distdiag.knowledge.process_titles import read_title

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from distdiag.jobs.collect import Process, Processes, Watched
    from distdiag.jobs.servers import Server

_NO_RANK = ("launcher", "tracker", "compile-worker")
_CHILD = ("multiprocessing/process.py", "BaseProcess._bootstrap")
_SPAWNED_RANK = ("torch/multiprocessing/spawn.py", "_wrap")
_WORKER = "torch/utils/data/_utils/worker.py"
DUMPED = -1
"""The parent of processes known from dumps only: all processes in one file are compared."""
_OUTERMOST = 8
_SHELLS = ("sh", "bash", "dash", "zsh", "fish", "ksh", "csh", "tcsh", "tmux", "screen", "sshd")
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "127.0.1.1")
_START_S = 5.0
"""Maximum seconds between a launcher's starts of two consecutive ranks."""
_TICK_S = 0.02
"""The kernel reports start times in hundredths of a second."""


@dataclass
class _Part:
    """The part of a job on one host."""

    name: str
    launcher: str
    world_size: int | None
    members: list[Member] = field(default_factory=list)
    zombies: list[Process] = field(default_factory=list)
    without_rank: int = 0
    """Processes with torch but no rank that started ranks of this part, perhaps as rank 0 themselves."""


def to_sample(processes: Sequence[Process]) -> tuple[list[int], list[int]]:
    """Choose the processes to sample: (all pids, those that need a single sample)."""
    pythons = {_place_of(process) for process in processes if process.python and process.kind not in _NO_RANK}
    sampled = [process.pid for process in processes if _is_worth_sampling(process, pythons)]
    helping = {process.pid for process in processes if process.kind == "data-worker"}
    return sampled, [pid for pid in sampled if pid in helping]


def _is_worth_sampling(process: Process, pythons: set[tuple[str, int] | None]) -> bool:
    if process.kind in (*_NO_RANK, "locked"):  # py-spy would block on a locked memory map too
        return False
    if process.python or process.hidden or process.asked or process.state == "Z":
        return True
    # A shell around the rank, or a program run by it, matters only without a Python.
    return process.place is not None and _place_of(process) not in pythons


def _place_of(process: Process) -> tuple[str, int] | None:
    return (job_name(process.place.launcher, process.job), process.place.rank) if process.place is not None else None


def find_jobs(nodes: Iterable[NodeStacks], *, whole: bool = True) -> list[Job]:
    """Group the processes of all hosts into jobs.

    `whole`: all processes of the hosts are known, so that an absent rank is missing.
    """
    on_host = (
        _parts_of(node.host, node.processes.processes, {each.pid: each for each in node.watched}) for node in nodes
    )
    parts = by_key((part.name, part) for own in on_host for part in own)
    _unite(parts)
    return [_join(name, own, whole=whole) for name, own in parts.items()]


def _unite(parts: dict[str, list[_Part]]) -> None:
    """Merge parts of one program with disjoint ranks and different rendezvous addresses.

    A rank with a wrong MASTER_PORT appears as another job, and both jobs would seem to lack a rank.
    """
    alike: dict[tuple[str, int | None, str], list[str]] = {}
    for name, own in parts.items():
        members = [member for part in own for member in part.members]
        first = members[0].process if members else None
        if first is not None and "MASTER_ADDR" in first.job and all(map(in_rendezvous, members)):
            alike.setdefault((own[0].launcher, own[0].world_size, first.command), []).append(name)
    for (_, world_size, _), names in alike.items():
        ranks = [member.rank for name in names for part in parts[name] for member in part.members]
        if len(names) > 1 and len(ranks) == len(set(ranks)) and set(ranks) <= set(range(world_size or 0)):
            names.sort(key=lambda name: min(member.rank or 0 for part in parts[name] for member in part.members))
            for name in names[1:]:
                parts[names[0]] += parts.pop(name)


def in_rendezvous(member: Member) -> bool:
    """Return whether it waits for the other ranks in init_process_group."""
    return _frame_in(member.watched, "torch/distributed/rendezvous.py", "_create_c10d_store", whole=True)


def _rendezvous(members: Sequence[Member]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    named = [(_address(member.process.job), member.rank) for member in members if member.process is not None]
    places = by_key((place, rank) for place, rank in named if place and rank is not None)
    return tuple((place, tuple(ranks)) for place, ranks in places.items()) if len(places) > 1 else ()


def without_ranks(nodes: Iterable[NodeStacks]) -> list[tuple[str, Process]]:
    """List (host, launcher) for launchers without a child process, which wait for nodes or resources."""
    found = []
    for node in nodes:
        processes = node.processes.processes
        busy = {pid for process in processes if process.kind != "launcher" for pid in process.above}
        found += [
            (node.host, process) for process in processes if process.kind == "launcher" and process.pid not in busy
        ]
    # Of nested launchers, keep the innermost.
    above = {pid for _, process in found for pid in process.above}
    return [(host, process) for host, process in found if process.pid not in above]


def launcher_name(launcher: Process) -> str:
    """Return a launcher's usual name; the kernel's name of torch's agent differs."""
    return "torchrun" if launcher.comm == "pt_elastic" else launcher.comm


def of_job(processes: Processes, name: str, *, strict: bool = False) -> Processes:
    """Keep the processes of the job given by --job; all if no name is given.

    A job includes its children, launchers and stores, and dead or unreadable siblings; unless `strict`, also ranks it
    lacks that the same program runs with another rendezvous address, as these may be its own.
    """
    if not name:
        return processes
    kept = processes.processes
    own = [job for job in find_jobs([NodeStacks(processes.host, processes, ())], whole=False) if job.name == name]
    named = {member.process.pid for job in own for member in job.members if member.process is not None}
    named.update(process.pid for process in kept if answers_to(process.job, name))
    named.update(() if strict else _lacked(kept, named))
    above = {pid for process in kept if process.pid in named for pid in process.above}
    parents = {process.parent for process in kept if process.pid in named}
    if own and name.startswith("pid "):
        named.add(int(name.split()[1]))  # the job is named after the process that started the ranks
    return replace(processes, processes=tuple(process for process in kept if _belongs(process, named, parents, above)))


def with_job_of(hosts: Mapping[str, Processes], pids: Collection[int]) -> dict[str, Processes]:
    """Keep, on all hosts, the processes of the jobs of these pids."""
    asked = [process for processes in hosts.values() for process in processes.processes if process.pid in pids]
    nodes = [NodeStacks(host, processes, ()) for host, processes in hosts.items()]
    jobs = of_pids(find_jobs(nodes, whole=False), pids, asked)
    found = {}
    for host, processes in hosts.items():
        kept = {process.pid for job in jobs for process in of_job(processes, job.name).processes}
        own = tuple(process for process in processes.processes if process.pid in kept)
        found[host] = replace(processes, processes=own)
    return found


def _lacked(processes: Sequence[Process], named: set[int]) -> list[int]:
    """List the ranks of the same program that a job lacks, unless their own job has ranks in common with it."""
    own = [process for process in processes if process.pid in named and process.place is not None]
    ranks = {process.place.rank for process in own if process.place is not None}
    alike = {_program(process) for process in own}
    others = [process for process in processes if process.place is not None and process.pid not in named]
    twice = [process.job for process in others if process.place is not None and process.place.rank in ranks]
    return [process.pid for process in others if _program(process) in alike and process.job not in twice]


def _program(process: Process) -> tuple[object, ...]:
    place = process.place
    return (process.command, place.launcher, place.world_size) if place is not None else ()


def _belongs(process: Process, named: set[int], parents: set[int], above: set[int]) -> bool:
    is_beside = process.parent in parents and (process.hidden or process.state == "Z")
    is_above = process.pid in above and (process.kind == "launcher" or process.store)
    return process.pid in named or bool(named & set(process.above)) or is_beside or is_above


def answers_to(job_names: Mapping[str, str], name: str) -> bool:
    """Return whether --job matches these variables: run id, MASTER_ADDR:MASTER_PORT, SLURM job or step."""
    return name in _aliases(job_names)


def is_called(job: Job, name: str) -> bool:
    """Return whether a job has this name, or one of its processes matches it."""
    return job.name == name or any(
        member.process is not None and answers_to(member.process.job, name) for member in job.members
    )


def short_name(job: Job, jobs: Iterable[Job]) -> str:
    """Return the shortest name unique to this job, for --job; empty if none is."""
    aliases = {alias for member in job.members if member.process is not None for alias in _aliases(member.process.job)}
    others = [other for other in jobs if other is not job]
    names = {job.name, *aliases} - {"", "none"}  # torchrun's run id without --rdzv-id is "none"
    own = [name for name in names if not any(is_called(other, name) for other in others)]
    return min(own, key=lambda name: (len(name), name), default="")


def is_lone(job: Job) -> bool:
    """Return whether this is a lone process with torch, neither rank nor server, such as a notebook."""
    only = job.members[0] if len(job.members) == 1 else None
    return only is not None and only.rank is None and not (only.title or _is_hidden(only))


def is_closed(job: Job) -> bool:
    """Return whether this user can read no process of a job: it belongs to another user."""
    return bool(job.members) and all(map(_is_hidden, job.members))


def without_lone(processes: Processes) -> Processes:
    """Drop lone processes with torch, including helpers."""
    lone = [job.members[0] for job in find_jobs([NodeStacks(processes.host, processes, ())]) if is_lone(job)]
    pids = {pid for member in lone for pid in (member.pid, *(helper.process.pid for helper in member.helpers))}
    return replace(processes, processes=tuple(each for each in processes.processes if each.pid not in pids))


def of_interest(jobs: list[Job]) -> list[Job]:
    """Drop jobs unlikely to be meant when no job was named, unless no others remain."""
    readable = [job for job in jobs if not is_closed(job)] or jobs
    real = [job for job in readable if not is_lone(job)]  # lone processes count only without any job
    # A program that outlived its job still has the rank in its environment.
    alive = [job for job in real if any(map(_is_alive, job.members))]
    # A shell's child may have RANK from elsewhere; a starting one has no torch yet.
    sure = [job for job in alive if len(job.members) > 1 or any(map(_has_torch, job.members))]
    return sure or alive or real or readable


def _is_alive(member: Member) -> bool:
    return member.process is not None and (member.process.python or bool(member.title) or member.process.hidden)


def _has_torch(member: Member) -> bool:
    return member.process is not None and (member.process.torch or member.process.gpu or bool(member.title))


def _is_hidden(member: Member) -> bool:
    return member.process is not None and member.process.hidden


def of_pids(jobs: Sequence[Job], pids: Collection[int], asked: Sequence[Process] = ()) -> list[Job]:
    """Keep the jobs of these processes: as rank or helper, else as ancestors of ranks, else as descendants or siblings.

    `asked`: the processes of `pids`, with ancestors. One outside of all jobs forms its own.
    """
    found = [job for job in jobs if any(pid in _pids(member) for member in job.members for pid in pids)]
    real = [job for job in found if not is_lone(job)]
    above = [job for job in jobs if any(pid in pids for member in job.members for pid in _above(member))]
    return real or above or [job for job in jobs if _is_near(job, asked)] or found


def _is_near(job: Job, asked: Sequence[Process]) -> bool:
    """Return whether a requested process runs under a rank, or helps the same server, such as its HTTP server."""
    if is_lone(job):
        return False
    ranks = {member.pid for member in job.members}
    above = {pid for member in job.members for pid in _above(member)}
    return any(
        not ranks.isdisjoint(process.above) or (process.parent in above and read_title(process.command) is not None)
        for process in asked
    )


def _pids(member: Member) -> set[int | None]:
    return {member.pid, *(helper.process.pid for helper in member.helpers)}


def _above(member: Member) -> tuple[int, ...]:
    return member.process.above if member.process is not None else ()


def job_options(jobs: Sequence[Job]) -> list[str]:
    """Return the option that selects each job, to paste: "--job 127.0.0.1:29500"."""
    return sorted({f"--job {shlex.quote(name)}" for job in jobs if (name := short_name(job, jobs))})


def restart_loop(job: Job, nodes: Iterable[NodeStacks]) -> tuple[int, float] | None:
    """Return torchrun's number of restarts and the mean seconds per round; None if it is not looping.

    Requires two restarts, and ranks younger than two rounds: a job that trains for longer has left the loop.
    """
    by_host = {node.host: node.processes for node in nodes}
    for member in job.members:
        facts, process = by_host.get(member.host), member.process
        count = process.job.get("TORCHELASTIC_RESTART_COUNT", "") if process is not None else ""
        if facts is None or process is None or not count.isdecimal() or int(count) < _LOOP:
            continue
        launchers = {each.pid: each for each in facts.processes if each.kind == "launcher"}
        launcher = next((launchers[pid] for pid in process.above if pid in launchers), None)
        if launcher is None:
            continue
        round_s = (process.started_s - launcher.started_s) / int(count)
        if facts.uptime_s - process.started_s <= _YOUNG * round_s:
            return int(count), round_s
    return None


_LOOP = 2
_YOUNG = 2.0


def _aliases(names: Mapping[str, str]) -> set[str]:
    found = {
        value for name, value in names.items() if name in ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID")
    }
    found.update(filter(None, [_address(names)]))
    if "SLURM_STEP_ID" in names:
        found.add(f"{names.get('SLURM_JOB_ID', '')}.{names['SLURM_STEP_ID']}")
    return found


def _address(names: Mapping[str, str]) -> str:
    return f"{names['MASTER_ADDR']}:{names.get('MASTER_PORT', '')}" if "MASTER_ADDR" in names else ""


def job_name(launcher: str, names: Mapping[str, str]) -> str:
    """Return a job's name, equal on all hosts; empty if jobs cannot be distinguished."""
    rendezvous = _address(names)
    if launcher == "torchrun" and (run_id := names.get("TORCHELASTIC_RUN_ID", "none")) not in ("none", ""):
        return f"{run_id} at {rendezvous}" if rendezvous and len(run_id) < 20 else rendezvous or run_id
    if launcher == "srun":
        return f"SLURM {names.get('SLURM_JOB_ID', '')}.{names.get('SLURM_STEP_ID', '')}"
    if launcher == "Open MPI" and (space := names.get("PMIX_NAMESPACE") or names.get("OMPI_MCA_ess_base_jobid")):
        return f"Open MPI {space}"
    return rendezvous


def _parts_of(host: str, processes: Sequence[Process], watched: Mapping[int, Watched]) -> Iterable[_Part]:
    served = find_servers(processes)
    yield from (_server_part(server, host, processes, watched) for server in served.servers)
    processes = [process for process in processes if process.pid not in served.pids]
    labelled = by_key(
        ((job_name(process.place.launcher, process.job), process.place.rank), process)
        for process in processes
        if process.place is not None and process.kind not in _NO_RANK and not _has_pod_rank(process)
    )
    parts: dict[str, _Part] = {}
    used: set[int] = set()
    heads = {key: _heads(same) for key, same in labelled.items()}
    # Unrelated processes with one rank: jobs of the same name, in containers or from different parents.
    several = {name for (name, _), own in heads.items() if len(own) > 1}
    networks = by_key((name, head.network) for (name, _), own in heads.items() if name in several for head, _ in own)
    for (name, rank), own in heads.items():
        same = labelled[name, rank]
        for head, parent in own:
            own_name = name
            if name in networks:
                mark = f"in {head.network}" if len(set(networks[name])) > 1 else f"started by pid {parent}"
                own_name = f"{name} {mark}".strip()
            _add_rank(parts, own_name, host, head, same, watched)
        used.update(process.pid for process in same)
    others = [process for process in processes if process.pid not in used]
    for part in parts.values():
        used.update(_add_starter(part, host, others, watched))
    others = [process for process in others if process.pid not in used]
    for part in parts.values():
        above = {pid for member in part.members if member.process is not None for pid in member.process.above}
        part.without_rank = sum(process.torch and process.kind == "" and process.pid in above for process in others)
    parents = {member.process.parent for part in parts.values() for member in part.members if member.process}
    yield from _with_dead(parts, host, others)
    yield from _unreadable(host, [process for process in others if process.parent not in parents], watched)
    rest = [
        process
        for process in processes
        if process.pid not in used
        and (process.torch or process.asked or process.kind == "spawned")
        and process.kind not in ("tracker", "compile-worker")
    ]
    yield from _unlabelled(host, rest, watched)


def _has_pod_rank(process: Process) -> bool:
    """Return whether this is a Ray actor in a pod whose variables number the pod instead of the actor."""
    title = read_title(process.command)
    return title is not None and process.place is not None and process.place.launcher == "environment"


def _server_part(server: Server, host: str, processes: Sequence[Process], watched: Mapping[int, Watched]) -> _Part:
    ranks = {process.pid for process in server.ranks}
    part = _Part(server.name, server.kind, None)
    for process in server.ranks:
        below = [other for other in processes if process.pid in other.above and other.pid not in ranks]
        part.members.append(_member(host, process, None, None, below, watched))
    return part


def _unreadable(host: str, others: Sequence[Process], watched: Mapping[int, Watched]) -> Iterable[_Part]:
    """Group unreadable processes by launcher: these are ranks, or start ranks."""
    launchers = {process.pid: process for process in others if process.kind == "launcher"}
    parts: dict[int, _Part] = {}
    for process in others:
        launcher = next((launchers[pid] for pid in process.above if pid in launchers), None)
        if launcher is None or not process.hidden or process.kind not in ("", "spawned", "locked") or process.torch:
            continue
        name = launcher_name(launcher)
        part = parts.setdefault(launcher.pid, _Part(f"pid {launcher.pid} {name}", name, None))
        part.members.append(_member(host, process, None, None, (), watched))
    return parts.values()


def _add_starter(part: _Part, host: str, others: Sequence[Process], watched: Mapping[int, Watched]) -> list[int]:
    """Add the rank that started all others of this host, as in Lightning, if any; return its pids."""
    known = [
        member.process for member in part.members if member.process is not None and member.process.place is not None
    ]
    parents = {process.parent for process in known}
    starter = next((process for process in others if process.store and parents == {process.pid}), None)
    dead = any(process.state == "Z" and process.parent in parents for process in others)
    if starter is None or dead or part.launcher == "torchrun":
        return []
    places = [process.place for process in known if process.place is not None]
    firsts = {place.rank - (place.rank if place.local_rank is None else place.local_rank) for place in places}
    if len(firsts) != 1 or (first := firsts.pop()) in {place.rank for place in places}:
        return []
    if part.world_size is not None and first >= part.world_size:
        return []
    own = [process for process in others if starter.pid in process.above]
    local_rank = None if places[0].local_rank is None else 0
    member = _member(host, starter, first, local_rank, own, watched)
    part.members.append(replace(member, deduced=True))
    return [starter.pid, *(process.pid for process in own)]


def _heads(same: Sequence[Process]) -> list[tuple[Process, int]]:
    """Find, in each process tree of a rank, the rank itself and the tree's parent pid."""
    pids = {process.pid for process in same}
    heads = []
    for root in same:
        if pids.intersection(root.above):
            continue
        tree = sorted(
            (process for process in same if process is root or root.pid in process.above),
            key=lambda process: len(process.above),
        )
        python = [process for process in tree if process.python and process.kind != "data-worker"]
        with_torch = [process for process in python if process.torch or process.gpu]
        head = next(iter(with_torch or python or [process for process in tree if not _is_shell(process)]), None)
        if head is not None:
            heads.append((head, root.parent))
    # In a pod with a rank in its variables, processes started by hand inherit it.
    of_python = [(head, parent) for head, parent in heads if head.python]
    of_torch = [(head, parent) for head, parent in of_python if head.torch or head.gpu]
    return of_torch or of_python or heads


def _is_shell(process: Process) -> bool:
    return process.comm.lstrip("-") in _SHELLS


def _add_rank(
    parts: dict[str, _Part],
    name: str,
    host: str,
    head: Process,
    same: Sequence[Process],
    watched: Mapping[int, Watched],
) -> None:
    assert head.place is not None
    part = parts.get(name)
    if part is None:
        part = parts[name] = _Part(name, head.place.launcher, head.place.world_size)
    if head.kind == "data-worker" or _frame_in(watched.get(head.pid), *_CHILD):
        # A child outlived its rank, and still holds the rank's sockets, so that the others wait instead of failing.
        part.members.append(_member(host, None, head.place.rank, head.place.local_rank, same, watched))
        return
    below = [process for process in same if head.pid in process.above]
    spawned = [process for process in below if _frame_in(watched.get(process.pid), *_SPAWNED_RANK)]
    if spawned:
        # mp.spawn below a task: the environment has the task's rank, but the spawned processes have other ranks.
        for process in spawned:
            own = [other for other in below if process.pid in other.above]
            part.members.append(_member(host, process, None, None, own, watched))
        part.world_size = None
        return
    part.members.append(_member(host, head, head.place.rank, head.place.local_rank, below, watched))


def _member(
    host: str,
    process: Process | None,
    rank: int | None,
    local_rank: int | None,
    helpers: Sequence[Process],
    watched: Mapping[int, Watched],
) -> Member:
    title = read_title(process.command) if process is not None else None
    return Member(
        host=host,
        rank=rank,
        local_rank=local_rank,
        process=process,
        watched=watched.get(process.pid) if process is not None else None,
        title=title.name if title is not None and rank is None else "",
        helpers=tuple(Helper(process=helper, watched=watched.get(helper.pid)) for helper in helpers),
    )


def _with_dead(parts: dict[str, _Part], host: str, others: Sequence[Process]) -> Iterable[_Part]:
    """Add to each part the zombies and the unreadable siblings of its ranks."""
    for part in parts.values():
        parents = {member.process.parent for member in part.members if member.process is not None}
        for process in others:
            if process.parent in parents and process.state == "Z":
                part.zombies.append(process)
            elif process.parent in parents and process.hidden and process.kind in ("", "locked"):
                part.members.append(Member(host=host, rank=None, local_rank=None, process=process, watched=None))
        yield part


def _unlabelled(host: str, processes: Sequence[Process], watched: Mapping[int, Watched]) -> Iterable[_Part]:
    """Group torch processes without a rank into jobs.

    Processes started by one of them form a job, as with mp.spawn; so do connected processes started by another program,
    as with Ray or a script that passes the rank on the command line.
    """
    dumped = [process for process in processes if process.parent == DUMPED]
    if dumped:
        members = [_member(host, process, None, None, (), watched) for process in dumped]
        yield _Part("", "saved dumps", None, members)
        return
    mine = {process.pid: process for process in processes}
    tops = [process for process in processes if not mine.keys() & set(process.above)]
    alone: list[Process] = []
    groups: list[tuple[Process, list[Process]]] = []
    for top in tops:
        below = [process for process in processes if top.pid in process.above]
        workers = [process for process in below if _is_worker(process, watched)]
        ranks = [
            process
            for process in below
            if process not in workers and process.kind != "launcher" and _started_by(top, process, mine.keys())
        ]
        if top.kind == "launcher" and not ranks:
            continue
        if not ranks:
            # Under Ray's driver the ranks are started by its raylet, which has no torch.
            others = [
                process
                for process in below
                if process not in workers and not mine.keys() & set(process.above) - {top.pid}
            ]
            alone += [top, *others]
            continue
        groups.append((top, ranks))
    for top, ranks in (*groups, *((group[0], group) for group in _connected(alone))):
        part = _Part(f"pid {top.pid} {_script(top)}".strip(), "python", None)
        for process in ranks:
            own = [other for other in processes if process.pid in other.above and _is_worker(other, watched)]
            part.members.append(_member(host, process, None, None, own, watched))
        yield part


def _started_by(top: Process, process: Process, known: Collection[int]) -> bool:
    """Return whether `top` started this process, itself or through multiprocessing's fork server."""
    nearest = next((pid for pid in process.above if pid in known), None)
    return process.parent == top.pid or (process.kind == "spawned" and nearest == top.pid)


def _connected(processes: Sequence[Process]) -> list[list[Process]]:
    """Group processes with one parent and connections to each other, directly or through others."""
    groups: list[tuple[int, set[str], list[Process]]] = []
    for process in processes:
        mine, members, rest = set(process.connections), [process], []
        for parent, known, others in groups:
            if parent == process.parent and not mine.isdisjoint(known):
                mine |= known
                members = [*others, *members]
            else:
                rest.append((parent, known, others))
        groups = [*rest, (process.parent, mine, members)]
    return [sorted(members, key=lambda process: process.started_s) for _, _, members in groups]


def _script(process: Process) -> str:
    title = read_title(process.command)
    if title is not None:
        return title.name
    words = [word for word in process.command.split()[1:] if not word.startswith("-") and word != "..."]
    return words[0].rpartition("/")[2] if words else ""


def _is_worker(process: Process, watched: Mapping[int, Watched]) -> bool:
    return process.kind == "data-worker" or _frame_in(watched.get(process.pid), _WORKER, "_worker_loop")


def _frame_in(watched: Watched | None, file: str, function: str, *, whole: bool = False) -> bool:
    """Return whether a function is among the outermost frames of the main thread, so that the process started in it.

    `whole`: among all frames, so that it may also be a current call.
    """
    if watched is None or not watched.samples or not watched.samples[-1].threads:
        return False
    for frame in watched.samples[-1].threads[0].frames[0 if whole else -_OUTERMOST :]:
        if frame.function == function and frame.file.endswith(file):
            return True
    return False


def _join(name: str, parts: Sequence[_Part], *, whole: bool) -> Job:
    """Join the parts of all hosts, and find missing ranks: exited, or not found on these hosts."""
    members = [member for part in parts for member in part.members]
    certain = {member.rank for member in members if not member.deduced}
    members = [
        replace(member, rank=None) if member.deduced and member.rank in certain else member for member in members
    ]
    world_size = next((part.world_size for part in parts if part.world_size), None)
    missing = set(range(world_size or 0)) - {member.rank for member in members} if whole else set()
    for part in parts:
        for rank, local_rank, dead in _gone(part, missing):
            host = part.members[0].host if part.members else ""
            members.append(Member(host=host, rank=rank, local_rank=local_rank, process=dead, watched=None))
            missing.discard(rank)
    members.sort(
        key=lambda member: (
            member.rank is None,
            member.rank or 0,
            member.host,
            member.process.pid if member.process else 0,
        )
    )
    return Job(
        name=name,
        launcher=parts[0].launcher,
        world_size=world_size,
        members=tuple(members),
        unseen=tuple(sorted(missing)),
        rendezvous=_rendezvous(members),
    )


def _gone(part: _Part, missing: set[int]) -> list[tuple[int, int | None, Process | None]]:
    """List the ranks that certainly exited on this host: (rank, local rank, zombie)."""
    places = [
        member.process.place
        for member in part.members
        if member.process is not None and member.process.place is not None
    ]
    found: list[tuple[int, int | None]] = []
    local_size = next((place.local_world_size for place in places if place.local_world_size), None)
    offsets = {place.rank - place.local_rank for place in places if place.local_rank is not None}
    if local_size and len(offsets) == 1:
        first = offsets.pop()
        found = [(first + local, local) for local in range(local_size) if first + local in missing]
    elif part.world_size is not None and _is_all_here(part):
        found = [(rank, None) for rank in sorted(missing)]
    started = {member.rank: member.process.started_s for member in part.members if member.process is not None}
    near = [zombie for zombie in part.zombies if any(_fits(zombie, rank, started) for rank, _ in found)]
    # Zombies are assigned only if as many ranks are missing.
    if len(near) != len(found) and len(found) <= part.without_rank:
        return []
    zombies = sorted(near, key=lambda zombie: zombie.started_s) if len(near) == len(found) else [None] * len(found)
    return [(rank, local, zombie) for (rank, local), zombie in zip(found, zombies, strict=True)]


def _fits(zombie: Process, rank: int, started: Mapping[int | None, float]) -> bool:
    """Return whether a zombie's start time fits the rank: launchers start ranks in order."""
    known = {number: at for number, at in started.items() if number is not None}
    below = [at for number, at in known.items() if number < rank]
    above = [at for number, at in known.items() if number > rank]
    earliest = max(below, default=min(above, default=0.0) - _START_S)
    latest = min(above, default=max(below, default=0.0) + _START_S)
    return earliest - _TICK_S <= zombie.started_s <= latest + _TICK_S


def _is_all_here(part: _Part) -> bool:
    """Return whether a job without local ranks is on this host only: MASTER_ADDR is a loopback address."""
    processes = [member.process for member in part.members if member.process is not None]
    return bool(processes) and all(process.job.get("MASTER_ADDR") in _LOOPBACK for process in processes)
