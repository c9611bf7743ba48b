"""Every message between the parent and its agents: a line of JSON, {"kind": ..., the fields of its class}.

Orders go to an agent, replies come from it. Neither side trusts the other's messages: the parent validates
each reply (distdiag/cluster/records.py has the same fields with their limits), and an agent passes over orders of a
kind that it does not know. Not dataclasses: their import would take each agent a tenth of its start.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, ClassVar, dataclass_transform
else:

    def dataclass_transform(**_):  # noqa: ANN003, ANN201 - for type checkers: a class has the fields that it annotates
        """Return a decorator that changes nothing."""
        return lambda cls: cls


@dataclass_transform(kw_only_default=True)
class Message:
    """A message; a field that is left out has its default on the other side too."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, *, kind: str) -> None:
        cls.kind = kind

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401 - type checkers see the fields of each class
        vars(self).update(fields)

    def to_json(self) -> bytes:
        """Return it as a line, without the end of the line."""
        # Names of files and processes may be no UTF-8: what Python has for such a byte is a question mark here.
        return json.dumps({"kind": self.kind, **vars(self)}, ensure_ascii=False).encode("utf-8", "replace")


# Orders.


class Collect(Message, kind="collect"):
    """Call `more` of the module that collected the facts."""

    ask: Mapping[str, Any]


class KeepLogs(Message, kind="keep-logs"):
    """Keep what each rank prints in files."""


class Listen(Message, kind="listen"):
    """Listen on the rendezvous port for rank 0; 0: any free port."""

    port: int


class StartRank(Message, kind="start"):
    """Start a rank: `main(config)` of the module `entry`, with these variables.

    `forked` is None for a rank that gets a process of its own, else {"modules", "stage", "note"}: what is imported
    once for all of them, and what they report meanwhile.
    """

    rank: int
    env: dict[str, str]
    entry: str
    config: dict[str, Any]
    forked: Mapping[str, Any] | None


class Mark(Message, kind="mark"):
    """Note what the ranks have done so far, for the next inspection."""


class Inspect(Message, kind="inspect"):
    """Report state and stack of these ranks."""

    ranks: list[int]
    timeout_s: float


class SendTool(Message, kind="tool"):
    """Keep a piece (base64 of zlib) of a program that the node lacks."""

    name: str
    piece: str
    last: bool


class ReachListen(Message, kind="reach-listen"):
    """Listen on an ephemeral port, as ranks do, on so many `more`, and on these ports; for the other nodes to probe."""

    more: int = 0
    ports: Sequence[int] = ()


class ReachServe(Message, kind="reach-serve"):
    """Answer every client that knows the key."""

    key: str


class ReachTry(Message, kind="reach-probe"):
    """Probe all targets at once, [key, address, port, bytes to send, by default 64 KiB]; resolve the names."""

    key: str
    targets: list[list[Any]]
    names: list[str]
    timeout_s: float


class ReachEnd(Message, kind="reach-end"):
    """Stop answering: rank 0 owns the rendezvous port from now on."""


class Leave(Message, kind="leave"):
    """End with this status."""

    status: int


_ORDERS: dict[str, type[Message]] = {
    order.kind: order
    for order in (
        *(Collect, KeepLogs, Listen, StartRank, Mark, Inspect, SendTool),
        *(ReachListen, ReachServe, ReachTry, ReachEnd, Leave),
    )
}


def read_order(line: bytes) -> Message | None:
    """Parse an order; None for a kind that only a newer parent knows. Raises ValueError."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("an order is an object")
    order = _ORDERS.get(fields.pop("kind", None))
    return None if order is None else order(**fields)


# Replies.


class Ready(Message, kind="ready"):
    """Its Python runs and waits for the payload."""


class NoPython(Message, kind="no-python"):
    """There is no Python that could run it."""

    tried: str


class Hello(Message, kind="hello"):
    """Which machine it is on: host name, identity, system and processor; where py-spy is, if it is there."""

    host: str
    machine: str
    platform: str
    py_spy: str | None


class Facts(Message, kind="facts"):
    """The first facts of the command's collect module."""

    facts: dict[str, Any]


class Alive(Message, kind="alive"):
    """It is still there."""


class More(Message, kind="more"):
    """A piece of the requested facts."""

    facts: dict[str, Any]


class MoreEnd(Message, kind="more-end"):
    """That was all of it."""


class Logs(Message, kind="logs"):
    """Where the ranks' output is kept, or why it cannot be."""

    folder: str | None
    error: str


class Listening(Message, kind="listening"):
    """It listens on the rendezvous port; or who has it: {"error", "listening", "pid", "command", "answer"}."""

    port: int
    taken: dict[str, Any] | None


class RankStarted(Message, kind="started"):
    """A rank runs."""

    rank: int
    pid: int


class RankEvent(Message, kind="event"):
    """A rank took a step, see distdiag/agent/rank_progress.py."""

    rank: int
    stage: str
    at: int
    note: str
    waiting: bool
    elapsed_s: float
    payload: Mapping[str, Any]


class RankInspected(Message, kind="inspected"):
    """A silent rank was inspected: its state in proc(5), the stack of its main thread, and its work since the mark."""

    rank: int
    state: str
    wait_channel: str
    frames: Sequence[str]
    stack_error: str
    tail: str
    busy: float = 0.0
    read_bytes: int = 0
    stuck: Sequence[Mapping[str, Any]] = ()


class InspectionDone(Message, kind="inspection-done"):
    """All silent ranks were inspected."""


class RankEnded(Message, kind="ended"):
    """A rank ended: exit status, negative for a signal, and the end of what it printed."""

    rank: int
    status: int | None
    elapsed_s: float
    tail: str
    oom_kills: int


class ToolTaken(Message, kind="tool"):
    """A program arrived, or why it cannot be used."""

    name: str
    error: str


class ReachListening(Message, kind="reach-listening"):
    """It listens; `failed`: requested ports that are not available, and why. With this node's network."""

    port: int
    samples: list[int]
    failed: dict[str, str]
    network: dict[str, Any]


class ReachServing(Message, kind="reach-serving"):
    """It answers."""


class ReachProbe(Message, kind="reach-probe"):
    """A target was probed."""

    probe: dict[str, Any]


class ReachName(Message, kind="reach-name"):
    """What a name resolves to there."""

    name: str
    addresses: Sequence[str]
    error: str


class ReachEnded(Message, kind="reach-ended"):
    """It does not answer any more."""
