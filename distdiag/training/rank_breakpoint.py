"""breakpoint() for one rank of many: the others wait for it, nothing times out, and nobody waits for a rank that left.

The ranks meet by the store of the process group. pdb is imported by the rank that stops, when it stops.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass

from distdiag.node.identity import identify
from distdiag.training.rank_meeting import DONE, QUIT, RELEASED, Hearer, Speaker, Watch, first_word
from distdiag.training.rank_timeouts import Held
from distdiag.training.whoami import rank as my_rank
from distdiag.training.whoami import torch_distributed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from distdiag.training.rank_console import Console
    from distdiag.training.rank_debugger import RankPdb

_calls: Counter[tuple[str, int]] = Counter()
_meetings: Counter[str] = Counter()
_attached: list[RankPdb] = []
"""The debugger that is at work in this process, if there is one."""


@dataclass(frozen=True)
class _Meeting:
    """Where `size` ranks meet this time: a key of a store."""

    store: Any
    key: str
    size: int


def breakpoint(
    rank: int = 0,
    skip: int = 0,
    timeout_s: float = 3600.0,
    *,
    group: Any = None,  # noqa: ANN401 - a ProcessGroup of torch, which need not be there
    on_quit: str = "stop",
    listen: bool | None = None,
    host: str = "",
) -> None:
    """Stop one rank in pdb, at the line of the caller, while the others wait in their call of this.

    All ranks of the group have to come here. They wait until the debugger is left by `c` (no breakpoints set) or `q`,
    also while it steps on by `n`; `release` lets them go and keeps the debugger, as a collective that is stepped over
    needs. The timeouts of all process groups of these ranks are raised meanwhile, and put back. Outside of a process
    group of several ranks it is pdb at the caller's line.

    Args:
        rank: global rank to stop.
        skip: calls from this very line of the program that do nothing before the first that stops.
        timeout_s: seconds that the others wait at most, and that a connection is waited for.
        group: process group whose ranks meet, default: all ranks. Others in it return at once; ranks outside of it do
            not know, and may time out in a collective with these.
        on_quit: "stop": with `q` or Ctrl-D all ranks of the group stop with an error; "continue": they all go on.
        listen: True: wait for a connection instead of using the terminal, and say on stderr what to type; None: where
            there is no terminal to be used; False: never.
        host: where to listen. Empty: for this user and root on this node. An address of this node: for whoever has
            the token, which is in a file that only this user can read; what is typed can be read on the way.

    Raises:
        DebuggerQuit: in the ranks that wait: the other one quit, died, or did not leave the debugger in time.
        NoTerminal: nobody could have typed anything, and why; the ranks that wait are told the same.
        bdb.BdbQuit: in the rank that was stopped, when its debugger is quit.
        ValueError: `rank` is not in the group, or `on_quit` is neither word.
        RuntimeError: the process group has no store to meet at (MPI).
    """
    caller = sys._getframe(1)
    place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    if on_quit not in ("stop", "continue"):
        raise ValueError(f"on_quit is 'stop' or 'continue', not {on_quit!r}")
    site = (caller.f_code.co_filename, caller.f_lineno)
    _calls[site] += 1
    if _calls[site] <= skip or not _takes_part(rank, group):
        return
    meeting = _meet(rank, group)
    held = Held(timeout_s)
    if meeting is not None and my_rank() != rank:
        _wait(meeting, rank, held, timeout_s)
        return
    word = first_word(rank, place)
    speaker = None if meeting is None else Speaker(meeting.store, meeting.key, word, meeting.size - 1)
    tell = _teller(speaker, held)
    try:
        console = _console(place, listen, host, timeout_s)
    except BaseException as error:
        tell(QUIT, f"cannot be debugged ({str(error) or type(error).__name__})")
        raise
    debugger = _debugger(console, tell, quit_stops=on_quit == "stop")
    debugger.message(_greeting(meeting, rank, place, quit_stops=on_quit == "stop"))
    # The last that is done here: from now on the debugger stops in whatever is called.
    debugger.set_trace(caller)


def _takes_part(rank: int, group: Any) -> bool:  # noqa: ANN401 - a ProcessGroup
    dist = torch_distributed()
    if dist is not None:
        return group is not dist.GroupMember.NON_GROUP_MEMBER
    # Before init_process_group the ranks cannot wait for each other, but all of them need not stop.
    identity = identify(os.environ)
    return identity is None or identity.world_size == 1 or identity.rank == rank


def _meet(rank: int, group: Any) -> _Meeting | None:  # noqa: ANN401 - a ProcessGroup
    """Find where the ranks of a group meet this time; None if this process is alone."""
    dist = torch_distributed()
    if dist is None:
        return None
    if group is None:
        group = dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return None
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not one of the {len(ranks)} ranks of this group")
    if dist.get_backend() == "mpi":
        raise RuntimeError("a process group of the MPI backend has no store, where its ranks could wait for each other")
    name = dist.distributed_c10d._get_process_group_name(group)
    _meetings[name] += 1
    store = dist.distributed_c10d._get_default_store()
    return _Meeting(store, f"distdiag/breakpoint/{name}/{_meetings[name]}", len(ranks))


def _wait(meeting: _Meeting, rank: int, held: Held, timeout_s: float) -> None:
    hearer = Hearer(meeting.store, meeting.key, rank)
    state = DONE
    try:
        # All of them ask one server: the more there are, the less often each.
        state = hearer.wait(timeout_s, pause_s=min(max(0.1, meeting.size / 1000), 2)).state
    finally:
        if state != RELEASED:
            held.let_go()
            hearer.end()
    if state == RELEASED:
        Watch(hearer, held, timeout_s)


def _teller(speaker: Speaker | None, held: Held) -> Callable[..., None]:
    def tell(state: str, why: str = "") -> None:
        if speaker is not None:
            speaker.say(state, why)
        if state != RELEASED:
            held.let_go()

    return tell


def _console(place: str, listen: bool | None, host: str, timeout_s: float) -> Console:
    from distdiag.training.rank_console import NoTerminal, by_socket, terminal

    if not listen:
        try:
            return terminal()
        except NoTerminal as error:
            if listen is not None:
                raise NoTerminal(f"{error}; with listen=True one can connect to it") from None
    return by_socket(host, place, timeout_s)


def _debugger(console: Console, tell: Callable[..., None], *, quit_stops: bool) -> RankPdb:
    from distdiag.training.rank_debugger import RankPdb

    # One that came here by its own breakpoints is replaced: a process has one trace function.
    while _attached:
        _attached.pop().leave(DONE)
    _attached.append(RankPdb(console, tell, quit_stops=quit_stops))
    return _attached[0]


def _greeting(meeting: _Meeting | None, rank: int, place: str, *, quit_stops: bool) -> str:
    if meeting is None:
        return f"stopped at {place}"
    quitting = "all stop with an error" if quit_stops else "all go on"
    return (
        f"rank {rank} stopped at {place}; the other {meeting.size - 1} of its group wait there\n"
        f"c: all go on | q: {quitting} | release: the others go on and you step, as over a collective"
    )
