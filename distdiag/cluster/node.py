"""One host's agent: its records, stage, and end."""

from __future__ import annotations

import re
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from distdiag.agent import protocol, wire
from distdiag.cluster import records
from distdiag.cluster.checked_json import InvalidData, read_json
from distdiag.cluster.host_results import HostError, HostState
from distdiag.facts import machine
from distdiag.facts.text import printable

if TYPE_CHECKING:
    from distdiag.agent.protocol import Message
    from distdiag.cluster.hosts import Host
    from distdiag.cluster.links import Link
    from distdiag.cluster.records import Said

_MAX_BYTES = {False: 64 * 2**20, True: 256 * 2**20}
"""Maximum bytes from one node before it is up, and in total: bounds memory and time for a broken or hostile one."""
_COMPLAINT_LINES = 6
_QUOTED_LETTERS = 80


class NodeStage(StrEnum):
    """The stage of an agent: Python started; collecting; taking orders; released; lost."""

    STARTING = "start"
    TELLING = "facts"
    UP = "up"
    DONE = "done"
    DOWN = "down"


class Node:
    """One host's agent."""

    def __init__(
        self, host: Host, link: Link, payload: bytes, facts: type[Any], *, began: float, names_itself: bool = False
    ) -> None:
        """`facts` is the type of its first report."""
        self.name = host.name
        self.host = host.name
        """Its label: the requested name, or its own if none was requested."""
        self._names_itself = names_itself
        self.link = link
        self.began = began
        self.entered = self.heard_at = time.monotonic()
        self.stage = NodeStage.TELLING if link.loaded else NodeStage.STARTING
        self.hello = protocol.Hello()
        self.reply: Any = None
        """Its facts, of the requested type."""
        self._facts_type = facts
        self.refusal: HostError | None = None
        self.unresponsive = False
        self.watched: set[int] = set()
        """Descriptors polled by the fleet."""
        self._payload = payload
        self._reader = wire.Reader()
        self._noise = wire.Reader()
        self._bytes = 0

    def order(self, order: Message) -> None:
        """Send one order to the agent."""
        self.link.write(order.to_json() + b"\n")

    def receive(self) -> tuple[list[Said], bool, HostError | None]:
        """Read available data: (records in order, whether the stream ended, the error of an invalid one).

        All other output is kept as noise.
        """
        heard = self.link.read()
        self.heard_at = time.monotonic()
        self._bytes += len(heard.out) + len(heard.err)
        found: list[Said] = []
        wrong = ""
        try:
            for _ in self._noise.feed(heard.err):
                pass  # records on stderr are ignored
            for frame in self._reader.feed(heard.out):
                record = records.read_record(frame)
                if isinstance(record, records.RankEvent) and "pairs" in record.payload:
                    self._bytes -= len(frame)  # sent repeatedly, and only the last is kept
                if not isinstance(record, protocol.Alive):
                    found.append(record)
        except InvalidData as error:
            wrong = f"it sent an invalid record: {error}"
        except wire.TooLong:
            wrong = f"it sent a record larger than {wire.MAX_LINE_BYTES >> 20} MiB"
        is_up = self.stage in (NodeStage.UP, NodeStage.DONE)
        if not wrong and self._bytes > _MAX_BYTES[is_up]:
            wrong = f"it sent {self._bytes >> 20} MiB" + ("" if is_up else " of unparseable output")
        return found, heard.ended, self.protocol_error(wrong) if wrong else None

    def advance(self, record: Said) -> HostError | None:
        """Enter the next stage after this record, or return an error."""
        if isinstance(record, protocol.Ready) and self.stage is NodeStage.STARTING:
            self.link.write(self._payload)  # before entering: from then on signs of life are sent too
            self._payload = b""
            self._enter(NodeStage.TELLING)
        elif isinstance(record, protocol.NoPython):
            return self._no_python(record.tried)
        elif isinstance(record, protocol.Hello) and self.stage is not NodeStage.UP:
            self.hello = record
            if self._names_itself and record.host:
                self.host = record.host
        elif isinstance(record, records.Facts) and self.stage is not NodeStage.UP:
            try:
                self.reply = read_json(record.facts, self._facts_type)
            except InvalidData as error:
                return self.protocol_error(f"it sent invalid facts: {error}")
            self._enter(NodeStage.UP)
        return None

    def why_it_ended(self) -> HostError:
        """Return why an agent ended, from its status and last output."""
        status, how = self.link.how_it_ended()
        if self.stage is NodeStage.UP:
            return self._refuse(HostState.LOST, f"the agent ended {how}", stage="run")
        words = self.complaint()
        last = f': "{words[-1][:_QUOTED_LETTERS]}"' if words else ""
        known = _known_complaint(words)
        if known is not None:
            return self._refuse(*known, stage="connect")
        if status is not None and status < 0:
            return self._refuse(HostState.KILLED, f"the agent was killed {how}{last}")
        if status == 127:
            return self._refuse(HostState.FAILED, f"command not found{last}")
        # Status 0 without a record: a forced command, a login shell that only prints, a closed account.
        state = HostState.PROTOCOL_ERROR if status == 0 else HostState.FAILED
        return self._refuse(state, f"the agent ended {how} before the handshake{last}")

    def why_late(self, limit_s: float) -> HostError:
        """Return the error for a stage that took too long."""
        if self.stage is NodeStage.STARTING:
            what = f"no Python started within {limit_s:g} s"
            hint = (
                "its login files (~/.bashrc), --setup, or the command that reaches it may be waiting; its login shell "
                "may stay there: end it by hand"
            )
        else:
            what = f"no facts within {limit_s:g} s"
            hint = "something on that node hangs"
        words = self.complaint()
        last = f'; last output: "{words[-1][:_QUOTED_LETTERS]}"' if words else ""
        return self._refuse(HostState.TIMEOUT, what + last, hint=hint)

    def why_no_answer(self) -> str:
        """Describe an unresponsive agent."""
        if self.link.pid is None:
            return f"the agent on {self.host} does not respond"
        state = machine.process_state(self.link.pid).letter
        why = machine.why_it_stands_still(state) or f"in state {state or 'gone'}"
        return f"the agent on {self.host} (pid {self.link.pid}) does not respond: it is {why}"

    def last_words(self) -> str:
        """Format the last line of its output, as a hint."""
        words = self.complaint()
        return "last output: " + words[-1] if words else ""

    def complaint(self) -> list[str]:
        """Return the last lines of its output outside of records, printable."""
        text = (self._reader.noise + self._noise.noise).decode("utf-8", "replace")
        lines = [printable(line)[:200].strip() for line in text.splitlines()]
        return [line for line in lines if line][-_COMPLAINT_LINES:]

    def _enter(self, stage: NodeStage) -> None:
        self.stage = stage
        self.entered = time.monotonic()

    def _no_python(self, tried: str) -> HostError:
        return self._refuse(
            HostState.NO_PYTHON,
            f"no {tried}" + ("" if tried.startswith("/") else " of version 3.9 or newer"),
            hint="give a Python that exists there: --python PATH; or add it to PATH first: --setup 'source ~/env.sh'",
        )

    def protocol_error(self, what: str) -> HostError:
        """Return the refusal of a node that breaks the protocol."""
        return self._refuse(HostState.PROTOCOL_ERROR, what)

    def _refuse(self, state: HostState, message: str, *, stage: str = "", hint: str = "") -> HostError:
        words = tuple(self.complaint())
        return HostError(state=state, stage=stage or self.stage, message=message, hint=hint, evidence=words)


_COMPLAINTS = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", HostState.HOST_KEY_CHANGED, "its host key has changed"),
    ("REVOKED|key for .* revoked", HostState.HOST_KEY_REVOKED, "its host key is marked as revoked"),
    ("host key is known for", HostState.HOST_KEY_UNKNOWN, ""),
    ("Host key verification failed", HostState.HOST_KEY_UNKNOWN, "its host key is unknown here"),
    ("Could not resolve hostname", HostState.UNKNOWN_NAME, ""),
    ("Connection timed out", HostState.FILTERED, ""),
    ("Operation timed out", HostState.FILTERED, ""),
    ("Connection refused", HostState.REFUSED, ""),
    ("No route to host|Network is unreachable", HostState.NO_ROUTE, ""),
    (r"Permission denied \(", HostState.AUTH, ""),
    ("Too many authentication failures", HostState.AUTH, ""),
    ("kex_exchange_identification|banner", HostState.NOT_SSH, ""),
)
"""Messages of OpenSSH's client, see ssh(1) and its sources; `ssh` exits with 255 in all of these cases."""


def _known_complaint(lines: list[str]) -> tuple[HostState, str] | None:
    """Return the state shown by these lines of OpenSSH's client, and the line or its meaning."""
    for pattern, state, message in _COMPLAINTS:
        found = next((line for line in lines if re.search(pattern, line)), None)
        if found is not None:
            return state, message or found
    return None
