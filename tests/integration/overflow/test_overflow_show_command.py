"""overflow show on what the real detector keeps, and on files that are damaged or none of ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from json_schema import check
from support import PROGRAM, unread, wait_until
from support_warm import distdiag

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from torch import Tensor, nn

from distdiag.commands.overflow.show.diagnose import examine
from distdiag.commands.overflow.show.forwards import Request
from distdiag.commands.overflow.show.recording import LIMITS
from distdiag.errors import UsageError
from distdiag.training.overflow.detector import DebugUnderflowOverflow
from distdiag.training.overflow.report import SCHEMA, OverflowDetected

if TYPE_CHECKING:
    from distdiag.commands.overflow.show.diagnose import OverflowShow
    from distdiag.report import Report


class FeedForward(nn.Module):
    """Multiplies by `scale` between its modules, as attention does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(size, 4 * size, bias=False), nn.Linear(4 * size, size, bias=False)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.wo(torch.relu(self.wi(x)) * self.scale)
        return hidden


class Block(nn.Module):
    """A norm, a feed-forward and a residual."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.ff = nn.LayerNorm(size), FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        given: Tensor = x + self.ff(self.norm(x))
        return given


class Small(nn.Module):
    """An embedding, blocks and a head, in float16."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, 32)
        self.block = nn.ModuleList([Block(32) for _ in range(blocks)])
        self.head = nn.Linear(32, 64)
        self.half()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.emb(ids)
        for block in self.block:
            x = block(x)
        return {"logits": self.head(x)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """near.jsonl: batches 0 and 2, of which the second grows; found.jsonl: inf in batch 1, before which it grew."""
    folder = tmp_path_factory.mktemp("frames")
    torch.manual_seed(0)
    small = Small(6)
    ids = torch.randint(0, 64, (2, 8))
    feed = small.block[3].ff
    assert isinstance(feed, FeedForward)
    with DebugUnderflowOverflow(small, save=str(folder / "near.jsonl"), trace_batch_nums=[0, 2]):
        small(ids)
        small(ids)
        feed.scale = 30000.0
        small(ids)
    with DebugUnderflowOverflow(small, save=str(folder / "found.jsonl"), trace_batch_nums=[0]):
        feed.scale = 1.0
        small(ids)
        feed.scale = 1e6
        with pytest.raises(OverflowDetected):
            small(ids)
    return folder


def checked(request: Request) -> Report[OverflowShow]:
    return examine(request, lambda _: None)


def test_the_limits_are_those_of_torch() -> None:
    assert {name: torch.finfo(getattr(torch, name)).max for name in LIMITS} == LIMITS


def test_a_traced_batch_in_which_something_is_found_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "frames.jsonl"
    model = Small(1)
    model.head.weight.data.fill_(60000)
    with DebugUnderflowOverflow(model, save=str(path), trace_batch_nums=[0]), pytest.raises(OverflowDetected):
        model(torch.randint(0, 64, (2, 8)))
    report = checked(Request(paths=(str(path),)))
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines() if '"kind": "frame"' in line]
    assert numbers == list(range(len(numbers)))
    assert [one.module for one in report.data.detections] == ["head"]


def test_growth_near_the_limit_is_found(folder: Path) -> None:
    result = distdiag("overflow", "show", "--json", str(folder / "near.jsonl"))
    report = check(result.out, 0)
    assert (result.code, report["verdict"], report["command"]) == (0, "warn", "overflow show")
    (read,) = report["data"]["files"]
    assert (read["batches"], read["frames"], read["model"], read["truncated"]) == ([0, 2], 66, "Small", False)
    (grown,) = [one for one in report["data"]["growth"] if one["of"]["batch"] == 2]
    ends = [(one["module"], one["tensor"]) for one in (grown["through"][0], grown["through"][-1])]
    assert ends == [("block.3.norm", "output"), ("block.3.ff.wo", "input")]
    assert grown["factor"] > 1000
    assert {one["id"]: one["level"] for one in report["findings"]} == {
        "overflow.near-limit": "warn",
    }
    assert report["summary"].startswith("the input of `block.3.ff.wo` (Linear) reaches ")


def test_people_see_the_answer_first_in_80_columns_without_colour(folder: Path) -> None:
    result = distdiag("overflow", "show", "found.jsonl", wrap=("env", f"--chdir={folder}", "NO_COLOR=1"))
    lines = result.out.splitlines()
    assert result.code == 1
    assert "\x1b" not in result.out
    assert lines[0] == "distdiag overflow show: FAIL"
    assert lines[1].startswith("batch 1 (optimizer step 0): ")
    assert " inf in `input[0]` of `block.3.ff.wo`" in result.out.replace("\n  ", " ")
    assert "FAIL  overflow.detected" in result.out
    assert " overflow show found.jsonl --batch 1 --verbose" in result.out
    assert max(len(one) for one in lines if not one.startswith("    ")) <= 80
    assert "batch 1, module by module:" in result.out


def test_a_pattern_and_a_batch_choose_what_is_shown(folder: Path) -> None:
    words = ("overflow", "show", str(folder / "near.jsonl"), "--json")
    data = distdiag(*words, "--module", "*.wo", "--batch", "2").report["data"]
    assert [one["module"] for one in data["rows"]] == [f"block.{number}.ff.wo" for number in range(6)]
    assert {one["of"]["batch"] for one in data["rows"]} == {2}
    near = words[2]
    assert len(checked(Request(paths=(near,), everything=True)).data.rows) == 66
    with pytest.raises(UsageError) as refused:
        checked(Request(paths=(near,), batches=(1,)))
    assert refused.value.hint == "available: 0, 2"
    with pytest.raises(UsageError) as refused:
        checked(Request(paths=(near,), module="x"))
    assert refused.value.hint.startswith("available: emb, block.0.norm, ")


def test_two_files_and_a_folder_of_them(folder: Path) -> None:
    result = distdiag("overflow", "show", "--json", str(folder))
    data = result.report["data"]
    assert result.code == 1
    assert [Path(one["path"]).name for one in data["files"]] == ["found.jsonl", "near.jsonl"]


def test_files_that_are_cut_off_empty_foreign_or_of_a_later_distdiag(folder: Path, tmp_path: Path) -> None:
    near = (folder / "near.jsonl").read_text()
    for name, text, code, said in (
        ("cut.jsonl", near[: len(near) // 3], 3, "UNKNOWN  overflow.incomplete"),
        ("empty.jsonl", "", 3, "UNKNOWN  overflow.no-frames"),
        ("text.txt", "step 1 loss 0.5\n", 3, "not a frame file"),
        ("later.jsonl", near.replace("frames/1", "frames/2", 1), 3, "hint: upgrade distdiag here"),
    ):
        path = tmp_path / name
        path.write_text(text)
        result = distdiag("overflow", "show", str(path))
        assert (result.code, said in result.out + result.err) == (code, True), name
    with pytest.raises(UsageError) as refused:
        checked(Request(paths=(str(tmp_path / "nowhere.jsonl"),)))
    assert 'save="frames-{rank}.jsonl"' in refused.value.hint
    # What cannot be read does not hide what can, and is not hidden by it.
    both = checked(Request(paths=(str(folder / "near.jsonl"), str(tmp_path / "text.txt"))))
    assert (both.exit_code(), len(both.data.files)) == (3, 1)
    assert {"overflow.near-limit", "overflow.unreadable"} <= {one.id for one in both.findings}


def test_names_cannot_move_the_cursor_nor_be_markup(tmp_path: Path) -> None:
    name = "a[red].\x1b[2J$x$"
    tensor = {"dtype": "float16", "shape": [2], "abs_min": 0.1, "abs_max": 4e4}
    frame = {"kind": "frame", "batch": 0, "module": name, "class": "A"}
    lines = [{"label": "input[0]", "phase": "input", **tensor}, {"label": "output", "phase": "output", **tensor}]
    records = [{"kind": "head", "schema": SCHEMA}, *({**frame, "number": at, "lines": lines} for at in range(2))]
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    result = distdiag("overflow", "show", str(path))
    assert result.code == 0
    assert "a[red].?[2J$x$" in result.out
    assert result.err == ""
    assert "\x1b[2J" not in result.out


def test_a_pipe_is_read_and_ctrl_c_tells_what_is_known(folder: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [PROGRAM, "overflow", "show", "--json", str(pipe)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        with pipe.open("wb") as file:
            file.write((folder / "near.jsonl").read_bytes())
            file.flush()
            wchan = Path(f"/proc/{process.pid}/wchan")
            wait_until(lambda: not unread(file) and "pipe_read" in wchan.read_text(), 20, wchan.read_text)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    report = json.loads(said)
    assert (process.returncode, report["data"]["files"][0]["frames"] >= 60) == (130, True)


def test_the_command_does_not_import_torch(folder: Path) -> None:
    code = (
        "import sys; from distdiag.commands.overflow.show import diagnose, view;"
        "from distdiag.commands.overflow.show.forwards import Request;"
        f"diagnose.examine(Request(paths=({str(folder / 'near.jsonl')!r},)), lambda _: None);"
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
