"""pdb for one rank: the others are let go when it is left, not when its first prompt is."""

from __future__ import annotations

import contextlib
import pdb

from distdiag.training.rank_meeting import DONE, QUIT, RELEASED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from distdiag.training.rank_console import Console


class RankPdb(pdb.Pdb):
    """pdb on a console of its own. `tell` is called with RELEASED, and at last with DONE or QUIT.

    pdb stops at a line, lets step, and stops again by a trace function, long after breakpoint() has returned: whether
    it is left is known when a prompt ends, from the command that ended it.
    """

    def __init__(self, console: Console, tell: Callable[[str], None], *, quit_stops: bool) -> None:
        # Ctrl-C goes to the whole job, whose launcher ends it; pdb would make a prompt of it long after `c`.
        super().__init__(stdin=console.reader, stdout=console.writer, nosigint=True)
        self._console, self._tell, self._quit_stops = console, tell, quit_stops
        self._said = ""
        self._over = False

    def interaction(self, *arguments: object, **names: object) -> None:
        """Prompt, then tell the others what came of it."""
        try:
            super().interaction(*arguments, **names)  # type: ignore[arg-type]
        except (OSError, ValueError):  # the terminal or the connection is gone
            self.set_quit()
        except BaseException:
            self._said = QUIT
            raise
        finally:
            if self._said:
                with contextlib.suppress(OSError, ValueError):
                    self.stdout.flush()
                self.leave(self._said)

    def leave(self, state: str) -> None:
        """Tell the others; with DONE and QUIT the console is closed, too."""
        if self._over:
            return
        self._said, self._over = "", state != RELEASED
        self._tell(state)
        if self._over:
            self._console.close()

    def set_continue(self) -> None:
        """Go on; with breakpoints set the debugger stays, and the ranks have to run for it to come to one."""
        super().set_continue()
        self._said = RELEASED if self.breaks else DONE

    def set_quit(self) -> None:
        """End the job, or only the debugger if that was asked for."""
        if self._quit_stops:
            super().set_quit()
            self._said = QUIT
        else:
            self.clear_all_breaks()
            self.set_continue()

    def do_release(self, arg: str) -> None:
        """release

        Let the other ranks go on and stay in the debugger: to step over a collective, which waits for them.
        Their timeouts stay raised until the debugger is left.
        """
        self._tell(RELEASED)
        self.message("the other ranks go on; their timeouts stay raised until you leave with c or q")

    def do_run(self, arg: str) -> None:
        """run: is not there, one rank cannot be started again."""
        self.error(f"one rank cannot be started again{f' with {arg}' if arg else ''}")

    do_restart = do_run
