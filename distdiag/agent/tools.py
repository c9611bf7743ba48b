"""Receives programs that this node lacks from the parent."""

from __future__ import annotations

from distdiag.agent.protocol import ToolTaken
from distdiag.facts import carried_tools

TYPE_CHECKING = False
if TYPE_CHECKING:
    from distdiag.agent.protocol import SendTool
    from distdiag.agent.wire import Writer


class Tools:
    """Receives tools in pieces small enough for an order."""

    def __init__(self, wire: Writer) -> None:
        self._wire = wire
        self._pieces: dict[str, list[str]] = {}

    def take(self, order: SendTool) -> None:
        """Keep one piece; after the last, report success or the error."""
        self._pieces.setdefault(order.name, []).append(order.piece)
        if order.last:
            import zlib

            why = ""
            try:
                carried_tools.keep(order.name, "".join(self._pieces.pop(order.name)))
            except (OSError, ValueError, AttributeError, zlib.error) as error:  # AttributeError: no memfd here
                why = str(error)
            self._wire.send(ToolTaken(name=order.name, error=why))
