"""breakpoint() for one rank of many: the others wait without timeouts, and never for a rank that has left."""

from __future__ import annotations

import contextlib
import os
import pdb
import sys
from collections import Counter

from distdiag.facts import machine
from distdiag.facts.process.rank_identity import identify, own_rank, torch_distributed
from distdiag.training.breakpoint import debug_barrier as barrier
from distdiag.training.breakpoint.console import open_console

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TextIO

_calls: Counter[tuple[str, int]] = Counter()
_barriers: Counter[str] = Counter()
_attached: list[RankPdb] = []  # the active debugger of this process, if any


def breakpoint(
    rank: int = 0,
    skip: int = 0,
    timeout_s: float = 3600.0,
    *,
    group: Any = None,  # noqa: ANN401 - a ProcessGroup of torch, which need not be there
    on_quit: str = "stop",
    listen: bool | None = None,
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
            None: listen only where no terminal can be used. False: never listen. Only this user and root on this node
            can connect.

    Raises:
        DebuggerQuit: in the waiting ranks: the stopped rank quit, died, or did not leave the debugger in time.
        NoTerminal: no terminal to type at; the message says why. The waiting ranks raise DebuggerQuit.
        bdb.BdbQuit: in the stopped rank, when you quit its debugger.
        ValueError: `rank` is not in the group, the group has no store to meet at (MPI), or `on_quit` is unknown.
    """
    caller = sys._getframe(1)
    line = (caller.f_code.co_filename, caller.f_lineno)
    if on_quit not in ("stop", "continue"):
        raise ValueError(f"on_quit must be 'stop' or 'continue', not {on_quit!r}")
    _calls[line] += 1
    if _calls[line] <= skip or not _takes_part(rank, group):
        return
    store, key, size = _barrier(rank, group)
    restore_timeouts = barrier.raise_timeouts(timeout_s)
    if store is not None and own_rank() != rank:
        # All poll one server: the more ranks, the longer the pause.
        pause_s = min(max(0.1, size / 1000), 2)
        barrier.Waiter(store, key, rank, pause_s=pause_s, restore=restore_timeouts).wait(timeout_s)
        return
    place = f"{line[0]}:{line[1]}"
    status = barrier.Status(barrier.STOPPED, rank, place, machine.host_name(), os.getpid())
    holder = barrier.Holder(store, key, status, size - 1) if store is not None else None

    def set_state(state: str, why: str = "") -> None:
        if holder is not None:
            holder.set_state(state, why)
        if state != barrier.RELEASED:
            restore_timeouts()

    try:
        console = open_console(place, listen=listen, timeout_s=timeout_s)
    except BaseException as error:
        set_state(barrier.QUIT, f"cannot be debugged ({str(error) or type(error).__name__})")
        raise
    while _attached:  # stopped here by its own breakpoints; a process has one trace function
        _attached.pop().leave(barrier.DONE)
    debugger = RankPdb(*console, set_state, quit_stops=on_quit == "stop")
    _attached.append(debugger)
    debugger.message(_greeting(size, rank, place, quit_stops=on_quit == "stop"))
    # Last: from now on the debugger stops in any called function.
    debugger.set_trace(caller)


def _takes_part(rank: int, group: Any) -> bool:  # noqa: ANN401 - a ProcessGroup
    dist = torch_distributed()
    if dist is not None:
        return group is not dist.GroupMember.NON_GROUP_MEMBER
    # Before init_process_group ranks cannot wait for each other, but only `rank` stops.
    identity = identify(os.environ)
    return identity is None or identity.world_size == 1 or identity.rank == rank


def _barrier(rank: int, group: Any) -> tuple[Any, str, int]:  # noqa: ANN401 - a ProcessGroup, and torch's Store
    """Return store, key and group size of this meeting of the ranks; store None for a single rank."""
    dist = torch_distributed()
    if dist is None:
        return None, "", 1
    if group is None:
        group = dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return None, "", 1
    store = dist.distributed_c10d._get_default_store()
    if rank not in ranks or store is None:
        raise ValueError(f"rank {rank} is not in this group of {len(ranks)} ranks, or they have no store (MPI)")
    name = dist.distributed_c10d._get_process_group_name(group)
    _barriers[name] += 1
    return store, f"distdiag/breakpoint/{name}/{_barriers[name]}", len(ranks)


def _greeting(size: int, rank: int, place: str, *, quit_stops: bool) -> str:
    if size == 1:
        return f"stopped at {place}"
    quitting = "all ranks stop with an error" if quit_stops else "all ranks continue"
    return (
        f"rank {rank} stopped at {place}; the other {size - 1} ranks of its group wait there\n"
        f"c: all continue | q: {quitting} | release: the others continue while you step, as over a collective"
    )


class RankPdb(pdb.Pdb):
    """pdb on its own console. `set_state` is called with RELEASED, and finally with DONE or QUIT.

    pdb's trace function stops again long after breakpoint() has returned: the command that ends a prompt decides
    whether the debugger is left.
    """

    def __init__(self, reader: TextIO, writer: TextIO, set_state: Callable[[str], None], *, quit_stops: bool) -> None:
        # Ctrl-C must end the job through its launcher; pdb would turn it into a prompt long after `c`.
        super().__init__(stdin=reader, stdout=writer, nosigint=True)
        self._streams, self._set_state, self._quit_stops = (writer, reader), set_state, quit_stops
        self._next_state = ""
        self._is_over = False

    def interaction(self, *arguments: object, **names: object) -> None:
        """Prompt, then publish the new state."""
        try:
            super().interaction(*arguments, **names)  # type: ignore[arg-type]
        except (OSError, ValueError):  # terminal or connection lost
            self.set_quit()
        except BaseException:
            self._next_state = barrier.QUIT
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
        self._next_state, self._is_over = "", state != barrier.RELEASED
        self._set_state(state)
        for stream in self._streams if self._is_over else ():
            with contextlib.suppress(OSError, ValueError):  # the other end may be closed
                stream.close()

    def set_continue(self) -> None:
        """Continue; with breakpoints set, keep the debugger and release the ranks so that one can be reached."""
        super().set_continue()
        self._next_state = barrier.RELEASED if self.breaks else barrier.DONE

    def set_quit(self) -> None:
        """End the job, or only the debugger with on_quit="continue"."""
        if self._quit_stops:
            super().set_quit()
            self._next_state = barrier.QUIT
        else:
            self.clear_all_breaks()
            self.set_continue()

    def do_release(self, arg: str) -> None:
        """release

        Let the other ranks continue and stay in the debugger: to step over a collective, which waits for them.
        """
        self._set_state(barrier.RELEASED)
        self.message("the other ranks continue; their timeouts stay raised until you leave with c or q")
