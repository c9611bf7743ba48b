"""Gradients that ranks sum in 16 bits are noted once, on real Gloo ranks; sums in float32 are silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs import Job

if TYPE_CHECKING:
    from pathlib import Path

NOTED = {
    "bfloat16": "step 0: DistributedDataParallel sums 4 gradients over 2 ranks in bfloat16",
    "compressed": "step 0: fp16_compress_hook of DistributedDataParallel sums 4 gradients over 2 ranks in float16",
    "shard-bfloat16": "step 0: fully_shard sums 4 gradients over 2 ranks in bfloat16",
}
SILENT = ("autocast", "float32", "shard-float32")


def test_a_reduction_in_16_bits_is_noted_once(tmp_path: Path) -> None:
    job = Job("reduces_in_16_bits", 2)
    job._argv += [str(tmp_path), *NOTED, *SILENT]
    with job:
        codes = [process.wait(200) for process in job.processes]
        assert codes == [0, 0], "".join(path.read_text() for path in sorted(job.folder.glob("stderr-*")))
    for rank in (0, 1):
        for case, says in NOTED.items():
            lines = (tmp_path / f"{case}-{rank}").read_text().splitlines()
            assert [line.partition(": small")[0] for line in lines] == [says], case
        for case in SILENT:
            assert (tmp_path / f"{case}-{rank}").read_text() == "", case
