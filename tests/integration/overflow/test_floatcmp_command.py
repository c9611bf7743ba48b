"""floatcmp on files written by torch, numpy and safetensors; damaged files, and a file that would run code."""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shlex
import struct
import sys
import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from json_schema import check
from support_warm import distdiag

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

if TYPE_CHECKING:
    from pathlib import Path

    from distdiag.training.floatcmp.result import Comparison

from distdiag.commands.floatcmp import child
from distdiag.commands.floatcmp.diagnose import diagnose
from distdiag.commands.floatcmp.tensor_files import Unreadable, read


def answer(folder: Path, a: Path, b: Path, key: str = "") -> child.Answer:
    """Ask what imports torch in this process, which has it."""
    path = folder / "answer"
    child.main(msgspec.json.encode(child.Request(a=str(a), b=str(b), key=key)).decode(), str(path))
    return msgspec.json.decode(path.read_bytes(), type=child.Answer)


def compared(folder: Path, a: Path, b: Path) -> Comparison:
    found = answer(folder, a, b).files
    assert found is not None
    return found


class RunsCode:
    """What an attacker pickles: making a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a; b, which is rounding away; c, which differs; r, the reference."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    x, w = torch.randn(8, 512), torch.randn(512, 8)
    a = {"layers": [{"weight": w, "out": x @ w}], "step": 3, "run": "one"}
    b = {"layers": [{"weight": w, "out": (x.double() @ w.double()).float()}], "step": 3, "run": "two"}
    broken = w.clone()
    broken[3, 4] = float("nan")
    c = {"layers": [{"weight": broken, "out": (x @ w) * 1.01}], "step": 3, "more": w}
    r = {"layers": [{"weight": w.double(), "out": x.double() @ w.double()}]}
    for name, values in (("a", a), ("b", b), ("c", c), ("r", r)):
        torch.save(values, folder / f"{name}.pt")
    return folder


def test_rounding_is_healthy_and_the_reference_says_who_is_nearer(files: Path) -> None:
    result = distdiag(
        *("floatcmp", "--json", str(files / "a.pt"), str(files / "b.pt")),
        *("--reference", str(files / "r.pt"), "--key", "layers*", "--worst", "2"),
    )
    report = check(result.out, 0)
    assert (report["data"]["tensors"], report["data"]["identical"]) == (2, 1)
    out = report["data"]["pairs"][0]
    assert (out["key"], out["unit"], len(out["worst"])) == ("layers[0].out", "float32", 2)
    assert out["nearness"]["b"]["max_ulp"] == 0
    (nearer,) = [one for one in report["findings"] if one["id"] == "floatcmp.closer-to-reference"]
    assert nearer["evidence"][0].endswith(
        "b.pt is correctly rounded in 100 % (worst 0 ulp): " + f"{files}/b.pt is closer"
    )


def test_what_differs_is_named_with_its_place(files: Path) -> None:
    result = distdiag("floatcmp", "a.pt", "c.pt", "--exact", wrap=("env", "-C", str(files), "NO_COLOR=1"))
    assert result.code == 1
    assert "\x1b" not in result.out
    assert "distdiag floatcmp: FAIL" in result.out
    assert "[3, 4]  a " in result.out
    assert "NaN or Inf on one side only, in 1 number" in result.out
    assert "FAIL  floatcmp.beyond-rounding" in result.out
    assert "only in c.pt: more" in result.out
    assert " floatcmp a.pt c.pt --exact --key 'layers[0].out' --worst 20" in result.out
    prose = [line for line in result.out.splitlines() if not line.startswith("    ")]
    assert max(map(len, prose)) <= 80


def test_a_file_that_would_run_code_is_refused_and_does_not(tmp_path: Path) -> None:
    trap = tmp_path / "made_by_the_file"
    # Both formats of torch.save: zip, and the bare pickle of old.
    for zipped in (True, False):
        torch.save({"w": RunsCode(trap)}, tmp_path / f"{zipped}.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(Unreadable, match="contains more than tensors") as refused:
            read(str(tmp_path / f"{zipped}.pt"))
        assert "torch.save(model.state_dict()" in refused.value.hint
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(RunsCode(trap)))
    with pytest.raises(Unreadable):
        read(str(tmp_path / "plain.pkl"))
    assert "posix.mkdir" in answer(tmp_path, tmp_path / "True.pt", tmp_path).failed
    assert not trap.exists()


def test_files_that_are_cut_off_or_none_of_ours(tmp_path: Path, files: Path) -> None:
    whole = (files / "a.pt").read_bytes()
    safe = safetensors({"w": ("F32", [4], bytes(16))})
    cases = {
        "half.pt": whole[: len(whole) // 2],
        "empty.pt": b"",
        "text.txt": b"0.5 0.25\n",
        "half.safetensors": safe[:-3],
        "odd.safetensors": safetensors({"w": ("F32", [5], bytes(16))}),
        "no_header.safetensors": struct.pack("<Q", 9) + b"{" + b"x" * 8,
        "half.npy": npy("<f4", (4,), bytes(16))[:-3],
        "short.npy": b"\x93NUMPY",
        "objects.npy": npy("|O", (1,), pickle.dumps([1])),
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(Unreadable) as refused:
            read(str(tmp_path / name))
        assert str(refused.value).startswith(str(tmp_path / name)), name
        assert refused.value.hint, name
        assert "weights_only" not in str(refused.value), name  # torch recommends to load it with all code in it


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]], padding: str = "") -> bytes:
    header: dict[str, Any] = {"__metadata__": {"by": "test"}}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode() + padding.encode()
    return struct.pack("<Q", len(text)) + text + body


def npy(descr: str, shape: tuple[int, ...], data: bytes, *, fortran: bool = False) -> bytes:
    text = repr({"descr": descr, "fortran_order": fortran, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize("padding", ["", " ", "   "])
def test_safetensors_wherever_their_numbers_lie(tmp_path: Path, padding: str) -> None:
    data = struct.pack("<6f", *range(6))
    path = tmp_path / "x.safetensors"
    path.write_bytes(
        safetensors({"byte": ("U8", [1], b"\x07"), "w": ("F32", [2, 3], data), "none": ("F32", [0], b"")}, padding)
    )
    values: dict[str, Any] = read(str(path))
    assert values["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert (values["byte"].tolist(), values["none"].shape) == ([7], (0,))


@pytest.mark.parametrize(
    ("descr", "code"), [("<f4", "<6f"), (">f4", ">6f"), ("<f8", "<6d"), (">i2", ">6h"), ("|u1", "6B")]
)
def test_npy_in_each_order(tmp_path: Path, descr: str, code: str) -> None:
    path, turned_path = tmp_path / "x.npy", tmp_path / "turned.npy"
    path.write_bytes(npy(descr, (2, 3), struct.pack(code, *range(6))))
    values = read(str(path))[""]
    assert isinstance(values, torch.Tensor)
    assert values.tolist() == [[0, 1, 2], [3, 4, 5]]
    turned_path.write_bytes(npy(descr, (2, 3), struct.pack(code, 0, 3, 1, 4, 2, 5), fortran=True))
    turned = read(str(turned_path))[""]
    assert isinstance(turned, torch.Tensor)
    assert turned.tolist() == values.tolist()


def test_npy_where_numpy_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # importing it fails
    (tmp_path / "x.npy").write_bytes(npy("<f4", (4,), bytes(16)))
    with pytest.raises(Unreadable, match=r"x\.npy: its reader is missing: import of numpy") as refused:
        read(str(tmp_path / "x.npy"))
    assert "python -m pip install numpy" in refused.value.hint


def test_wrong_usage(tmp_path: Path, files: Path) -> None:
    missing = distdiag("floatcmp", "--json", str(files / "a.pt"), str(tmp_path / "none.pt"))
    assert (missing.code, missing.report["error"]["id"]) == (2, "usage")
    with pytest.raises(Unreadable, match=r"a directory with no \.safetensors file"):
        read(str(tmp_path))
    assert distdiag("floatcmp", "--json", str(files / "a.pt")).code == 2
    unspeakable = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt")
    os.symlink(files / "a.pt", unspeakable)
    named = distdiag("floatcmp", unspeakable, str(files / "a.pt"))
    assert (named.code, "not UTF-8" in named.err) == (2, True)


def test_a_pattern_that_fits_nothing_is_answered_with_names(tmp_path: Path, files: Path) -> None:
    hint = answer(tmp_path, files / "a.pt", files / "b.pt", "nothing*").hint
    assert hint == "available: layers[0].weight, layers[0].out, step, run"


def test_a_torch_that_cannot_be_imported_is_told_as_such(tmp_path: Path, files: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")
    result = distdiag("floatcmp", str(files / "a.pt"), str(files / "b.pt"), env={"PYTHONPATH": str(tmp_path)})
    assert (result.code, result.out) == (3, "")
    assert "torch cannot be imported: OSError: libcudart.so.12" in result.err
    assert "cuda-env" in result.err


def test_a_deadline_ends_it_and_says_where_it_was(tmp_path: Path, files: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")
    result = distdiag(
        "floatcmp", str(files / "a.pt"), str(files / "b.pt"), "--timeout", "4", env={"PYTHONPATH": str(tmp_path)}
    )
    assert result.code == 3
    assert "no result within 4 s; it was still importing torch" in result.err
    assert "--timeout 16" in result.err


def sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write tensors in two files with an index, as transformers does."""
    from safetensors.torch import save_file

    folder.mkdir()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    places = {name: names[number % 2] for number, name in enumerate(tensors)}
    for file in names:
        save_file({name: one for name, one in tensors.items() if places[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_checkpoints_of_many_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(4, 3), "b.weight": torch.randn(3, 5), "scale": torch.tensor(2.0)}
    parts = sharded(tmp_path / "parts", tensors)
    other = sharded(tmp_path / "other", {**tensors, "b.weight": tensors["b.weight"] * 2})
    torch.save(tensors, tmp_path / "one.pt")
    index = parts / "model.safetensors.index.json"
    same = compared(tmp_path, index, tmp_path / "one.pt")
    assert (same.tensors, same.identical) == (3, 3)
    assert [pair.key for pair in compared(tmp_path, parts, other).pairs] == ["b.weight"]
    (parts / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002" in answer(tmp_path, index, other).failed


def test_a_checkpoint_of_torch_distributed_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder = tmp_path / "made", tmp_path / "step 100"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(RunsCode(made)))
    with pytest.raises(Unreadable) as refused:
        read(str(folder))
    assert not made.exists()
    command = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch '{folder}' tensors.pt"
    assert command in refused.value.hint
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", shlex.split(command)[2:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed.checkpoint

        torch.distributed.checkpoint.save({"w": torch.ones(2)}, checkpoint_id=str(folder))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    assert torch.equal(read("tensors.pt")["w"], torch.ones(2))  # type: ignore[arg-type]


def test_rounding_is_a_fault_where_all_is_to_be_exact(tmp_path: Path, files: Path) -> None:
    # It is none above: test_rounding_is_healthy_and_the_reference_says_who_is_nearer.
    request = child.Request(a=str(files / "a.pt"), b=str(files / "b.pt"), exact=True)
    report = diagnose(request, compared(tmp_path, files / "a.pt", files / "b.pt"))
    assert (report.exit_code(), [one.id for one in report.findings]) == (1, ["floatcmp.not-exact", "floatcmp.values"])
