"""What --json prints, of every command: valid by the published schema, and with ids that the published list has."""

from __future__ import annotations

import json
from pathlib import Path

import make_docs
from json_schema import SCHEMA, check
from loops import each
from support_warm import distdiag

from distdiag.cli import _SUBCOMMANDS

RECORDED = Path(__file__).parents[2] / "recorded"
BUILD_LOG = RECORDED / "cuda_logs" / "apex_toolkit_mismatch.txt"
COMMANDS = [
    name
    for sub in _SUBCOMMANDS
    for name in ([sub.name] if sub.home else []) + [f"{sub.name} {below.name}" for below in sub.below]
]


@each("command", [name for name in COMMANDS if name != "trace py"])
def test_a_wrong_option_is_an_error_document(command: str) -> None:
    result = distdiag(*command.split(), "--json", "--no-such-option")
    assert result.code == 2
    assert "error" in check(result.out, 2)


@each(
    "words",
    [
        "pyspy-all",
        "trace blocked",
        "trace fds",
        "cuda-env",
        "doctor",
        "core-bt",
        "ports",
        "gpu-test",
        "allreduce-bench",
    ],
)
def test_saved_facts_that_are_not_there_are_an_error_document(words: str) -> None:
    result = distdiag(*words.split(), "--json", "--from", "/nonexistent")
    assert "error" in check(result.out, result.code)


@each(
    "words",
    [
        "ports",
        "trace show /nonexistent",
        f"trace sys {RECORDED / 'strace'}",
        "flight-recorder --how",
        "flight-recorder /nonexistent",
        "bundle -o /nonexistent/x.tar.gz",
        f"cuda-env --explain {BUILD_LOG}",
        f"overflow show {BUILD_LOG}",
    ],
)
def test_reports(words: str) -> None:
    # Commands with --save: test_save_and_judge_again. On ranks: test_gpu_test_faults, test_isolate. With torch:
    # test_overflow, test_overflow_show_command, test_floatcmp_command.
    result = distdiag(*words.split(), "--json")
    check(result.out, result.code)


def test_the_schema_refuses_what_is_not_a_report() -> None:
    document = json.loads(distdiag("core-bt", "--check-setup", "--json").out)
    damages = (
        {"verdict": "maybe"},
        {"exit_code": "1"},
        {"findings": [{"id": "x"}]},
        {"more": 1},
        {"data": {"cores": 1}},
    )
    for damage in damages:
        assert not SCHEMA.is_valid({**document, **damage})
    assert SCHEMA.is_valid(document)


def test_the_data_of_every_command_is_described() -> None:
    assert not make_docs.undescribed()
