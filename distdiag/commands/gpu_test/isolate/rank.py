"""The program of every rank of `gpu-test --isolate`: rounds of pairs, each pair in a separate process group.

A group of all ranks is avoided: one dead link would prevent its creation. The ranks communicate through torch's store.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta

from distdiag.commands.gpu_test import compute
from distdiag.commands.gpu_test.isolate.coordinator import Coordinator
from distdiag.facts import machine
from distdiag.launch.rank import Pauses, first_lines, load_torch, run_rank
from distdiag.launch.rank import Rank as AnyRank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

    from distdiag.launch.rank import Config

_PERIOD = 2039
"""As in gpu-test: rank a of a pair sends i mod this, and rank b adds 1: integers, exact in float32."""
_DELAYED = 1 / 3
"""Share of a measurement that threads of a rank waited for a core, all threads together. On two cores with 8 busy
programs it is 0.8 to 1.6 in samples of good pairs that look slow, and 0.03 to 0.05 where one end is late."""


def main(config: Config) -> None:
    """Run the stages of one rank, then exit."""
    run_rank(config, Rank)


class Rank(AnyRank):
    """One rank, measuring its pairs."""

    def import_torch(self) -> None:
        """Import torch, with blocking waits."""
        # With this a slow NCCL collective raises here, instead of the watchdog aborting the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        load_torch(sys.modules[__name__], compute)

    def join_group(self, patience: timedelta) -> None:
        """Skip the group of all ranks: each pair creates its own."""
        self.progress.step("store ready")

    def work(self) -> None:
        """Compute, then measure pairs in rounds planned by rank 0; ranks that compute badly are excluded."""
        left_out: set[int] = set()
        if self.config["compute_s"]:
            self.enter("compute", "preparing matrices")
            stage = compute.Compute(self, self.config["compute_s"])
            self.progress.step("computed", computed=asdict(stage.run()))
            left_out = stage.bad
        self.enter("pairs", "allocating the buffer")
        count = self.config["size_bytes"] // 4
        tile = torch.arange(_PERIOD, dtype=torch.float32, device=self.device)
        self.pattern = tile.repeat(count // _PERIOD + 1)[:count]
        self.due = 2 * self.pattern + 1
        self.buffer = torch.empty_like(self.pattern)
        pauses = Pauses()
        pauses.start()
        pauses.begin()
        if self.rank == 0:
            self.lead(left_out)
        else:
            self.follow()
        self.progress.step("pairs measured", paused=pauses.since_begin())

    def lead(self, left_out: set[int]) -> None:
        """On rank 0: plan each round, take part in it, and report its results."""
        nodes, at_once, patience_s = (self.config[name] for name in ("nodes", "at_once", "patience_s"))
        coordinator = Coordinator(nodes, at_once, patience_s, self.config["pause_s"], left_out)
        number = -1  # of the last round: bad ranks may leave no pair at all
        for number, (words, pairs) in enumerate(coordinator.plan()):
            timeout_s = coordinator.patience_s()
            self.store.set(f"round/{number}", json.dumps([words, pairs, timeout_s]))
            self.take_part(number, words, pairs, timeout_s)
            self.progress.step(f"waiting for the ranks of {words}", waiting=True)
            for pair in pairs:  # rank 0 waits for both ends
                *result, delayed = json.loads(self.store.get(f"result/{number}/{pair[0]}"))
                coordinator.note(pair, *result, delayed=delayed)
                self.store.get(f"result/{number}/{pair[1]}")
            self.progress.step(f"{words} done", pairs=coordinator.all_results())
        self.store.set(f"round/{number + 1}", json.dumps(None))
        self.progress.step("all pairs measured", pairs=coordinator.all_results())

    def follow(self) -> None:
        """On other ranks: follow the plan of rank 0."""
        number = 0
        while True:
            self.progress.step("waiting for rank 0", waiting=True)
            plan = json.loads(self.store.get(f"round/{number}"))
            if plan is None:
                return
            self.take_part(number, *plan)
            self.progress.step(f"{plan[0]} done")
            number += 1

    def take_part(self, number: int, words: str, pairs: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Measure this rank's pair in the round, if any; both ranks report the result."""
        mine = next((pair for pair in pairs if self.rank in pair), None)
        self.progress.step(f"{words}: {'idle' if mine is None else f'ranks {mine[0]} and {mine[1]}'}")
        if mine is not None:
            result = self.measure_safely(number, (mine[0], mine[1]), timeout_s)
            self.store.set(f"result/{number}/{self.rank}", json.dumps(result))
            # Only now, as it takes as long as the measurement and would delay the other pairs.
            if dist.is_initialized():
                dist.destroy_process_group()

    def measure_safely(
        self, number: int, pair: tuple[int, int], timeout_s: float
    ) -> tuple[float, int, str, float, bool]:
        """Measure a pair: see `Coordinator.note`. An error is a result, too."""
        began = time.monotonic()
        try:
            bytes_per_s, wrong, delayed = self.measure(number, pair, timeout_s)
        except (RuntimeError, ValueError, OSError) as error:
            return 0.0, 0, first_lines(error), 0.0, False
        return bytes_per_s, wrong, "", time.monotonic() - began, delayed

    def measure(self, number: int, pair: tuple[int, int], timeout_s: float) -> tuple[float, int, bool]:
        """All-reduce between two ranks.

        Returns the second best time's bandwidth, the number of wrong elements, and whether a rank lacked a core.
        """
        a, b = pair
        dist.init_process_group(
            self.config["backend"],
            store=dist.PrefixStore(f"pair/{number}/{a}-{b}", self.store),
            rank=int(self.rank == b),
            world_size=2,
            timeout=timedelta(seconds=timeout_s),
        )
        fault = self.config["fault"] or {}
        is_hit = [a, b] in fault.get("pairs", ())
        if is_hit and not fault["lag_s"] and self.rank == b:
            time.sleep(timeout_s)
            raise RuntimeError("--inject keeps this rank from answering in this pair")
        wrong = self.check(b)
        self.buffer.zero_()
        lag_s = fault["lag_s"] if is_hit and self.rank in fault["ranks"] else 0.0
        taken = []
        waited_s = machine.waited_for_cores_s()
        for _ in range(self.config["iterations"]):
            begin = time.perf_counter()
            time.sleep(lag_s)
            dist.all_reduce(self.buffer)
            self.synchronize()
            taken.append(time.perf_counter() - begin)
        waited_s = machine.waited_for_cores_s() - waited_s
        both = torch.tensor([waited_s, *taken], dtype=torch.float64, device=self.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        waited_s, *times = both.tolist()
        # Two ranks: busbw is algbw, the factor 2(n - 1)/n of nccl-tests is 1.
        # The second best time tolerates occasional other load on the machine.
        best = sorted(times)[min(1, len(times) - 1)]
        return self.buffer.numel() * self.buffer.element_size() / best, wrong, waited_s > _DELAYED * sum(times)

    def check(self, b: int) -> int:
        """All-reduce a pattern and count the wrong elements on both ranks."""
        self.buffer.copy_(self.pattern)
        if self.rank == b:
            self.buffer += 1
        dist.all_reduce(self.buffer)
        self.synchronize()
        wrong = (self.buffer != self.due).sum().to(torch.float32).reshape(1)
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        return int(wrong.item())

    def done(self) -> None:
        """Wait for the other ranks in the store: rank 0 serves it and exits last."""
        self.enter("done", "finishing")
        self.store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self.progress.step("waiting for the others to finish", waiting=True)
            self.store.wait([f"left/{rank}" for rank in range(self.world_size)])
