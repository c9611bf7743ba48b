"""Who is who: ranks, their helpers, launchers, and which job each belongs to. Pure.

DataLoader workers and other children inherit RANK; so of the processes of one rank, the topmost that is a Python with
torch is the rank, and the others below it are its helpers. What has no rank in its environment gets none here, but
for one kind of process: what started the other ranks of its host and meets them is the rank that they leave over.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from distdiag.jobs.types import Helper, Job, Member

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from distdiag.jobs.collect import Process, Watched
    from distdiag.jobs.types import NodeStacks

_NO_RANK = ("launcher", "tracker", "compile-worker")
_ONE_LOOK = ("data-worker", "tracker", "compile-worker")
_CHILD = ("multiprocessing/process.py", "BaseProcess._bootstrap")
_SPAWNED_RANK = ("torch/multiprocessing/spawn.py", "_wrap")
_WORKER = "torch/utils/data/_utils/worker.py"
DUMPED = -1
"""The parent of a process that is only known from a dump: all of one file are compared."""
_OUTERMOST = 8
_SHELLS = ("sh", "bash", "dash", "zsh", "fish", "ksh", "csh", "tcsh", "tmux", "screen", "sshd")
_LOOPBACK = ("localhost", "127.0.0.1", "::1", "127.0.1.1")
_START_S = 5.0
"""So long may a launcher take from one rank to the next."""
_TICK_S = 0.02
"""The kernel tells starts in hundredths of a second."""


@dataclass
class _Part:
    """What one host has of a job."""

    name: str
    launcher: str
    world_size: int | None
    members: list[Member] = field(default_factory=list)
    zombies: list[Process] = field(default_factory=list)
    without_rank: int = 0
    """Processes with torch and no rank of their own that started ranks of this part: they may be ranks that are missed,
    as where rank 0 starts the others."""


def to_look_at(processes: Sequence[Process], *, helpers: bool) -> tuple[list[int], list[int]]:
    """Choose the processes to look at: (all of them, those of which one look is enough)."""
    pythons = {_place_of(one) for one in processes if one.python and one.kind not in _NO_RANK}
    wanted = [one.pid for one in processes if _is_worth_a_look(one, pythons, helpers=helpers)]
    helping = {one.pid for one in processes if one.kind in _ONE_LOOK}
    return wanted, [pid for pid in wanted if pid in helping]


def _is_worth_a_look(one: Process, pythons: set[tuple[str, int] | None], *, helpers: bool) -> bool:
    if one.kind in ("launcher", "locked"):  # py-spy would wait for a locked memory map as well
        return False
    if one.kind in ("tracker", "compile-worker"):
        return helpers
    if one.python or one.hidden or one.state == "Z":
        return True
    # A shell around the rank, or a program it runs, is of interest only where there is no Python.
    return one.place is not None and _place_of(one) not in pythons


def _place_of(one: Process) -> tuple[str, int] | None:
    return (job_name(one.place.launcher, one.job), one.place.rank) if one.place is not None else None


def find_jobs(nodes: Iterable[NodeStacks], *, whole: bool = True) -> list[Job]:
    """Put the processes of all hosts together, by job.

    `whole`: all processes of the hosts are there, so that a rank that is not among them is missing.
    """
    parts: dict[str, list[_Part]] = {}
    for node in nodes:
        watched = {one.pid: one for one in node.watched}
        for part in _parts_of(node.host, node.processes.processes, watched):
            parts.setdefault(part.name, []).append(part)
    return [_join(name, own, whole=whole) for name, own in parts.items()]


def without_ranks(nodes: Iterable[NodeStacks]) -> list[tuple[str, Process]]:
    """List the launchers, with their hosts, that have started nothing: they wait for others, or for resources."""
    found = []
    for node in nodes:
        everyone = node.processes.processes
        busy = {pid for one in everyone if one.kind != "launcher" for pid in one.above}
        found += [(node.host, one) for one in everyone if one.kind == "launcher" and one.pid not in busy]
    # Of launchers one below the other the lowest counts.
    above = {pid for _, one in found for pid in one.above}
    return [(host, one) for host, one in found if one.pid not in above]


def launcher_name(launcher: Process) -> str:
    """Name a launcher as people call it; torch's agent has another name for the kernel."""
    return "torchrun" if launcher.comm == "pt_elastic" else launcher.comm


def answers_to(job_names: Mapping[str, str], wanted: str) -> bool:
    """Tell whether --job means the job of these variables: by run id, MASTER_ADDR:MASTER_PORT, SLURM job or step."""
    return wanted in _aliases(job_names)


def is_called(job: Job, name: str) -> bool:
    """Return whether a job has this name, or one of its processes answers to it."""
    return job.name == name or any(
        member.process is not None and answers_to(member.process.job, name) for member in job.members
    )


def of_interest(jobs: list[Job]) -> list[Job]:
    """Leave out what is hardly meant where nobody named a job, as long as there is something else."""
    # A lone process with torch, such as a notebook, is of interest where there is nothing else.
    real = [job for job in jobs if len(job.members) > 1 or job.members[0].rank is not None]
    # A program that outlived its job still has the rank in its environment.
    alive = [job for job in real if any(member.process is not None and member.process.python for member in job.members)]
    return alive or real or jobs


def _aliases(names: Mapping[str, str]) -> set[str]:
    found = {
        value for name, value in names.items() if name in ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID")
    }
    if "MASTER_ADDR" in names:
        found.add(f"{names['MASTER_ADDR']}:{names.get('MASTER_PORT', '')}")
    if "SLURM_STEP_ID" in names:
        found.add(f"{names.get('SLURM_JOB_ID', '')}.{names['SLURM_STEP_ID']}")
    return found


def job_name(launcher: str, names: Mapping[str, str]) -> str:
    """Name a job so that it has the same name on all its hosts; empty if nothing tells jobs apart."""
    meeting = f"{names['MASTER_ADDR']}:{names.get('MASTER_PORT', '')}" if "MASTER_ADDR" in names else ""
    if launcher == "torchrun" and (run_id := names.get("TORCHELASTIC_RUN_ID", "none")) not in ("none", ""):
        return f"{run_id} at {meeting}" if meeting and len(run_id) < 20 else meeting or run_id
    if launcher == "srun":
        return f"SLURM {names.get('SLURM_JOB_ID', '')}.{names.get('SLURM_STEP_ID', '')}"
    if launcher == "Open MPI" and (space := names.get("PMIX_NAMESPACE") or names.get("OMPI_MCA_ess_base_jobid")):
        return f"Open MPI {space}"
    return meeting


def _parts_of(host: str, processes: Sequence[Process], watched: Mapping[int, Watched]) -> Iterable[_Part]:
    labelled: dict[tuple[str, int], list[Process]] = {}
    for one in processes:
        if one.place is not None and one.kind not in _NO_RANK:
            key = (job_name(one.place.launcher, one.job), one.place.rank)
            labelled.setdefault(key, []).append(one)
    parts: dict[str, _Part] = {}
    used: set[int] = set()
    heads = {key: _heads(same) for key, same in labelled.items()}
    # Two processes of one rank, neither below the other: jobs of one name, in containers or from different parents.
    networks: dict[str, set[str]] = {name: set() for (name, _), own in heads.items() if len(own) > 1}
    for (name, _), own in heads.items():
        if name in networks:
            networks[name].update(head.network for head, _ in own)
    for (name, rank), own in heads.items():
        same = labelled[name, rank]
        for head, parent in own:
            own_name = name
            if name in networks:
                mark = f"in {head.network}" if len(networks[name]) > 1 else f"started by pid {parent}"
                own_name = f"{name} {mark}".strip()
            _add_rank(parts, own_name, host, head, same, watched)
        used.update(one.pid for one in same)
    others = [one for one in processes if one.pid not in used]
    for part in parts.values():
        used.update(_add_starter(part, host, others, watched))
    others = [one for one in others if one.pid not in used]
    for part in parts.values():
        above = {pid for one in part.members if one.process is not None for pid in one.process.above}
        part.without_rank = sum(one.torch and one.kind == "" and one.pid in above for one in others)
    yield from _with_dead(parts, host, others)
    rest = [
        one
        for one in processes
        if one.pid not in used and (one.torch or one.asked) and one.kind not in ("tracker", "compile-worker")
    ]
    yield from _unlabelled(host, rest, watched)


def _add_starter(part: _Part, host: str, others: Sequence[Process], watched: Mapping[int, Watched]) -> list[int]:
    """Add the rank that started all others of this host, as Lightning's does, if there is one; gives whom it took."""
    known = [one.process for one in part.members if one.process is not None and one.process.place is not None]
    parents = {one.parent for one in known}
    starter = next((one for one in others if one.store and parents == {one.pid}), None)
    dead = any(one.state == "Z" and one.parent in parents for one in others)
    if starter is None or dead or part.launcher == "torchrun":
        return []
    places = [one.place for one in known if one.place is not None]
    firsts = {place.rank - (place.rank if place.local_rank is None else place.local_rank) for place in places}
    if len(firsts) != 1 or (first := firsts.pop()) in {place.rank for place in places}:
        return []
    if part.world_size is not None and first >= part.world_size:
        return []
    own = [one for one in others if starter.pid in one.above]
    local_rank = None if places[0].local_rank is None else 0
    member = _member(host, starter, first, local_rank, own, watched)
    part.members.append(replace(member, deduced=True))
    return [starter.pid, *(one.pid for one in own)]


def _heads(same: Sequence[Process]) -> list[tuple[Process, int]]:
    """Of the processes of one rank, find the rank itself and who started it: one for each tree of them."""
    pids = {one.pid for one in same}
    heads = []
    for root in same:
        if pids.intersection(root.above):
            continue
        tree = sorted((one for one in same if one is root or root.pid in one.above), key=lambda one: len(one.above))
        python = [one for one in tree if one.python and one.kind != "data-worker"]
        with_torch = [one for one in python if one.torch or one.gpu]
        head = next(iter(with_torch or python or [one for one in tree if not _is_shell(one)]), None)
        if head is not None:
            heads.append((head, root.parent))
    # In a pod whose variables name a rank, everything that is started there by hand has them too.
    of_python = [(head, parent) for head, parent in heads if head.python]
    of_torch = [(head, parent) for head, parent in of_python if head.torch or head.gpu]
    return of_torch or of_python or heads


def _is_shell(one: Process) -> bool:
    return one.comm.lstrip("-") in _SHELLS


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
        # A child outlived its rank; it still has the rank's sockets, so the others wait instead of failing.
        part.members.append(_member(host, None, head.place.rank, head.place.local_rank, same, watched))
        return
    below = [one for one in same if head.pid in one.above]
    spawned = [one for one in below if _frame_in(watched.get(one.pid), *_SPAWNED_RANK)]
    if spawned:
        # mp.spawn below a task: the environment's rank is the task's, and theirs is known to themselves alone.
        for one in spawned:
            own = [other for other in below if one.pid in other.above]
            part.members.append(_member(host, one, None, None, own, watched))
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
    return Member(
        host=host,
        rank=rank,
        local_rank=local_rank,
        process=process,
        watched=watched.get(process.pid) if process is not None else None,
        helpers=tuple(Helper(process=one, watched=watched.get(one.pid)) for one in helpers),
    )


def _with_dead(parts: dict[str, _Part], host: str, others: Sequence[Process]) -> Iterable[_Part]:
    """Give each part the zombies and the unreadable siblings of its ranks."""
    for part in parts.values():
        parents = {one.process.parent for one in part.members if one.process is not None}
        for one in others:
            if one.parent in parents and one.state == "Z":
                part.zombies.append(one)
            elif one.parent in parents and one.hidden and one.kind in ("", "locked"):
                part.members.append(Member(host=host, rank=None, local_rank=None, process=one, watched=None))
        yield part


def _unlabelled(host: str, processes: Sequence[Process], watched: Mapping[int, Watched]) -> Iterable[_Part]:
    """Make jobs of torch processes without a rank.

    Those that one of them started belong together, as mp.spawn makes them; and those that something else started, as
    Ray or a script that gives the rank on the command line, if they have connections to each other.
    """
    dumped = [one for one in processes if one.parent == DUMPED]
    if dumped:
        members = [_member(host, one, None, None, (), watched) for one in dumped]
        yield _Part("", "saved dumps", None, members)
        return
    mine = {one.pid: one for one in processes}
    tops = [one for one in processes if not mine.keys() & set(one.above)]
    alone: list[Process] = []
    for top in tops:
        below = [one for one in processes if top.pid in one.above]
        workers = [one for one in below if _is_worker(one, watched)]
        ranks = [one for one in below if one not in workers and one.parent == top.pid and one.kind != "launcher"]
        if top.kind == "launcher" and not ranks:
            continue
        if not ranks:
            # Below Ray's driver its raylet, which is none of ours, has started the ranks.
            others = [one for one in below if one not in workers and not mine.keys() & set(one.above) - {top.pid}]
            alone += [top, *others]
            continue
        part = _Part(f"pid {top.pid} {_script(top)}".strip(), "python", None)
        for one in ranks:
            own = [other for other in below if one.pid in other.above and other in workers]
            part.members.append(_member(host, one, None, None, own, watched))
        yield part
    for group in _connected(alone):
        part = _Part(f"pid {group[0].pid} {_script(group[0])}".strip(), "python", None)
        for one in group:
            own = [other for other in processes if one.pid in other.above and _is_worker(other, watched)]
            part.members.append(_member(host, one, None, None, own, watched))
        yield part


def _connected(processes: Sequence[Process]) -> list[list[Process]]:
    """Put together the processes of one parent that have connections to each other, directly or through others."""
    groups: list[tuple[int, set[str], list[Process]]] = []
    for one in processes:
        mine, members, rest = set(one.connections), [one], []
        for parent, known, others in groups:
            if parent == one.parent and not mine.isdisjoint(known):
                mine |= known
                members = [*others, *members]
            else:
                rest.append((parent, known, others))
        groups = [*rest, (one.parent, mine, members)]
    return [sorted(members, key=lambda one: one.started_s) for _, _, members in groups]


def _script(process: Process) -> str:
    if process.command.startswith("ray::"):
        return process.command.split()[0]
    words = [word for word in process.command.split()[1:] if not word.startswith("-") and word != "..."]
    return words[0].rpartition("/")[2] if words else ""


def _is_worker(one: Process, watched: Mapping[int, Watched]) -> bool:
    return one.kind == "data-worker" or _frame_in(watched.get(one.pid), _WORKER, "_worker_loop")


def _frame_in(watched: Watched | None, file: str, function: str) -> bool:
    """Tell whether a process began in that function: it is one of the outermost frames of its main thread."""
    if watched is None or not watched.samples or not watched.samples[-1].threads:
        return False
    for frame in watched.samples[-1].threads[0].frames[-_OUTERMOST:]:
        if frame.function == function and frame.file.endswith(file):
            return True
    return False


def _join(name: str, parts: Sequence[_Part], *, whole: bool) -> Job:
    """Join the parts of all hosts, and tell which ranks are missing: certainly gone, or not seen on these hosts."""
    members = [member for part in parts for member in part.members]
    said = {member.rank for member in members if not member.deduced}
    members = [replace(one, rank=None) if one.deduced and one.rank in said else one for one in members]
    world_size = next((part.world_size for part in parts if part.world_size), None)
    missing = set(range(world_size or 0)) - {member.rank for member in members} if whole else set()
    for part in parts:
        for rank, local_rank, dead in _gone(part, missing):
            host = part.members[0].host if part.members else ""
            members.append(Member(host=host, rank=rank, local_rank=local_rank, process=dead, watched=None))
            missing.discard(rank)
    members.sort(key=lambda one: (one.rank is None, one.rank or 0, one.host, one.process.pid if one.process else 0))
    return Job(
        name=name,
        launcher=parts[0].launcher,
        world_size=world_size,
        members=tuple(members),
        unseen=tuple(sorted(missing)),
    )


def _gone(part: _Part, missing: set[int]) -> list[tuple[int, int | None, Process | None]]:
    """List ranks of this host that are certainly gone: (rank, local rank, their zombie)."""
    places = [one.process.place for one in part.members if one.process is not None and one.process.place is not None]
    found: list[tuple[int, int | None]] = []
    local_size = next((place.local_world_size for place in places if place.local_world_size), None)
    offsets = {place.rank - place.local_rank for place in places if place.local_rank is not None}
    if local_size and len(offsets) == 1:
        first = offsets.pop()
        found = [(first + local, local) for local in range(local_size) if first + local in missing]
    elif part.world_size is not None and _is_all_here(part):
        found = [(rank, None) for rank in sorted(missing)]
    started = {one.rank: one.process.started_s for one in part.members if one.process is not None}
    near = [one for one in part.zombies if any(_fits(one, rank, started) for rank, _ in found)]
    # As many zombies as there are gaps, or nobody knows whose they are.
    if len(near) != len(found) and len(found) <= part.without_rank:
        return []
    zombies = sorted(near, key=lambda one: one.started_s) if len(near) == len(found) else [None] * len(found)
    return [(rank, local, zombie) for (rank, local), zombie in zip(found, zombies, strict=True)]


def _fits(zombie: Process, rank: int, started: Mapping[int | None, float]) -> bool:
    """Tell whether a zombie was started when the rank must have been: launchers start ranks one after the other."""
    known = {number: at for number, at in started.items() if number is not None}
    below = [at for number, at in known.items() if number < rank]
    above = [at for number, at in known.items() if number > rank]
    earliest = max(below, default=min(above, default=0.0) - _START_S)
    latest = min(above, default=max(below, default=0.0) + _START_S)
    return earliest - _TICK_S <= zombie.started_s <= latest + _TICK_S


def _is_all_here(part: _Part) -> bool:
    """Tell whether all ranks of a job without local ranks must be on this host: they meet at its loopback address."""
    members = [one.process for one in part.members if one.process is not None]
    return bool(members) and all(one.job.get("MASTER_ADDR") in _LOOPBACK for one in members)
