"""Messages between the parent and its agents, one JSON line each: {"kind": ..., the fields of its class}.

Orders are sent to an agent, replies by it. Neither side trusts the other: the parent validates each reply
(distdiag/cluster/records.py, by the annotations here), and an agent ignores unknown kinds of orders. Not
dataclasses: importing these takes a tenth of an agent's start.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, dataclass_transform

    from distdiag.agent.tcp_probe import ProbeResult
    from distdiag.facts.network.interfaces import Network
else:

    def dataclass_transform(**_):  # noqa: ANN003, ANN201 - only for type checkers
        """Return a decorator without effect."""
        return lambda cls: cls


@dataclass_transform(kw_only_default=True)
class Fields:
    """A record; the receiver fills in the default of an omitted field."""

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401 - type checkers see the fields of each class
        vars(self).update(fields)


class Message(Fields):
    """A message."""

    kind = ""

    def __init_subclass__(cls, *, kind: str) -> None:
        cls.kind = kind

    def to_json(self) -> bytes:
        """Return the message as a line, without the newline."""
        # Names of files and processes may not be valid UTF-8; Python's surrogates for such bytes become question marks.
        fields = {"kind": self.kind, **vars(self)}
        return json.dumps(fields, ensure_ascii=False, default=vars).encode("utf-8", "replace")


# Orders.


class Collect(Message, kind="collect"):
    """Call `more` of the module that collected the facts with `ask`, an instance of the type that it declares."""

    ask: object


class KeepLogs(Message, kind="keep-logs"):
    """Keep each rank's output in files."""


class Listen(Message, kind="listen"):
    """Listen on the rendezvous port for rank 0; 0: any free port."""

    port: int


class StartRank(Message, kind="start"):
    """Start a rank: `main(config)` of the module `entry`, with these variables.

    `forked`: None for a rank in a process of its own; else {"modules", "stage", "note"}: modules to import once for all
    ranks, and the progress to report meanwhile.
    """

    rank: int
    env: dict[str, str]
    entry: str
    config: Mapping[str, object]
    forked: Mapping[str, Any] | None


class Mark(Message, kind="mark"):
    """Record the ranks' work so far, as the baseline of the next inspection."""


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
    """Listen for the other nodes' probes: on an ephemeral port, as ranks do, on `more` others, and on these ports."""

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
    """Parse an order; None for an unknown kind, from a newer parent. Raises ValueError."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("an order is an object")
    order = _ORDERS.get(fields.pop("kind", None))
    return None if order is None else order(**fields)


# Replies.


class Ready(Message, kind="ready"):
    """Python runs and waits for the payload."""


class NoPython(Message, kind="no-python"):
    """No usable Python was found."""

    tried: str


class Hello(Message, kind="hello"):
    """The machine: host name, identity, system and processor; the path of py-spy, if found. Empty until received."""

    host: str = ""
    machine: str = ""
    platform: str = ""
    py_spy: str | None = None


class Facts(Message, kind="facts"):
    """The first facts of the command's collect module."""

    facts: object


class Alive(Message, kind="alive"):
    """A keep-alive."""


class More(Message, kind="more"):
    """A piece of the requested facts."""

    facts: object


class MoreEnd(Message, kind="more-end"):
    """End of the requested facts."""


class Logs(Message, kind="logs"):
    """The folder of the ranks' output, or the reason why it cannot be kept."""

    folder: str | None
    error: str


class Listening(Message, kind="listening"):
    """The rendezvous port. `error`: why it is unavailable; then its owner, and the owner's answer to a stranger."""

    port: int
    error: str = ""
    listening: bool | None = None
    pid: int | None = None
    command: str = ""
    answer: str | None = None


class RankStarted(Message, kind="started"):
    """A rank runs."""

    rank: int
    pid: int


class RankEvent(Message, kind="event"):
    """A step of a rank, see distdiag/agent/rank_progress.py."""

    rank: int
    stage: str
    at: int
    note: str
    waiting: bool
    elapsed_s: float
    payload: Mapping[str, Any]


class RankInspected(Message, kind="inspected"):
    """State in proc(5) of a silent rank, the stack of its main thread, and its work since the mark."""

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
    """The end of an inspection."""


class RankEnded(Message, kind="ended"):
    """Exit status of a rank (negative for a signal), and the end of its output."""

    rank: int
    status: int | None
    elapsed_s: float
    tail: str
    oom_kills: int


class ToolTaken(Message, kind="tool"):
    """A program arrived, or the reason why it cannot be used."""

    name: str
    error: str


class ReachListening(Message, kind="reach-listening"):
    """The ports listened on, `failed` (port -> error) for the requested others, and this node's network."""

    port: int
    samples: list[int]
    failed: dict[str, str]
    network: Network


class ReachServing(Message, kind="reach-serving"):
    """Probes are answered from now on."""


class ReachProbe(Message, kind="reach-probe"):
    """The result of one target."""

    probe: ProbeResult


class ReachName(Message, kind="reach-name"):
    """The addresses of a name, resolved on that node."""

    name: str
    addresses: tuple[str, ...]
    error: str


class ReachEnded(Message, kind="reach-ended"):
    """Probes are no longer answered."""
