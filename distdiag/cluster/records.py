"""Records of an agent (distdiag/agent/protocol.py), validated: here bytes of a node or file become typed facts.

`checked_json` does the same for saved facts, without the import of these types.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypedDict, Union, get_args, get_type_hints

import msgspec  # noqa: TID253 - this module is only imported when there are nodes

from distdiag.agent import protocol
from distdiag.agent.tcp_probe import ProbeResult  # noqa: TC001
from distdiag.cluster.checked_json import check, one_error
from distdiag.facts.gpu.computed import Computed  # noqa: TC001 - msgspec reads the annotations
from distdiag.facts.network.interfaces import Network  # noqa: TC001 - msgspec reads the annotations


class Started(TypedDict, total=False):
    """A rank's report on its torch and device."""

    device: Required[str]
    device_name: str | None
    capability: str | None
    arch_list: list[str]
    free_bytes: int | None
    total_bytes: int | None
    python: str | None
    torch: str | None
    cuda: str | None
    hip: str | None
    nccl: str | None


class TroubleMessage(TypedDict, total=False):
    """A rank's error report; the fields depend on its kind, see distdiag.launch.rank."""

    kind: Required[str]
    message: str
    python: str
    missing: bool
    torch: str | None
    built_for: str | None
    address: str
    port: int
    differing: dict[str, dict[str, list[int]]]
    planned: dict[str, str]
    op: str
    size_bytes: int
    wrong: int
    total: int
    first_index: int
    got: str
    expected: str
    how: str
    own_wrong: int
    own_first_index: int | None
    requested_bytes: int
    got_bytes: int
    chunks: list[int]
    chunk_bytes: int


_DETAILS = {
    "mismatch": {"differing"},
    "wrong-result": {"wrong", "total", "first_index", "got", "expected", "how"},
    "memory-corrupt": {"chunks", "chunk_bytes"},
}
"""The required fields of each kind of trouble."""


class PairMessage(TypedDict):
    """Rank 0's report on two ranks measured together."""

    a: int
    b: int
    level: Literal["node", "net"]
    bandwidths: list[float]
    failed: bool
    wrong: int
    error: str


class PausedMessage(TypedDict):
    """How long a rank did not run, the parts due to a lack of cores and to its CPU quota, and the total time."""

    paused_ns: int
    no_core_ns: int
    throttled_ns: int
    of_ns: Annotated[int, msgspec.Meta(ge=1)]


class RowMessage(TypedDict, total=False):
    """One collective at one size, as timed by a rank."""

    number: Required[int]
    iterations: int
    inside_ns: int
    late_ns: int
    times_ns: list[Annotated[int, msgspec.Meta(ge=1)]]
    wrong: int | None
    skipped: str
    paused: PausedMessage


class Payload(TypedDict, total=False):
    """Facts attached to a step."""

    started: Started
    trouble: TroubleMessage
    fatal: bool
    finished: bool
    held: bool
    memory_bytes: int
    computed: Computed
    pairs: list[PairMessage]
    row: RowMessage
    paused: PausedMessage


class RankEvent(msgspec.Struct, tag=protocol.RankEvent.kind, tag_field="kind", frozen=True, kw_only=True):
    """One step of a rank. `at` counts within the stage; `waiting`: the step needs the other ranks."""

    rank: int
    stage: str
    at: int
    note: str
    waiting: bool
    elapsed_s: float
    payload: Payload = {}

    def __post_init__(self) -> None:
        trouble = self.payload.get("trouble")
        if trouble is not None and (lacking := _DETAILS.get(trouble["kind"], set()) - trouble.keys()):
            raise ValueError(f"a {trouble['kind']} without {', '.join(sorted(lacking))}")
        row = self.payload.get("row", {})
        if ("inside_ns" in row) != ("late_ns" in row):
            raise ValueError("a row with only one of inside_ns and late_ns")
        if trouble is not None and any(len(groups) < 2 for groups in trouble.get("differing", {}).values()):
            raise ValueError("a mismatch without two sides")


class StuckSocket(msgspec.Struct, frozen=True, kw_only=True):
    """A TCP connection with unacknowledged data: remote address ("10.0.0.3:29500"), state, retransmissions."""

    remote: str
    state: str
    retransmits: int
    unanswered_bytes: int


class RankInspected(msgspec.Struct, tag=protocol.RankInspected.kind, tag_field="kind", frozen=True, kw_only=True):
    """A silent rank seen from outside: state letter of proc(5), kernel wait channel, main thread's frames.

    `busy` is the share of the later half of the silence in which its threads ran or waited for a core, above 1 with
    several such threads; `read_bytes` were read in that time.
    """

    rank: int
    state: str
    wait_channel: str
    frames: tuple[str, ...]
    stack_error: str
    tail: str
    busy: float = 0.0
    read_bytes: int = 0
    stuck: tuple[StuckSocket, ...] = ()


class RankEnded(msgspec.Struct, tag=protocol.RankEnded.kind, tag_field="kind", frozen=True, kw_only=True):
    """The end of a rank process: exit status, negative for a signal; `tail` is the end of its output."""

    rank: int
    status: int | None
    elapsed_s: float
    tail: str
    oom_kills: int


class Record(msgspec.Struct, tag_field="kind"):
    """A reply that needs a more exact type than its annotation in protocol.py."""


class Facts(Record, tag=protocol.Facts.kind):
    """The first result of the command's collect module."""

    facts: msgspec.Raw


class More(Record, tag=protocol.More.kind):
    """A piece of the requested facts."""

    facts: msgspec.Raw


class ReachListening(Record, tag=protocol.ReachListening.kind):
    """It listens for the others' probes; `failed`: requested ports it could not bind, and why."""

    port: int
    samples: Annotated[list[int], msgspec.Meta(min_length=1, max_length=1024)]
    failed: dict[str, str]
    network: Network


class ReachProbe(Record, tag=protocol.ReachProbe.kind):
    """One path was probed."""

    probe: ProbeResult


class Down(msgspec.Struct):
    """The node is lost; its `refusal` has the reason. Created by the fleet only."""


_Detailed = Facts | More | RankEvent | RankInspected | RankEnded | ReachListening | ReachProbe
_Plain = (
    protocol.Ready | protocol.NoPython | protocol.Hello | protocol.Alive | protocol.MoreEnd | protocol.Logs
    | protocol.Listening | protocol.RankStarted | protocol.InspectionDone | protocol.ToolTaken
    | protocol.ReachServing | protocol.ReachName | protocol.ReachEnded
)  # fmt: skip
Said = _Detailed | _Plain


def _validated(reply: type[protocol.Message]) -> type[msgspec.Struct]:
    fields = [(name, type_, getattr(reply, name, msgspec.NODEFAULT)) for name, type_ in get_type_hints(reply).items()]
    return msgspec.defstruct(reply.__name__, fields, tag_field="kind", tag=reply.kind)


_REPLIES = {_validated(reply): reply for reply in get_args(_Plain)}
_DECODER = msgspec.json.Decoder(Union[_Detailed, *_REPLIES])


def read_record(frame: bytes) -> Said:
    """Decode one frame of an agent. Raises InvalidData."""
    with one_error(frame):
        record: Any = _DECODER.decode(frame)
        check(record)
        plain = _REPLIES.get(type(record))
        found: Said = record if plain is None else plain(**msgspec.structs.asdict(record))
        return found
