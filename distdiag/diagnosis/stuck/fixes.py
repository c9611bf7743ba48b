"""Fixes for stuck ranks, from the evidence of each wait, and the next experiment for undecided jobs. Pure.

Function names decide no fix: a DataLoader is blamed if one is on the stack, a file if the kernel reports it. A fix
changes the job or machine; commands that only show more start with `next:`.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from distdiag.diagnosis import remedies
from distdiag.diagnosis.data_workers import stuck_worker
from distdiag.diagnosis.motion import Motion
from distdiag.diagnosis.outliers import Outcome, is_starved, works
from distdiag.diagnosis.stack_classes import StackClass
from distdiag.diagnosis.stuck.evidence import in_communicator_init
from distdiag.diagnosis.stuck.types import Source, StuckKind
from distdiag.diagnosis.wait_reasons import Kind
from distdiag.facts.machine import STOPPED
from distdiag.report import Fix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from distdiag.diagnosis.process_index import Key
    from distdiag.diagnosis.stack_classes import RankState
    from distdiag.diagnosis.stuck.evidence import Evidence
    from distdiag.diagnosis.stuck.join import Joined
    from distdiag.diagnosis.stuck.types import Claim
    from distdiag.diagnosis.wait_reasons import Wait

_TEXTS = {
    StuckKind.DIFFERENT_COLLECTIVES: "find the branch on the rank before that line; all ranks need the same calls",
    StuckKind.SIZE_MISMATCH: "make the tensors equal on all ranks: pad uneven batches, or gather their sizes first",
    StuckKind.BEHIND: "compare how many steps each rank makes: dataset length, drop_last, early stopping",
    StuckKind.DEADLOCK: "use one order of groups on all ranks; let one of a pair send while the other receives",
    StuckKind.DEBUGGER: "continue it, or leave the debugger; distdiag.breakpoint() holds all ranks at once",
    StuckKind.COMPILE: "compile before the first collective on all ranks, or raise the timeout",
    StuckKind.BUSY: "if the timeout is too short for it, raise it: init_process_group(timeout=...)",
    StuckKind.SLOW: "compare its host with the others: clocks, other processes, memory bandwidth, storage",
    StuckKind.RENDEZVOUS: "start all ranks with the same MASTER_ADDR and MASTER_PORT",
    StuckKind.OUTSIDE: "look at what comes after the last collective: logging, a checkpoint, an evaluation",
}
_NEXT = "next: "


def may_never_have_started(state: RankState) -> bool:
    """Return whether a rank has left no trace: no process, exit or orphaned children."""
    return state.member.is_absent and state.thread.kind is StackClass.EXITED


def fix_of(joined: Joined, claim: Claim, states: Sequence[RankState], kind: StuckKind) -> Fix | None:
    """Return the fix for ranks at one place; None if the evidence suggests none."""
    evidence = joined.evidence
    by_kind: dict[StuckKind, Callable[[], Fix | None]] = {
        StuckKind.STOPPED: lambda: _resume(states) or claim.fix,
        StuckKind.EXITED: lambda: claim.fix or _find_end(joined, states, claim),
        StuckKind.DEVICE: lambda: claim.fix or _device(states),
        StuckKind.NETWORK: lambda: Fix(
            text="test the network between the nodes", commands=(evidence.asked.again("ports"),)
        ),
        StuckKind.RESTART: lambda: Fix(
            text="read why the last attempts ended", commands=(f"{evidence.asked.program} logs PATH",)
        ),
        StuckKind.NOT_HUNG: lambda: Fix(
            text=f"{_NEXT}if it is slow, find the rank that the others wait for",
            commands=(evidence.again("pyspy-all", "--samples", "20"),),
        ),
    }
    if kind in by_kind:
        return by_kind[kind]()
    if kind is StuckKind.SLOW and states and claim.source is Source.STACKS and not works(states[0]):
        return _of_wait(states[0], evidence) or _look_again(evidence)
    if kind in _TEXTS:
        return claim.fix or Fix(text=_TEXTS[kind])
    if states and (found := _of_wait(states[0], evidence)) is not None:
        return found
    return _at_its_place(states, kind, evidence) if claim.source is Source.STACKS and states else claim.fix


def _look_again(evidence: Evidence) -> Fix:
    is_hang = evidence.asked.command == "hang"
    commands = () if is_hang else (evidence.again("hang"),)
    return Fix(text=f"{_NEXT}rerun in a minute: if the rank is still there, it is stuck", commands=commands)


def _at_its_place(states: Sequence[RankState], kind: StuckKind, evidence: Evidence) -> Fix | None:
    """Return a fix based on the line itself, or on other threads of the process, if the kernel shows no cause."""
    pid = states[0].member.pid
    if kind is StuckKind.LOCK and pid is not None:
        show = evidence.asked.again("pyspy-all", "--threads", "all", "--pid", str(pid))
        return Fix(text=f"{_NEXT}see which of its threads it waits for", commands=(show,))
    it, runs = ("this rank", "runs") if len(states) == 1 else ("these ranks", "run")
    text = f"find out why only {it} {runs} that line: a branch on the rank, uneven data, a retry"
    return Fix(text=text) if kind is StuckKind.NOT_IN_COLLECTIVE else None


def _resume(states: Sequence[RankState]) -> Fix | None:
    stopped = [state for state in states if state.thread.kind is StackClass.STOPPED]
    if not stopped:
        return None
    first = stopped[0]
    if first.thread.status == "frozen":
        return remedies.thaw(first.member.host, first.thread.reason.partition(": ")[2])
    return remedies.resume((state.member.host, state.member.pid) for state in stopped)


def exited_by_ras(joined: Joined) -> bool:
    """Return whether NCCL's RAS proves that the accused ranks were in a communicator before they exited."""
    ras = joined.claims.get(Source.RAS)
    return ras is not None and ras.kind is StuckKind.EXITED and bool(ras.accused & joined.accused)


def _find_end(joined: Joined, states: Sequence[RankState], claim: Claim) -> Fix | None:
    if claim.source is Source.LOG:
        return None  # the error in the log is the line to correct
    is_missing = bool(states) and may_never_have_started(states[0]) and not exited_by_ras(joined)
    remedy = remedies.find_missing_rank if is_missing else remedies.find_cause_of_death
    return remedy(claim.hosts, len(states) or len(claim.ranks) or 1)


def _device(states: Sequence[RankState]) -> Fix:
    on = f"on {states[0].member.host}, " if states else ""
    return Fix(text=f"{on}look for Xid errors of its GPU", commands=("dmesg -T | grep -i xid", "nvidia-smi -q -d ECC"))


def _of_wait(state: RankState, evidence: Evidence) -> Fix | None:
    """Return the fix for one rank's wait, from the file, lock, child or address in its system call."""
    host, wait = state.member.host, evidence.wait(state)
    if worker := stuck_worker(state):
        return Fix(
            text=f"{_NEXT}see what its DataLoader worker waits for; DataLoader(timeout=...) turns such a wait into an "
            "error",
            commands=(evidence.asked.again("trace", "blocked", "--pid", str(worker.process.pid)),),
        )
    if any(frame.file.endswith("torch/utils/file_baton.py") for frame in state.thread.frames):
        return _build_lock(state)
    still = state.standstill
    if still is not None and still.state == "D":
        return _storage(host, still.path)
    if wait is None:
        return None
    if stopped := [peer for peer in wait.peers if _state(peer, evidence) in STOPPED]:
        return remedies.resume(stopped)
    if _reads_input(wait):
        return Fix(text="it waits for input: answer it, or start the job with `< /dev/null`")
    if state.thread.motion is Motion.POLLS:
        return Fix(
            text=f"{_NEXT}see which file or address it looks for again and again",
            commands=(_of_rank(state, evidence, "trace", "sys", "--for", "5s"),),
        )
    makers = {Kind.FILE: _file, Kind.LOCK: _lock, Kind.CHILD: _child, Kind.NETWORK: _network}
    maker = makers.get(wait.kind)
    return maker(state, wait, evidence) if maker is not None else None


def _state(key: Key, evidence: Evidence) -> str:
    index = evidence.graph.index
    person, process = index.peer_processes.get(key), index.processes.get(key)
    return person.state if person is not None else process.state if process is not None else ""


def _of_rank(state: RankState, evidence: Evidence, *words: str) -> str:
    member = state.member
    whom = ("--rank", str(member.rank)) if member.rank is not None else ("--pid", str(member.pid))
    return evidence.again(*words[:2], *whom, *words[2:])


def _build_lock(state: RankState) -> Fix:
    paths = state.member.watched.build_locks if state.member.watched is not None else ()
    on = f"on {state.member.host}, "
    if not paths:
        return Fix(text=f"{on}remove the lock that a killed build left in its folder of TORCH_EXTENSIONS_DIR")
    return Fix(
        text=f"{on}if no host builds into that folder, remove the lock that a killed build left",
        commands=tuple(f"rm {shlex.quote(path)}" for path in paths[:2]),
    )


def _storage(host: str, path: str) -> Fix:
    folder = path.rpartition("/")[0] if path.startswith("/") else ""
    commands = (f"timeout 5 stat -f {shlex.quote(folder)}",) if folder else ("dmesg -T | tail -n 20",)
    return Fix(text=f"on {host}, check that the file system answers", commands=commands)


def _reads_input(wait: Wait) -> bool:
    """Return whether it reads a terminal or its stdin."""
    targets = wait.thread.targets if wait.thread is not None else ()
    if len(targets) != 1 or "r" not in targets[0].wants:
        return False
    descriptor = targets[0].descriptor
    is_terminal = descriptor is not None and descriptor.target.startswith(("/dev/pts/", "/dev/tty"))
    return is_terminal or targets[0].fd == 0


def _file(state: RankState, wait: Wait, evidence: Evidence) -> Fix | None:
    host, thread = state.member.host, wait.thread
    if thread is None:
        return None
    if thread.path:
        return Fix(text=f"on {host}, start the process at the other end of {thread.path}")
    first = next((target for target in thread.targets if target.descriptor is not None), None)
    if first is None or first.descriptor is None or first.descriptor.kind != "fifo":
        return None
    other = "writes to" if "r" in first.wants else "reads from"
    return Fix(text=f"on {host}, start the process that {other} {first.descriptor.target}")


def _lock(state: RankState, wait: Wait, evidence: Evidence) -> Fix | None:
    holders = [peer for peer in wait.peers if peer != (state.member.host, state.member.pid)]
    if not holders:
        return None
    pid = holders[0][1]
    name = evidence.graph.index.name(holders[0])
    return Fix(
        text=f"{_NEXT}see what {name} does, which holds the lock on {wait.end or 'that file'}",
        commands=(evidence.asked.again("pyspy-all", "--pid", str(pid)),) if pid else (),
    )


def _child(state: RankState, wait: Wait, evidence: Evidence) -> Fix | None:
    children = wait.thread.children if wait.thread is not None else ()
    stopped = [child for child in children if child.state in STOPPED]
    if stopped:
        return remedies.resume((state.member.host, child.pid) for child in stopped)
    if not children or evidence.asked.command == "trace blocked":
        return None
    child = children[0]
    return Fix(
        text=f"{_NEXT}see what its child {child.comm} waits for",
        commands=(evidence.asked.again("trace", "blocked", "--pid", str(child.pid)),),
    )


def _network(state: RankState, wait: Wait, evidence: Evidence) -> Fix:
    return Fix(
        text="give the call a timeout; next: see which process is at the other end",
        commands=(_of_rank(state, evidence, "trace", "fds"),),
    )


def _look_at_computing(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    if any(map(is_starved, evidence.stacks.states)):
        busiest = "ps -eo pid,user,ni,pcpu,args --sort=-pcpu | head"
        return "see which processes use the CPUs; rerun once the ranks get CPU time", (busiest,)
    return "sample for longer: a loop that ends moves on", (evidence.again("pyspy-all", "--interval", "60"),)


def next_experiment(joined: Joined) -> tuple[str, tuple[str, ...]]:
    """Return the experiment that decides between the candidates: (text, commands)."""
    evidence = joined.evidence
    asked, states = evidence.asked, evidence.stacks.states
    if evidence.stacks.outcome is Outcome.UNREADABLE:
        if evidence.job.unseen:
            return "look at all hosts of the job", (f"{asked.program} hang --hosts LIST",)
        return "read the stacks as root", (f'sudo env "PATH=$PATH" {evidence.again(asked.command)}',)
    if all(state.thread.kind is StackClass.EXITED for state in states):
        return "find the first failure in its log", (f"{asked.program} logs PATH",)
    if joined.against:
        return "rerun in a minute: what has moved was not stuck", (evidence.again(asked.command),)
    if evidence.asked.command != "hang":
        return "join the stacks with all other evidence", (evidence.again("hang"),)
    native = [state for state in states if state.thread.kind in (StackClass.GIL, StackClass.LOCK)]
    if native and native[0].member.pid is not None:
        whom = () if asked.cluster.typed() else ("--pid", str(native[0].member.pid))
        words = ("pyspy-all", "--native", "--threads", "all", *whom)
        return "see which C++ function waits (this pauses the process for about a second)", (asked.again(*words),)
    if any(state.thread.motion is Motion.COMPUTES for state in states):
        return _look_at_computing(evidence)
    is_recorded = evidence.recorder is not None and len({member.host for member in evidence.job.members}) > 1
    if is_recorded or in_communicator_init(states):
        return "test the network without the job", (asked.again("ports"),)
    if evidence.recorder is not None:
        return "test the GPUs and the network without the job", (asked.again("gpu-test"),)
    return (
        "restart it with a flight recorder, which records what each rank called",
        (f"{asked.program} flight-recorder --how",),
    )
