"""Programs that a node may lack and that can travel there. They live in memory: nothing is left, however we end."""

from __future__ import annotations

import os
import sys

from distdiag.node.protocol import ToolTaken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.node.protocol import SendTool
    from distdiag.node.wire import Writer

_brought: dict[str, str] = {}


def find(name: str) -> str | None:
    """Find a tool: beside this Python, on PATH, or brought along."""
    for folder in (os.path.dirname(sys.executable), *os.get_exec_path()):
        path = os.path.join(folder, name)
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return _brought.get(name)


class Tools:
    """Takes tools that the parent sends, in pieces that fit into an order."""

    def __init__(self, wire: Writer) -> None:
        self._wire = wire
        self._pieces: dict[str, list[str]] = {}

    def take(self, order: SendTool) -> None:
        """Keep one piece; after the last one report how it went."""
        self._pieces.setdefault(order.name, []).append(order.piece)
        if order.last:
            import zlib

            why = ""
            try:
                _brought[order.name] = _keep(order.name, "".join(self._pieces.pop(order.name)))
            except (OSError, ValueError, AttributeError, zlib.error) as error:  # AttributeError: no memfd here
                why = str(error)
            self._wire.send(ToolTaken(name=order.name, error=why))


def _keep(name: str, text: str) -> str:
    import base64
    import zlib

    data = zlib.decompress(base64.b64decode(text))
    fd = os.memfd_create(name)
    while data:
        data = data[os.write(fd, data) :]
    return f"/proc/{os.getpid()}/fd/{fd}"
