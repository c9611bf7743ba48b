"""A child that reads stacks by pystack, which may crash or hang on a damaged core."""

from __future__ import annotations

from distdiag.facts.core import libdw, pystack_child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from distdiag.facts import programs

_LONGEST_QUESTION = 4000  # a pipe holds 4096 bytes at least, see fs.pipe-user-pages-soft in pipe(7)


class Asked:
    """A child that reads ["core", its path, the program's path], ["process", its id], or ["lines"] alone.

    There is more to say but for a process, see `go_on`. Raises run.CannotRun.
    """

    def __init__(self, target: Sequence[str], python: str) -> None:
        import json

        from distdiag.facts import programs

        self._is_over = False
        self._child = programs.start(_program(python))
        programs.say(self._child, json.dumps(target).encode() + b"\n", is_all=target[0] == "process")

    def go_on(self, question: dict[str, list[int]] | None) -> bool:
        """Ask for the debug information of addresses in files; None: for pystack's C frames.

        False: so many addresses that it was asked for these instead.
        """
        import json

        from distdiag.facts import programs

        words = json.dumps(question).encode()
        is_short = len(words) <= _LONGEST_QUESTION
        programs.say(self._child, (words if is_short else b"null") + b"\n")
        return is_short

    def answer(self, timeout_s: float) -> programs.Done:
        """Hear what it tells, see `pystack_child`."""
        from distdiag.facts import programs

        done = programs.hear(self._child, timeout_s=timeout_s)
        self._is_over = True
        return done

    def drop(self) -> None:
        """Do without; nothing happens to one that has answered."""
        from distdiag.facts import programs

        if not self._is_over:  # by then its number may be somebody else's
            programs.end_group(self._child)


def _program(python: str) -> list[str]:
    # Without the working directory: a stray ./threading.py must not break a diagnosis.
    without = "import sys; sys.path[:] = [path for path in sys.path if path]; here = {'__name__': 'child'}"
    texts = (one.__loader__.get_source(one.__name__) for one in (libdw, pystack_child))  # type: ignore[union-attr]
    # One namespace for both: no two helpers may have one name.
    load = "".join(f"exec(compile({text!r}, 'child.py', 'exec'), here)\n" for text in texts)
    return [python, "-B", "-c", f"{without}\n{load}here['main'](here['Lines'])"]
