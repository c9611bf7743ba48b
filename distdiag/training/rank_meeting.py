"""One rank is in a debugger and the others wait for it: what they tell each other, by the job's own store.

No collective is issued: one could not be matched with what is under way, and would not notice the end of a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, replace

from distdiag.node import procs
from distdiag.training.rank_store import Asked, own
from distdiag.training.whoami import host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from distdiag.training.rank_timeouts import Held

BEAT_S = 1.0
SILENCE_S = 10.0
"""After how many seconds without a beat a rank on another node is taken for dead."""
_HEARD_S = 5.0
"""How long the last word keeps this rank at most: until all who are there have heard it and, at its end, all others."""
_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0
_leave_by: list[float] = []
"""When this process, which is ending, waits for nobody any longer."""

STOPPED, RELEASED, DONE, QUIT = "stopped", "released", "done", "quit"
"""In the debugger; in it, but the others may go on; out of it, and all go on; out of it, and all are to stop."""


class DebuggerQuit(RuntimeError):
    """What the ranks that waited raise: the rank in the debugger quit, died, or was waited for too long."""


@dataclass(frozen=True)
class Word:
    """What the rank in the debugger says of itself; `beat` is another number every second."""

    state: str
    rank: int
    place: str
    host: str
    space: str
    pid: int
    started: int
    why: str = ""
    beat: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def first_word(rank: int, place: str) -> Word:
    """Say that this process stands in the debugger at `place`."""
    proc = procs.read(os.getpid())
    return Word(STOPPED, rank, place, host(), _space(), os.getpid(), 0 if proc is None else proc.started)


class Speaker:
    """The rank in the debugger. Its thread says every second that it is alive, and keeps its last word to be heard."""

    def __init__(self, store: Any, key: str, word: Word, others: int) -> None:  # noqa: ANN401 - torch's Store
        """`others`: how many ranks wait for this one, or will."""
        # This process may be the keeper of the job's: until the last word was heard it is not given up.
        self._jobs, self._store, self._key, self._word, self._others = store, own(store), key, word, others
        self._heard = threading.Event()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._tell()
        self._thread = threading.Thread(target=self._beat, name="distdiag breakpoint", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def say(self, state: str, why: str = "") -> None:
        """Tell the others; after DONE or QUIT nothing is told any more."""
        if os.getpid() != self._word.pid:  # forked, by who is in the debugger
            return
        with self._lock:
            if self._over.is_set():
                return
            self._word = replace(self._word, state=state, why=why)
            self._tell()
            if state in (DONE, QUIT):
                self._over.set()
        if self._over.is_set():
            self._heard.wait(_HEARD_S)

    def _end(self) -> None:
        """Who steps to the end of the program has left the debugger, too; and no thread may be in torch by then."""
        if os.getpid() == self._word.pid:
            self.say(DONE)
            if not _leave_by:  # one time for all that were said
                _leave_by.append(time.monotonic() + _HEARD_S)
            self._thread.join(max(0, _leave_by[0] - time.monotonic()) + _LONGEST_LOOK_S)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            with self._lock:
                if not self._over.is_set():
                    self._word = replace(self._word, beat=self._word.beat + 1)
                    self._tell()
        with contextlib.suppress(RuntimeError):
            self._until_heard()
        self._heard.set()
        self._jobs = self._store = None
        atexit.unregister(self._end)

    def _until_heard(self) -> None:
        """Wait for all others, also for those that are still to come; `_heard` is set when those who are there have."""
        there, pause_s = self._store.add(_there(self._key), 0), _LOOK_S
        while (heard := self._store.add(_heard(self._key), 0)) < self._others:
            if heard >= there:
                self._heard.set()
            if _leave_by and time.monotonic() > _leave_by[0]:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S if self._heard.is_set() else _LOOK_S)

    def _tell(self) -> None:
        # With the store, what the others wait at is gone, and they have noticed.
        with contextlib.suppress(RuntimeError):
            self._store.set(self._key, json.dumps(asdict(self._word)))


class Hearer:
    """A rank that waits for the one in the debugger."""

    def __init__(self, store: Any, key: str, rank: int) -> None:  # noqa: ANN401 - torch's Store
        self._key, self._rank = key, rank
        self._word: Word | None = None
        self._heard_at = time.monotonic()
        self._is_counted = False
        self._asked = Asked(store, lambda own_store: own_store.add(_there(key), 1), self._look, self._leave)

    def wait(self, timeout_s: float, pause_s: float) -> Word:
        """Wait until this rank may go on.

        Args:
            timeout_s: seconds to wait at most.
            pause_s: seconds between two looks into the store.

        Returns:
            The word that said so, RELEASED or DONE.

        Raises:
            DebuggerQuit: the rank quit, is dead, was not out of the debugger in time, or the store is gone.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            word = self.hear()
            if word is not None and word.state in (RELEASED, DONE):
                return word
            if time.monotonic() > deadline:
                what = f"{word} is still" if word is not None else f"rank {self._rank} has not come to its breakpoint"
                where = f" in the debugger at {word.place}" if word is not None else ""
                raise DebuggerQuit(f"{what}{where} after {timeout_s:g} s, and is not waited for any longer")
            time.sleep(pause_s)

    def hear(self) -> Word | None:
        """Read the newest word, None as long as there is none. Raises DebuggerQuit as `wait` does."""
        waited = f"waited for {self._word or f'rank {self._rank}'} to leave the debugger, and the job's store"
        try:
            word: Word | None = self._asked.answer(SILENCE_S)
        except RuntimeError as error:
            raise DebuggerQuit(f"{waited} is gone, with the rank or the launcher that kept it: {error}") from None
        except TimeoutError:
            if self._word is None or not _is_seen(self._word):
                raise DebuggerQuit(
                    f"{waited} has given no answer for {SILENCE_S:g} s: the rank or the launcher that keeps it, or its "
                    "node, is dead or stopped"
                ) from None
            word = self._word  # it may be stopped by whoever debugs it, and is looked at
        if word is None:
            return None
        if word != self._word:
            self._word, self._heard_at = word, time.monotonic()
        if word.state == QUIT:
            raise DebuggerQuit(f"{word} {word.why or 'quit the debugger'} at {word.place}, and this rank stops with it")
        self._must_be_alive(word)
        return word

    def end(self) -> None:
        """Hear no more."""
        self._asked.end()

    def _look(self, store: Any) -> Word | None:  # noqa: ANN401 - torch's Store
        """Read the newest word, in the thread that asks the store."""
        if not store.check([self._key]):
            return None
        word = Word(**json.loads(store.get(self._key)))
        if word.state in (DONE, QUIT):
            self._leave(store)
        return word

    def _leave(self, store: Any) -> None:  # noqa: ANN401 - torch's Store
        """Be counted once: nobody is to wait for this rank to hear any more."""
        if not self._is_counted:
            self._is_counted = True
            store.add(_heard(self._key), 1)

    def _must_be_alive(self, word: Word) -> None:
        if word.state == DONE:
            return
        if _is_seen(word):
            proc = procs.read(word.pid)
            if proc is None or proc.started != word.started or proc.state in "ZX":
                raise DebuggerQuit(f"{word} died in the debugger at {word.place}")
        elif time.monotonic() - self._heard_at > SILENCE_S:
            raise DebuggerQuit(
                f"{word} has given no sign of life for {SILENCE_S:g} s, in the debugger at {word.place}: it, or its "
                "node, is dead or stopped, or its Python is inside of a call that lets no other thread run"
            )


class Watch:
    """Holds a released rank's timeouts until the debugger of the other rank is over, in a thread of its own."""

    def __init__(self, hearer: Hearer, held: Held, timeout_s: float) -> None:
        self._hearer, self._held = hearer, held
        self._deadline = time.monotonic() + timeout_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="distdiag breakpoint", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _watch(self) -> None:
        try:
            while time.monotonic() < self._deadline and not self._stop.wait(BEAT_S):
                word = self._hearer.hear()
                if word is None or word.state == DONE:
                    break
        except DebuggerQuit:
            # This rank is on its way again: with its own timeouts back, it ends as it would without a debugger.
            pass
        finally:
            self._held.let_go()
            self._hearer.end()
            atexit.unregister(self._end)

    def _end(self) -> None:
        self._stop.set()
        self._thread.join(2)


def _there(key: str) -> str:
    """Name the count of the ranks that have begun to hear."""
    return f"{key}/there"


def _heard(key: str) -> str:
    """Name the count of those that have heard the last word, or will hear nothing any more."""
    return f"{key}/heard"


def _is_seen(word: Word) -> bool:
    """Tell whether the process that said it can be seen in /proc."""
    return bool(word.space) and word.space == _space()


def _space() -> str:
    """Name the space of process ids of this process: two that name the same see each other in /proc. Empty without."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
