"""distdiag on one node: tells the facts, runs the ranks it is told to run, and leaves nothing behind.

Records go out on stdout, orders come in as JSON lines on stdin. When stdin ends (the parent finished, was killed, or
the connection was cut) every rank is killed and the agent ends, with status 0 whatever it found.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import select
import signal
import sys

from distdiag.node import boot, run
from distdiag.node.ranks import Ranks
from distdiag.node.wire import Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

_POLL_S = 0.03
"""How late the end of a rank may be noticed; its events wake us at once."""


def main(config: dict[str, Any]) -> None:
    """Run the agent: {"collect": module with a facts(ask), "ask": what it is asked}."""
    run.name_process("distdiag-agent")
    wire = Writer.take_stdout()
    ranks = Ranks(wire, boot.carried)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        facts = importlib.import_module(config["collect"]).facts(config["ask"])
        wire.send("facts", facts=dataclasses.asdict(facts))
        _serve(ranks)
    except BrokenPipeError:
        pass  # the parent is gone: the same as the end of stdin
    finally:
        ranks.end()


def _serve(ranks: Ranks) -> None:
    orders = b""
    while True:
        ready, _, _ = select.select([0, *ranks.descriptors()], [], [], _POLL_S if ranks.running else None)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, orders = (orders + data).split(b"\n")
            for line in lines:
                _obey(ranks, json.loads(line))
        ranks.poll()


def _obey(ranks: Ranks, order: dict[str, Any]) -> None:
    if order["do"] == "listen":
        ranks.listen(order)
    elif order["do"] == "keep-logs":
        ranks.keep_logs()
    elif order["do"] == "start":
        ranks.start(order)
    elif order["do"] == "inspect":
        ranks.inspect(order)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(0)
