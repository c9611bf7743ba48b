"""breakpoint() for one rank of many: the others wait, nothing times out, and no rank waits for a rank that has left."""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections import Counter
from dataclasses import dataclass

from distdiag.facts.rank_identity import identify, own_rank, torch_distributed
from distdiag.training.breakpoint.console import open_console
from distdiag.training.breakpoint.debug_barrier import DONE, QUIT, RELEASED, Holder, Waiter, own_status
from distdiag.training.breakpoint.store_client import RaisedTimeouts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from distdiag.training.breakpoint.console import Console

_calls: Counter[tuple[str, int]] = Counter()
_barriers: Counter[str] = Counter()
_attached: list[RankPdb] = []
"""The debugger that is at work in this process, if there is one."""


@dataclass(frozen=True)
class _Barrier:
    """Where `size` ranks wait for one of them this time: a key of a store."""

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
    """Stop one rank in pdb at the caller's line, while the other ranks wait in their call of this function.

    All ranks of the group must call it. They wait until you leave the debugger by `c` (with no breakpoints set) or `q`,
    also while you step with `n`. `release` lets them continue and keeps the debugger: use it to step over a collective.
    Meanwhile the timeouts of all process groups of these ranks are raised; they are restored afterwards. Without a
    process group of several ranks this is pdb at the caller's line.

    Args:
        rank: global rank to stop.
        skip: number of calls from this line of code that return at once, before the first call that stops.
        timeout_s: maximum seconds that the other ranks wait, and maximum wait for a connection.
        group: process group whose ranks meet here. Default: all ranks. Other ranks return at once; they do not know
            about the stop, and may time out in a collective with these ranks.
        on_quit: "stop": `q` or Ctrl-D stops all ranks of the group with an error. "continue": all ranks continue.
        listen: True: wait for a connection instead of using the terminal, and print the command to connect on stderr.
            None: listen only where no terminal can be used. False: never listen.
        host: address to listen on. Empty: only this user and root on this node can connect. An address of this node:
            anyone with the token can connect. The token is in a file that only this user can read. The connection is
            not encrypted.

    Raises:
        DebuggerQuit: in the waiting ranks: the stopped rank quit, died, or did not leave the debugger in time.
        NoTerminal: no terminal to type at; the message says why. The waiting ranks raise it, too.
        bdb.BdbQuit: in the stopped rank, when you quit its debugger.
        ValueError: `rank` is not in the group, or `on_quit` is not one of its two values.
        RuntimeError: the process group has no store to meet at (MPI).
    """
    caller = sys._getframe(1)
    line = (caller.f_code.co_filename, caller.f_lineno)
    if on_quit not in ("stop", "continue"):
        raise ValueError(f"on_quit must be 'stop' or 'continue', not {on_quit!r}")
    _calls[line] += 1
    if _calls[line] <= skip or not _takes_part(rank, group):
        return
    barrier = _barrier(rank, group)
    timeouts = RaisedTimeouts(timeout_s)
    if barrier is not None and own_rank() != rank:
        _wait(barrier, rank, timeouts, timeout_s)
        return
    place = f"{line[0]}:{line[1]}"
    status = own_status(rank, place)
    holder = None if barrier is None else Holder(barrier.store, barrier.key, status, barrier.size - 1)

    def set_state(state: str, why: str = "") -> None:
        if holder is not None:
            holder.set_state(state, why)
        if state != RELEASED:
            timeouts.restore()

    try:
        console = open_console(place, listen=listen, address=host, timeout_s=timeout_s)
    except BaseException as error:
        set_state(QUIT, f"cannot be debugged ({str(error) or type(error).__name__})")
        raise
    debugger = _attach(console, set_state, quit_stops=on_quit == "stop")
    debugger.message(_greeting(barrier, rank, place, quit_stops=on_quit == "stop"))
    # The last that is done here: from now on the debugger stops in whatever is called.
    debugger.set_trace(caller)


def _takes_part(rank: int, group: Any) -> bool:  # noqa: ANN401 - a ProcessGroup
    dist = torch_distributed()
    if dist is not None:
        return group is not dist.GroupMember.NON_GROUP_MEMBER
    # Before init_process_group the ranks cannot wait for each other, but all of them need not stop.
    identity = identify(os.environ)
    return identity is None or identity.world_size == 1 or identity.rank == rank


def _barrier(rank: int, group: Any) -> _Barrier | None:  # noqa: ANN401 - a ProcessGroup
    """Find where the ranks of a group wait this time; None if this process is alone."""
    dist = torch_distributed()
    if dist is None:
        return None
    if group is None:
        group = dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return None
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in this group of {len(ranks)} ranks")
    if dist.get_backend() == "mpi":
        raise RuntimeError(
            "a process group of the MPI backend has no store, which its ranks need to wait for each other"
        )
    name = dist.distributed_c10d._get_process_group_name(group)
    _barriers[name] += 1
    store = dist.distributed_c10d._get_default_store()
    return _Barrier(store, f"distdiag/breakpoint/{name}/{_barriers[name]}", len(ranks))


def _wait(barrier: _Barrier, rank: int, timeouts: RaisedTimeouts, timeout_s: float) -> None:
    waiter = Waiter(barrier.store, barrier.key, rank)
    state = DONE
    try:
        # All of them ask one server: the more there are, the less often each.
        state = waiter.wait(timeout_s, pause_s=min(max(0.1, barrier.size / 1000), 2)).state
    finally:
        if state != RELEASED:
            timeouts.restore()
            waiter.close()
    if state == RELEASED:
        waiter.restore_later(timeouts, timeout_s)


def _attach(console: Console, set_state: Callable[..., None], *, quit_stops: bool) -> RankPdb:
    # One that came here by its own breakpoints is replaced: a process has one trace function.
    while _attached:
        _attached.pop().leave(DONE)
    _attached.append(RankPdb(console, set_state, quit_stops=quit_stops))
    return _attached[0]


def _greeting(barrier: _Barrier | None, rank: int, place: str, *, quit_stops: bool) -> str:
    if barrier is None:
        return f"stopped at {place}"
    quitting = "all ranks stop with an error" if quit_stops else "all ranks continue"
    return (
        f"rank {rank} stopped at {place}; the other {barrier.size - 1} ranks of its group wait there\n"
        f"c: all continue | q: {quitting} | release: the others continue while you step, as over a collective"
    )


class RankPdb(pdb.Pdb):
    """pdb on a console of its own. `set_state` is called with RELEASED, and at last with DONE or QUIT.

    pdb stops at a line, lets step, and stops again by a trace function, long after breakpoint() has returned: whether
    it is left is known when a prompt ends, from the command that ended it.
    """

    def __init__(self, console: Console, set_state: Callable[[str], None], *, quit_stops: bool) -> None:
        # Ctrl-C goes to the whole job, whose launcher ends it; pdb would make a prompt of it long after `c`.
        super().__init__(stdin=console.reader, stdout=console.writer, nosigint=True)
        self._console, self._set_state, self._quit_stops = console, set_state, quit_stops
        self._next_state = ""
        self._is_over = False

    def interaction(self, *arguments: object, **names: object) -> None:
        """Prompt, then publish what came of it."""
        try:
            super().interaction(*arguments, **names)  # type: ignore[arg-type]
        except (OSError, ValueError):  # the terminal or the connection is gone
            self.set_quit()
        except BaseException:
            self._next_state = QUIT
            raise
        finally:
            if self._next_state:
                with contextlib.suppress(OSError, ValueError):
                    self.stdout.flush()
                self.leave(self._next_state)

    def leave(self, state: str) -> None:
        """Publish the state; with DONE and QUIT the console is closed, too."""
        if self._is_over:
            return
        self._next_state, self._is_over = "", state != RELEASED
        self._set_state(state)
        if self._is_over:
            self._console.close()

    def set_continue(self) -> None:
        """Go on; with breakpoints set the debugger stays, and the ranks have to run for it to come to one."""
        super().set_continue()
        self._next_state = RELEASED if self.breaks else DONE

    def set_quit(self) -> None:
        """End the job, or only the debugger if that was asked for."""
        if self._quit_stops:
            super().set_quit()
            self._next_state = QUIT
        else:
            self.clear_all_breaks()
            self.set_continue()

    def do_release(self, arg: str) -> None:
        """release

        Let the other ranks go on and stay in the debugger: to step over a collective, which waits for them.
        Their timeouts stay raised until the debugger is left.
        """
        self._set_state(RELEASED)
        self.message("the other ranks continue; their timeouts stay raised until you leave with c or q")

    def do_run(self, arg: str) -> None:
        """run: is not there, one rank cannot be started again."""
        self.error(f"a single rank cannot be restarted{f' with {arg}' if arg else ''}")

    do_restart = do_run
