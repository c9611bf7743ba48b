"""Architectures, lists of them, tables: the rules alone."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest
from loops import each

import distdiag.commands.cuda_env
from distdiag.commands.cuda_env.archs import (
    Arch,
    as_list,
    corrected,
    from_capability,
    from_nvcc,
    how_it_runs,
    read_list,
)
from distdiag.commands.cuda_env.prebuild import read_ops
from distdiag.commands.cuda_env.problems import checks
from distdiag.diagnosis.finding_ids import chosen, matches
from distdiag.errors import UsageError
from distdiag.facts.cuda.literals import Source
from distdiag.knowledge.cuda import compiles, newest_cuda, tables, version


@pytest.mark.parametrize(
    ("text", "arch"), [("75", Arch(7, 5)), ("90a", Arch(9, 0, "a")), ("100f", Arch(10, 0, "f")), ("121", Arch(12, 1))]
)
def test_nvccs_names_are_read_and_written(text: str, arch: Arch) -> None:
    assert (from_nvcc(text), arch.nvcc) == (arch, text)


@each(
    "cubins, ptx, gpu, how",
    [
        ("80", "", "8.6", "cubin"),
        ("86", "", "8.0", ""),
        ("80", "", "9.0", ""),
        ("80", "80", "9.0", "ptx"),
        ("90a", "", "9.0", "cubin"),
        ("90a", "90a", "10.0", ""),
        ("100a", "", "10.3", ""),
        ("100f", "", "10.3", "cubin"),
        ("120", "", "12.1", "cubin"),
        ("121", "", "12.0", ""),
        ("120", "", "10.0", ""),
        ("86", "", "8.7", ""),
        ("87", "", "8.9", ""),
        ("101", "", "11.0", "cubin"),
        ("", "120", "9.0", ""),
    ],
)
def test_what_runs_where(cubins: str, ptx: str, gpu: str, how: str) -> None:
    arch = from_capability(gpu)
    assert arch is not None
    assert how_it_runs(cubins.split(), ptx.split(), arch) == how


def test_names_of_families_stand_for_their_architectures() -> None:
    assert read_list("Ampere;9.0a", (), {}).cubins == ("80", "86", "90a")
    assert read_list("Ampere;9.0a", (), {}).ptx == ("86",)
    assert read_list("8.0  8.6", (), {}).wrong == ("",)


def test_what_cannot_be_understood_is_not_corrected() -> None:
    assert corrected("warp", ()) == ""
    assert corrected("ampere", ()) == "8.0;8.6+PTX"
    assert corrected("Hopper+PTX", ()) == "9.0+PTX"
    assert corrected("compute_80, sm_90+PTX", ()) == "8.0;9.0+PTX"


def test_a_list_for_gpus_has_each_kind_once_in_order() -> None:
    assert as_list([Arch(12, 0), Arch(8, 6), Arch(12, 0)]) == "8.6;12.0"


@each(
    "driver, cuda",
    [("535.104.05", "12.2"), ("550.54.14", "12.4"), ("580.65.06", "13.0"), ("390.1", ""), ("999.1", "13.1")],
)
def test_the_newest_cuda_of_a_driver(driver: str, cuda: str) -> None:
    assert newest_cuda(driver) == cuda


@each(
    "arch, toolkit, answer",
    [
        ("70", "13.0", False),
        ("70", "12.9", True),
        ("90a", "11.8", False),
        ("100f", "12.8", False),
        ("107", "13.1", None),
    ],
)
def test_what_a_toolkit_compiles(arch: str, toolkit: str, answer: bool | None) -> None:
    assert compiles(arch, toolkit) is answer


def test_the_tables_are_whole() -> None:
    known = tables()
    branches = sorted(known.branch, key=int)
    assert [version(known.branch[one]) for one in branches] == sorted(version(one) for one in known.branch.values())
    for major, least in known.least_driver.items():
        newest = newest_cuda(least)
        assert version(newest)[0] >= int(major), (major, least, newest)
    assert all(from_capability(one) for one in known.known_archs)
    for archs in known.named_archs.values():
        assert not read_list(archs, (), {}).wrong


def test_every_problem_can_be_chosen_and_every_row_is_used() -> None:
    """An id that is not listed can be neither chosen nor ignored."""
    rows = tomllib.loads(resources.files("distdiag.knowledge").joinpath("cuda_problems.toml").read_text("utf-8"))[
        "problem"
    ]
    assert {row.get("id", row["name"]) for row in rows} == {*checks()} - {"no-answer", "nodes-differ", "log"}
    source = "".join(file.read_text() for file in Path(distdiag.commands.cuda_env.__file__).parent.rglob("*.py"))
    assert [row["name"] for row in rows if f'"{row["name"]}"' not in source] == []


def test_ids_are_chosen_with_or_without_the_command() -> None:
    assert chosen("cuda-env.toolkit.home", "cuda-env", checks()) == "toolkit.home"
    assert chosen("toolkit", "cuda-env", checks()) == "toolkit"
    assert matches("toolkit.home", "toolkit")
    assert not matches("toolkits.home", "toolkit")
    with pytest.raises(UsageError):
        chosen("tool", "cuda-env", checks())


def test_ops_are_read() -> None:
    assert read_ops("DS_BUILD_AIO, cpu_adam") == ("aio", "cpu_adam")
    assert read_ops("all") == ()
    assert set(read_ops("")) <= set(tables().deepspeed.ops)


def test_literals_are_read_out_of_a_source_that_cannot_run(tmp_path: Path) -> None:
    file = tmp_path / "source.py"
    file.write_text(
        "import nowhere  # }\n"
        "LEAST: tuple[int, ...] = (5, 0)\n"
        "TABLE: dict = {\n    '11.0': (LEAST, (10, 0)),  # a brace }\n    '12.0': ((6, 0), (13, 0)),\n}\n"
        "def inner():\n    names = collections.OrderedDict([\n        ('A', '1'),\n    ])\n    many = ['x',\n    'y']\n"
        "calls = open('/etc/passwd')\nbroken = {\n"
    )
    source = Source(str(file))
    assert source.literal("TABLE") == {"11.0": ((5, 0), (10, 0)), "12.0": ((6, 0), (13, 0))}
    assert source.literal("names") == [("A", "1")]
    assert source.literal("many") == ["x", "y"]
    assert source.literal("broken") is None
    assert source.literal("absent") is None
    assert Source(str(tmp_path / "none.py")).literal("TABLE") is None
