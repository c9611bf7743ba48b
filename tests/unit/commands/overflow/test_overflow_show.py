"""Where numbers grew, from frames as they are kept; and files that are strange."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from msgspec import structs

from distdiag.commands.overflow.show.diagnose import Selection, diagnose, rows_that_matter
from distdiag.commands.overflow.show.forwards import Request, growth_of
from distdiag.commands.overflow.show.recording import (
    INPUT,
    Call,
    Forward,
    ForwardId,
    Frame,
    Line,
    NotFrames,
    Reader,
    Recording,
    Row,
    call_of,
)
from distdiag.report import Level
from distdiag.training.overflow.report import Detection

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.commands.overflow.show.diagnose import OverflowShow
    from distdiag.report import Report

HIDDEN = (2, 8)
REQUEST = Request(paths=("f.jsonl",))
HEAD = {"kind": "head", "schema": "distdiag-frames/1", "model": "T5", "rank": 1, "host": "node07"}


class Out(NamedTuple):
    """An output, as a file has it."""

    most: float | str | None
    least: float | str | None = 0.01
    dtype: str = "float16"
    text: str = ""
    shape: tuple[int, ...] | None = HIDDEN


def call(number: int, module: str, given: float | None, out: Out | float, *, least: float = 0.01) -> Call:
    out = out if isinstance(out, Out) else Out(out)
    bad = out.most if isinstance(out.most, str) else ""
    size: Any = None if bad else out.most
    made = Line("output", "output", out.dtype, None if out.text else out.shape, None, size, bad, out.text)  # type: ignore[arg-type] # as files have it
    made.abs_min = out.least  # type: ignore[assignment] # as files have it
    went_in = [] if given is None else [Line("input[0]", "input", "float16", HIDDEN, least, given)]
    frame = Frame(0, number, module, module.rpartition(".")[2].title() or "Model", [*went_in, made])
    return call_of(ForwardId("frames.jsonl", 0, 0), frame, [made])


def forward(*calls: Call, batch: int = 0) -> Forward:
    of = ForwardId("frames-0.jsonl", 0, batch)

    def owned(row: Row) -> Row:
        return structs.replace(row, of=of)

    own = (Call(one.number, one.given and owned(one.given), tuple(map(owned, one.rows))) for one in calls)
    return Forward(of, list(own))


def recording(*forwards: Forward, rank: int | None = 0, detections: tuple[Detection, ...] = ()) -> Recording:
    for one in forwards:
        one.id.rank, one.id.path = rank, f"frames-{rank}.jsonl"
    return Recording(
        path=f"frames-{rank}.jsonl",
        model="T5",
        rank=rank,
        host="node07",
        forwards=list(forwards),
        detections=list(detections),
    )


def judged(*recordings: Recording, request: Request = REQUEST) -> Report[OverflowShow]:
    return diagnose(request, recordings, {})


def model(wo: float = 62700.0, *, wi: float = 12.0, norm: float = 1.7) -> list[Call]:
    """Two blocks with a residual; in the second `norm` makes the numbers small, and `wo` great."""
    return [
        call(0, "emb", None, 3.4),
        call(1, "block.0.norm", 3.4, 2.0),
        call(2, "block.0.wo", 2.0, 2.5),
        call(3, "block.0", 3.4, 4.65),
        call(4, "block.1.norm", 4.65, norm),
        call(5, "block.1.wi", norm, wi),
        call(6, "block.1.wo", wi, wo),
        call(7, "block.1", 4.65, wo + 1),
        call(8, "", None, wo + 1),
    ]


def written(folder: Path, *records: object, end: str = "\n") -> str:
    path = folder / "frames.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in records) + end)
    return str(path)


def frame(batch: int, number: int, *lines: dict[str, Any], module: str = "a") -> dict[str, Any]:
    return {"kind": "frame", "batch": batch, "number": number, "module": module, "class": "A", "lines": list(lines)}


def line(phase: str, most: object, dtype: str = "float16", label: str = "") -> dict[str, Any]:
    about = {"dtype": dtype, "shape": [2, 8], "abs_min": 0.5, "abs_max": most}
    return {"label": label or {"input": "input[0]"}.get(phase, phase), "phase": phase, **about}


def read(path: str, most_rows: int = 1000, batches: tuple[int, ...] = ()) -> list[Recording]:
    reader = Reader(lambda _: None, batches, most_rows=most_rows)
    reader.read(path)
    return reader.recordings


# Where it grew


def test_growth_begins_where_a_norm_made_the_numbers_small_and_ends_where_they_were_made() -> None:
    grown = growth_of(forward(*model()))
    assert grown is not None
    # Not at the block and not at the model, which pass on the output of `wo`.
    assert [at.module for at in grown.through] == ["block.1.norm", "block.1.wi", "block.1.wo"]
    assert grown.factor == pytest.approx(62700 / 1.7)
    assert grown.share_of_limit == pytest.approx(62700 / 65504)


def test_a_residual_stream_is_followed_through_blocks() -> None:
    blocks = [call(0, "emb", None, 0.5), call(1, "block.0", 0.5, 40.0), call(2, "block.1", 40.0, 3000.0)]
    grown = growth_of(forward(*[*blocks, call(3, "head", 3000.0, 2.0)]))
    assert grown is not None
    assert [at.module for at in grown.through] == ["emb", "block.0", "block.1"]
    assert grown.factor == 6000


def test_code_between_modules_is_gone_through_by_what_the_module_around_was_given() -> None:
    # The forward of ff multiplies what `wi` gave back: no output is what `drop` was given.
    calls = [call(0, "norm", None, 2.0), call(1, "ff.wi", 2.0, 1.5), call(2, "ff.drop", 37000.0, 40000.0)]
    grown = growth_of(forward(*[*calls, call(3, "ff", 2.0, 900.0)]))
    assert grown is not None
    assert [(at.module, at.tensor) for at in grown.through] == [("norm", "output"), ("ff.drop", INPUT)]
    # Without the frame of ff, as before a detection, it begins with what came in.
    alone = growth_of(forward(*calls))
    assert alone is not None
    assert [(at.module, at.abs_max) for at in alone.through] == [("ff.drop", 37000.0)]


def test_masks_whole_numbers_and_unknown_types_are_no_growth() -> None:
    for out in (Out(65504.0), Out(63.0, dtype="int64"), Out(5.0, dtype=""), Out("inf"), Out(None, text="None")):
        assert growth_of(forward(call(0, "a", None, out))) is None
        assert call(0, "a", 1.0, out).rows[0].growth is None
    assert call(0, "a", 0.0, 5.0).rows[0].growth is None


def test_the_nearest_to_its_own_limit_is_the_answer_and_not_the_greatest() -> None:
    near = [call(0, "a", 1.0, Out(1e6, dtype="float32")), call(1, "b", 1.0, Out(300.0, dtype="float8_e4m3fn"))]
    grown = growth_of(forward(*near))
    assert grown is not None
    assert (grown.through[-1].module, round(grown.share_of_limit, 2)) == ("b", 0.67)


# The verdict


def test_a_detection_is_a_fault_and_the_growth_before_it_is_told() -> None:
    found = Detection("rank 1 (node07), batch 0: 3 inf in `output` of `block.1.wo` (Wo).", 0, rank=1, host="node07")
    report = judged(recording(forward(*model()[:7]), rank=1, detections=(found,)))
    assert report.exit_code() == 1
    assert report.summary == found.sentence
    first = next(one for one in report.findings if one.id == "overflow.detected")
    assert (first.where.ranks, first.where.hosts) == ((1,), ("node07",))
    assert report.data.growth[0].through[-1].module == "block.1.wo"


def test_what_all_ranks_have_in_their_files_is_one_finding_with_the_frames_of_the_rank_it_names() -> None:
    known = {"rank": 2, "module": "block.1.wo", "made_by": "block.1.wo", "fix": "check its formula"}
    records = []
    for rank in range(4):
        calls = model(2.0)
        calls[6] = call(6, "block.1.wo", 12.0, Out("-inf") if rank == 2 else 2.0)
        found = Detection("rank 2, batch 0: 3 -inf", 0, **known)  # type: ignore[arg-type]
        records.append(recording(forward(*calls), rank=rank, detections=(found,)))
    report = judged(*records)
    (found_once,) = [one for one in report.findings if one.id == "overflow.detected"]
    assert found_once.where.ranks == (2,)
    assert found_once.fix is not None
    assert found_once.fix.commands[0].endswith(" overflow show f.jsonl --batch 0 --verbose")
    assert report.data.answer[0] == "rank 2, batch 0: 3 -inf"
    assert [row.abs_max for row in report.data.rows if row.is_bad] == ["-inf"]


def test_near_the_limit_is_a_warning_and_far_from_it_is_fine() -> None:
    report = judged(recording(forward(*model())))
    assert [(one.id, one.level) for one in report.findings] == [("overflow.near-limit", Level.WARN)]
    assert report.summary.startswith("`output` of `block.1` (1) reaches 6.27e+04 = 96% of float16 max")
    report = judged(recording(forward(*model(2.0))))
    assert (report.findings, report.exit_code()) == ((), 0)
    assert report.summary.startswith("nothing detected; finite values do not grow: they reach 1.20e+01")
    cut = forward(*model(2.0))
    cut.bad = call(9, "a", None, Out("nan")).rows[0]
    assert [(one.id, one.level) for one in judged(recording(cut)).findings] == [("overflow.not-finite", Level.WARN)]


def test_what_may_lack_the_detection_is_unknown_and_never_fine() -> None:
    cut = recording(forward(*model(2.0)))
    cut.truncated = True
    report = judged(cut)
    assert ([one.id for one in report.findings], report.exit_code()) == (["overflow.incomplete"], 3)
    cut.detections.append(Detection("batch 0: 1 nan", 0))
    assert judged(cut).exit_code() == 1


def test_many_rows_are_folded_to_those_that_matter() -> None:
    calls = [call(number, f"layer.{number}", 2.0, 2.0) for number in range(300)]
    calls[150] = call(150, "layer.150", 2.0, 60000.0)
    calls[200] = call(200, "layer.200", 2.0, Out("inf", least=0.0))
    one = forward(*calls)
    grown = growth_of(one)
    assert grown is not None
    modules = [row.module for row in rows_that_matter(REQUEST, one, grown.through)]
    assert modules == ["layer.0", "layer.149", "layer.150", "layer.200", "layer.299"]
    assert len(rows_that_matter(Request(paths=("f",), everything=True), one, ())) == 300
    assert len(rows_that_matter(Request(paths=("f",), module="*.15?"), one, ())) == 10


def test_of_many_batches_the_answer_is_about_the_highest() -> None:
    one = recording(*(forward(*model(60000.0 if batch == 37 else 2.0), batch=batch) for batch in range(100)))
    report = judged(one)
    assert "in batch 37" in report.data.answer[0]
    assert len(report.data.growth) == 32
    assert "in batch 37" in report.summary


# Reading


def test_what_goes_in_is_the_greatest_of_the_floats(tmp_path: Path) -> None:
    lines = [line("weight", 70.0), line("input", 63.0, "int64"), line("input", 2.0), line("input", 3.0)]
    lines += [line("input", "inf"), line("input", 65504.0), line("output", 6.0)]
    (one,) = read(written(tmp_path, HEAD, frame(0, 0, *lines)))
    (only,) = one.forwards[0].calls
    assert only.given is not None
    assert (only.given.numbers, only.rows[0].growth) == ((0.5, 3.0, 16, "float16"), 2.0)
    bad = one.forwards[0].bad
    assert bad is not None
    assert (bad.tensor, bad.abs_max) == ("input[0]", "inf")


def test_a_file_that_is_cut_off_gives_what_is_there(tmp_path: Path) -> None:
    whole = json.dumps(HEAD) + "\n" + json.dumps(frame(0, 0, line("output", 1.0))) + "\n"
    path = tmp_path / "cut.jsonl"
    for text, frames, truncated in (
        (whole + '{"kind": "frame", "batch": 0, "num', 1, True),
        (whole[:-1], 1, False),
        ('{"kind": "head", "sch', 0, True),
        ("", 0, False),
    ):
        path.write_text(text)
        (one,) = read(str(path))
        assert (one.frames, one.truncated, one.torn) == (frames, truncated, 0), text


def test_lines_that_ranks_have_torn_are_counted_and_those_of_a_later_kind_are_not(tmp_path: Path) -> None:
    torn = [frame(0, 1, line("output", -1.0)), frame(0, 2, line("output", "big")), frame(-1, 0), {"kind": "frame"}, 5]
    later = {"kind": "histogram", "bins": []}
    (one,) = read(written(tmp_path, HEAD, frame(0, 0, line("output", 1.0)), *torn, later, frame(0, 3)))
    assert (one.torn, one.frames) == (5, 2)
    report = judged(one)
    assert report.exit_code() == 3
    assert 'give each its own: save="frames-{rank}.jsonl"' in report.findings[0].title


def test_what_is_none_of_ours_or_of_a_later_distdiag_is_refused(tmp_path: Path) -> None:
    for first, why in (
        ({"kind": "head", "schema": "distdiag-frames/2"}, "of format distdiag-frames/2; this version reads"),
        ({"kind": "head", "schema": "something"}, "of format something"),
        (frame(0, 0), "was the start of the file cut off"),
        ([1, 2], "not a frame file"),
    ):
        with pytest.raises(NotFrames, match=why):
            read(written(tmp_path, first))
    path = tmp_path / "deep.jsonl"
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(NotFrames):
        read(str(path))


def test_no_more_is_kept_than_there_is_room_for(tmp_path: Path) -> None:
    frames = [frame(batch, 0, line("output", 1.0), line("output", 2.0, label="output[1]")) for batch in range(10)]
    found = {"kind": "detection", "sentence": "batch 9: 1 inf", "batch": 9}
    (one,) = read(written(tmp_path, HEAD, *frames, found), most_rows=7)
    assert (one.frames, one.left_out, len(one.detections)) == (3, 7, 1)
    assert any("its last 7 frames were skipped" in each.title for each in judged(one).findings)
    (one,) = read(str(tmp_path / "frames.jsonl"), most_rows=7, batches=(8,))
    assert (one.frames, one.left_out, one.batches) == (1, 0, tuple(range(10)))


def test_files_put_one_after_the_other_are_several(tmp_path: Path) -> None:
    both = read(written(tmp_path, HEAD, frame(0, 0), {**HEAD, "rank": 0}, frame(0, 0)))
    assert [(one.rank, one.frames) for one in both] == [(1, 1), (0, 1)]
    assert [one.id.rank for _, one in Selection(REQUEST, both).owned] == [0, 1]
