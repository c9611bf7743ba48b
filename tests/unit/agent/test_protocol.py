"""Messages between the parent and its agents: every kind once, and the same fields on both sides."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest
from loops import each

from distdiag.agent import protocol
from distdiag.agent.protocol import Message
from distdiag.cluster import checked_json, records

if TYPE_CHECKING:
    import msgspec

MESSAGES = Message.__subclasses__()
ORDERS = list(protocol._ORDERS.values())
REPLIES = [message for message in MESSAGES if message not in ORDERS]
VALIDATED: dict[str, type[msgspec.Struct]] = {
    reply.__name__: reply for reply in (*get_args(records._Detailed), *records._REPLIES)
}


def test_each_reply_has_one_type_that_validates_it() -> None:
    assert {reply.__name__ for reply in REPLIES} == VALIDATED.keys()


@each("reply", REPLIES)
def test_what_is_sent_is_what_is_validated(reply: type[Message]) -> None:
    validated = VALIDATED[reply.__name__]
    assert set(reply.__annotations__) == set(validated.__struct_fields__)
    assert validated.__struct_config__.tag == reply.kind


@pytest.mark.parametrize("messages", [ORDERS, REPLIES], ids=["orders", "replies"])
def test_a_kind_means_one_message(messages: list[type[Message]]) -> None:
    assert len({message.kind for message in messages}) == len(messages)


@each("order", ORDERS)
def test_an_order_arrives_as_it_was_sent(order: type[Message]) -> None:
    fields = {name: [number] for number, name in enumerate(order.__annotations__)}
    arrived = protocol.read_order(order(**fields).to_json())
    assert type(arrived) is order
    assert vars(arrived) == fields


def test_a_plain_reply_arrives_as_it_was_sent_or_is_refused() -> None:
    found = records.read_record(protocol.ReachName(name="n1", addresses=("10.0.0.1",), error="").to_json())
    assert isinstance(found, protocol.ReachName)
    assert vars(found) == {"name": "n1", "addresses": ("10.0.0.1",), "error": ""}
    for invalid in (b'{"kind":"started","rank":1}', b'{"kind":"started","rank":-1,"pid":1}', b'{"kind":"logs"}'):
        with pytest.raises(checked_json.InvalidData):
            records.read_record(invalid)


@each(
    "name, value",
    [
        ("rdma_bits_per_s", 8 * 400 * 10**9),  # eight ports of a DGX H100
        ("speed_bits_per_s", 800 * 10**9),
        ("busbw_bytes_per_s", 9e11),  # NVLink 5
        ("created_ns", 1_800_000_000 * 10**9),  # since the epoch
        ("takes_s", 1e12),
        ("pid", 2**40),
    ],
)
def test_only_impossible_numbers_are_refused(name: str, value: float) -> None:
    if name in ("takes_s", "pid"):
        with pytest.raises(ValueError, match=f"{name} is out of range"):
            checked_json.check({name: [value]})
    else:
        checked_json.check({name: [value]})


def test_an_order_of_a_newer_parent_is_none() -> None:
    assert protocol.read_order(b'{"kind": "dance", "partner": 1}') is None


@each("line", [b"[1]", b"null", b"{", b"\xff", b'{"kind": "leave"} {}'])
def test_what_is_no_order_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        protocol.read_order(line)


def test_a_field_that_is_left_out_has_its_default_on_the_other_side() -> None:
    order = protocol.read_order(protocol.ReachListen(more=2).to_json())
    assert isinstance(order, protocol.ReachListen)
    assert (order.more, tuple(order.ports)) == (2, ())


def test_what_is_no_utf8_is_a_question_mark() -> None:
    assert protocol.ToolTaken(name="a\udcffb", error="").to_json() == b'{"kind": "tool", "name": "a?b", "error": ""}'
