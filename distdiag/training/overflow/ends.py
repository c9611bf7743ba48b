"""The least and the greatest numbers of many tensors, while nobody waits for them yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from distdiag.training.overflow import numbers

if TYPE_CHECKING:
    from torch import Tensor

    from distdiag.training.overflow.frames import Reading

_PAIRS = 256


class Ends:
    """Reads tensors on their devices, and fetches all that was read at once.

    What is read is written side by side where it is fetched from: nothing is allocated for it, nor put together.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[torch.dtype, torch.device], _Room] = {}
        self._room: _Room | None = None

    def start(self, tensor: Tensor) -> tuple[Tensor, list[Reading]] | str:
        """Begin to read a tensor: gives its numbers, and where to put who wants to know; or why it cannot be read."""
        try:
            found = tensor if numbers.is_plain(tensor) else numbers.readable(tensor)
            if isinstance(found, str):
                return found
            room = self._room
            if room is None or room.dtype is not found.dtype or room.device != found.device:
                room = self._room = self._room_for(found)
            waiting = room.waiting
            if len(waiting) == len(room.pairs):
                room.grow()
            torch.aminmax(found, out=room.pairs[len(waiting)])
        except (RuntimeError, TypeError, ValueError):  # a dtype or a subclass of tomorrow
            return "unread"
        return found, waiting

    def fetch(self) -> tuple[list[float], list[Reading]]:
        """Wait for what was begun, once for each device: all numbers, and the readings, which have them as well now."""
        values: list[float] = []
        done: list[Reading] = []
        for device in {room.device for room in self._rooms.values() if room.waiting}:
            rooms = [room for room in self._rooms.values() if room.waiting and room.device == device]
            fetched = _together([room.written() for room in rooms]).tolist()
            readings = [one for room in rooms for one in room.waiting]
            for reading, least, greatest in zip(readings, fetched[::2], fetched[1::2]):
                reading.least, reading.greatest = least, greatest
            values, done = values + fetched, done + readings
        self.forget()
        return values, done

    def forget(self) -> None:
        """Nobody wants to know any more."""
        for room in self._rooms.values():
            room.waiting = []

    def _room_for(self, tensor: Tensor) -> _Room:
        kind = (tensor.dtype, tensor.device)
        if kind not in self._rooms:
            self._rooms[kind] = _Room(*kind)
        return self._rooms[kind]


class _Room:
    """Numbers of one dtype on one device, in pairs; `waiting`: who wants to know the first of them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.waiting: list[Reading] = []
        self._all = self._make(_PAIRS)

    def grow(self) -> None:
        """Make room for as many again."""
        before = self.written()
        self._all = self._make(2 * len(self.pairs))
        self._all[: len(before)] = before

    def written(self) -> Tensor:
        """Give what was read so far."""
        return self._all[: 2 * len(self.waiting)]

    def _make(self, pairs: int) -> Tensor:
        with torch.inference_mode(mode=False):  # a tensor of that mode could not be written to outside of it
            room = torch.empty(2 * pairs, dtype=self.dtype, device=self.device)
            self.pairs = [(room[at], room[at + 1]) for at in range(0, 2 * pairs, 2)]
        return room


def _together(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.to(numbers.widest(part.device)) for part in parts])
