"""What gpu-test sends and how it reads the sum: exact, by position and by source rank."""

from __future__ import annotations

import pytest
import torch
from loops import each

from distdiag.commands.gpu_test import rank as gpu_test_rank
from distdiag.commands.gpu_test.rank import MARK, PERIOD, expected_tile, explain, pattern, wrong_elements
from distdiag.launch.rank import load_torch

CPU = torch.device("cpu")
WORLD = 4
COUNT = 3 * PERIOD + 17


@pytest.fixture(autouse=True)
def loaded_torch() -> None:
    load_torch(gpu_test_rank)


def summed(ranks: list[int], count: int = COUNT, world_size: int = WORLD) -> torch.Tensor:
    total = torch.zeros(count)
    for rank in ranks:
        total += pattern(count, rank, world_size, torch.float32, CPU)
    return total


def wrong_in(result: torch.Tensor) -> list[int]:
    found: list[int] = wrong_elements(result, expected_tile(WORLD, torch.float32, CPU)).tolist()
    return found


@each("count", [1, 5, PERIOD - 1, PERIOD, PERIOD * 300 + 3])
def test_the_right_sum_has_no_wrong_element(count: int) -> None:
    assert wrong_in(summed([0, 1, 2, 3], count)) == []


def test_sums_stay_exact_with_thousands_of_ranks() -> None:
    assert 4096 * (PERIOD - 1) + MARK < 2**24


@pytest.mark.parametrize("index", [0, 1, PERIOD, COUNT - 1])
def test_one_changed_element_is_found_wherever_it_is(index: int) -> None:
    result = summed([0, 1, 2, 3])
    result[index] += 1
    assert wrong_in(result) == [index]


@pytest.mark.parametrize("absent", range(WORLD))
def test_a_missing_contribution_names_its_rank(absent: int) -> None:
    result = summed([rank for rank in range(WORLD) if rank != absent])
    sent = pattern(COUNT, 0, WORLD, torch.float32, CPU)
    wrong = wrong_elements(result, expected_tile(WORLD, torch.float32, CPU))
    assert explain(result, sent, wrong, WORLD) == f"the contribution of rank {absent} is missing"


def test_a_contribution_counted_twice_names_its_rank() -> None:
    result = summed([0, 1, 2, 2, 3])
    sent = pattern(COUNT, 0, WORLD, torch.float32, CPU)
    wrong = wrong_elements(result, expected_tile(WORLD, torch.float32, CPU))
    assert explain(result, sent, wrong, WORLD) == "the contribution of rank 2 was counted twice"


def test_a_buffer_that_was_not_reduced_is_told() -> None:
    sent = pattern(COUNT, 1, WORLD, torch.float32, CPU)
    wrong = wrong_elements(sent, expected_tile(WORLD, torch.float32, CPU))
    assert explain(sent, sent, wrong, WORLD).startswith("nothing was summed")


def test_a_chunk_at_another_place_is_wrong_everywhere() -> None:
    moved = summed([0, 1, 2, 3], 2**16).roll(1024)
    assert len(wrong_in(moved)) == 2**16
