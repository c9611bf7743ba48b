"""The least and greatest numbers of many tensors, written side by side and fetched at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distdiag.training.overflow.extrema import ExtremaReader
from distdiag.training.overflow.recorder import Reading


def read(reader: ExtremaReader, tensor: Tensor) -> Reading:
    found = reader.start(tensor)
    assert not isinstance(found, str)
    reading = Reading(tensor, found[0], 0)
    found[1].append(reading)
    return reading


def test_more_tensors_than_there_was_room_for_of_several_dtypes_in_turn() -> None:
    reader = ExtremaReader()
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    readings = []
    for number in range(1200):
        tensor = torch.tensor([[number % 200, 1.0], [0.0, 1.0]]).to(dtypes[number % 6 if number % 2 else 0])
        readings.append((number, read(reader, tensor)))
    values, done = reader.fetch()
    assert len(values) == 2 * len(done) == 2400
    for number, reading in readings:
        most = number % 200 if reading.dtype is not torch.bool else 1
        assert (reading.least, reading.greatest) == (0.0, max(1.0, most)), (number, reading.dtype)
    assert reader.fetch() == ([], [])


def test_what_is_not_finite_and_what_does_not_lie_in_order() -> None:
    reader = ExtremaReader()
    nan = read(reader, torch.tensor([1.0, math.nan, math.inf]))
    inf = read(reader, torch.tensor([1.0, -math.inf], dtype=torch.float16))
    turned = read(reader, torch.arange(6.0).view(2, 3).t()[1:])
    reader.fetch()
    assert math.isnan(nan.least)
    assert math.isnan(nan.greatest)
    assert (inf.least, inf.greatest) == (-math.inf, 1.0)
    assert (turned.least, turned.greatest) == (1.0, 5.0)
    assert reader.start(torch.empty(0)) == "empty"
    assert reader.start(torch.empty(3, device="meta")) == "meta"


@pytest.mark.parametrize("first", [True, False])
def test_room_that_was_made_in_inference_mode_is_used_outside_of_it(first: bool) -> None:
    reader = ExtremaReader()
    for mode in (first, not first):
        with torch.inference_mode(mode=mode), torch.no_grad():
            reading = read(reader, torch.tensor([2.0, 5.0]))
            reader.fetch()
        assert (reading.least, reading.greatest) == (2.0, 5.0)


def test_nobody_is_told_what_was_forgotten() -> None:
    reader = ExtremaReader()
    forgotten = read(reader, torch.tensor([1.0]))
    reader.forget()
    kept = read(reader, torch.tensor([7.0]))
    reader.fetch()
    assert math.isnan(forgotten.greatest)
    assert kept.greatest == 7.0
