"""Comparing 10 million numbers, beside torch.testing.assert_close: processor time on one thread, the least of 3."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import torch

from distdiag import floatcmp

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT = 10_000_000


def best(compare: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        began = time.process_time()
        with contextlib.suppress(AssertionError):
            compare()
        times.append(time.process_time() - began)
    return min(times)


def cases() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(COUNT)
    few = torch.where(torch.rand_like(x) < 0.01, x * (1 + 2e-7), x)
    return {
        "identical": (x, x.clone()),
        "1 % differ": (x, few),
        "all differ": (x, x * (1 + 3e-7)),
        "bfloat16, all differ": (x.bfloat16(), (x * 1.01).bfloat16()),
        "float64, all differ": (x.double(), x.double() * (1 + 1e-15)),
        "float32 against float64": (x, x.double() * (1 + 3e-7)),
    }


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    floatcmp(torch.ones(9), torch.ones(9))
    print(f"{'10 million numbers':<25} floatcmp  assert_close(0, 0)")
    for name, (a, b) in cases().items():
        ours = best(lambda a=a, b=b: floatcmp(a, b))  # type: ignore[misc]
        peer = best(lambda a=a, b=b: torch.testing.assert_close(a, b, rtol=0, atol=0, check_dtype=False))  # type: ignore[misc]
        print(f"{name:<25} {ours:6.2f} s  {peer:6.2f} s")


if __name__ == "__main__":
    main()
