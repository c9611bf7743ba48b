"""A connection to distdiag's node side on one host: orders out, records in."""

from __future__ import annotations

import json
import os
import selectors
import time
from typing import TYPE_CHECKING, Any, TypeVar

from distdiag.cluster import bundle
from distdiag.cluster.transports import local
from distdiag.errors import DistdiagError, NodeFailed
from distdiag.node import boot, machine, run, wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

T = TypeVar("T")
_FACTS_TIMEOUT_S = 30.0
_GOODBYE_S = 2.0


class Node:
    """One host's agent. Leaving the `with` block ends the agent and everything that it started."""

    def __init__(self, host: str, *, collect: str, ask: dict[str, Any], rank: str) -> None:
        """Start the agent with `collect` (a module with `facts(ask)`); `rank` is the module that ranks will run."""
        self.host = host
        payload = boot.pack(bundle.sources(collect, rank), "distdiag.node.agent", {"collect": collect, "ask": ask})
        try:
            self._process = run.start(local.command(boot.START, len(payload)))
        except run.CannotRun as error:
            raise NodeFailed(f"distdiag's node side cannot be started on {host}: {error}") from error
        self._reader = wire.Reader()
        self._noise = wire.Reader()
        self._pending: list[dict[str, Any]] = []
        self._open = True
        self._goodbye_s = _GOODBYE_S
        self._write(payload)

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def order(self, do: str, **details: Any) -> None:  # noqa: ANN401 - any JSON
        """Send one order to the agent."""
        self._write(json.dumps({"do": do, **details}).encode() + b"\n")

    def records(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Wait at most `timeout_s` seconds for something new and yield all that came.

        Raises:
            NodeFailed: the agent ended.
        """
        pending, self._pending = self._pending, []
        yield from pending
        if not pending:
            yield from self._receive(timeout_s)

    def expect(self, kind: str, timeout_s: float) -> dict[str, Any]:
        """Wait for the next record of a kind; others stay for `records`.

        Raises:
            NodeFailed: it did not come in time, or the agent ended.
        """
        deadline = time.monotonic() + timeout_s
        kept: list[dict[str, Any]] = []
        while (left := deadline - time.monotonic()) > 0:
            batch = list(self.records(left))
            for number, record in enumerate(batch):
                if record["kind"] == kind:
                    self._pending = kept + batch[number + 1 :]
                    return record
                kept.append(record)
        raise self.no_answer()

    def facts(self, type_: type[T]) -> T:
        """Wait for the node's facts and decode them."""
        return decode(self.expect("facts", _FACTS_TIMEOUT_S)["facts"], type_, self.host)

    def no_answer(self) -> NodeFailed:
        """Give the error of an agent that is silent. It will not react to the end of its stdin either: it is killed."""
        state = machine.process_state(self._process.pid).letter
        why = machine.why_it_stands_still(state) or f"in state {state or 'gone'}"
        self._goodbye_s = 0.0
        return NodeFailed(
            f"distdiag's node side on {self.host} (pid {self._process.pid}) does not answer: it is {why}",
            hint=self._last_words() or "run it again; what stops processes on this node has stopped it",
        )

    def close(self) -> None:
        """End the agent: it kills its ranks when its stdin ends; what does not end then is killed."""
        if not self._open:
            return
        self._open = False
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        self._wait_for_end(self._goodbye_s)
        run.end_group(self._process)

    def _wait_for_end(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except BrokenPipeError as error:
            raise self._ended() from error

    def _receive(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ, self._reader)
            selector.register(self._process.stderr, selectors.EVENT_READ, self._noise)
            ready = selector.select(timeout_s)
        for key, _ in ready:
            data = os.read(key.fd, 65536)
            yield from key.data.feed(data)
            if not data and key.data is self._reader:
                raise self._ended()

    def _ended(self) -> NodeFailed:
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        self._noise.noise += self._process.stderr.read() or b""
        self._wait_for_end(0.5)
        status = run.end_group(self._process)
        how = f" by {run.signal_name(-status)}" if status is not None and status < 0 else f" with status {status}"
        return NodeFailed(
            f"distdiag's node side on {self.host} ended{how}, and the ranks with it",
            hint=self._last_words() or "run it again; see who ends processes on this node",
        )

    def _last_words(self) -> str:
        lines = (self._noise.noise + self._reader.noise).decode("utf-8", "replace").strip().splitlines()
        return "its last words: " + lines[-1] if lines else ""


def decode(value: object, type_: type[T], host: str) -> T:
    """Turn what came from a node into a typed fact; what comes from a node is untrusted.

    Raises:
        DistdiagError: it is not of that shape.
    """
    import msgspec

    try:
        return msgspec.convert(value, type_)
    except msgspec.ValidationError as error:
        raise DistdiagError(f"{host} sent facts that make no sense: {error}") from error
