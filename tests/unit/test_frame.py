"""The contract that every command keeps: exit status, JSON keys, light start, import rules."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer
from loops import each
from support_warm import distdiag

from distdiag import cli, lazy_typer
from distdiag.errors import DistdiagError
from distdiag.ids import RowId
from distdiag.output import Output, deliver
from distdiag.report import Finding, Fix, Level, Report, Verdict, Where

if TYPE_CHECKING:
    from collections.abc import Iterator


def report_with(*levels: Level, interrupted: bool = False) -> Report[None]:
    findings = tuple(
        Finding(
            id=RowId(f"test.{number}"),
            level=level,
            title="[rank0] is [red]odd[/red]",
            where=Where(ranks=(0,)),
            fix=Fix(text="wait", commands=("true",)),
        )
        for number, level in enumerate(levels)
    )
    return Report(command="test", data=None, findings=findings, summary="a sentence", interrupted=interrupted)


@each(
    "levels, verdict, code, strict_code",
    [
        ((), Verdict.OK, 0, 0),
        ((Level.INFO,), Verdict.OK, 0, 0),
        ((Level.WARN, Level.INFO), Verdict.WARN, 0, 1),
        ((Level.UNKNOWN, Level.WARN), Verdict.UNKNOWN, 3, 3),
        ((Level.UNKNOWN, Level.FAIL), Verdict.FAIL, 1, 1),
    ],
)
def test_the_worst_level_decides(levels: tuple[Level, ...], verdict: Verdict, code: int, strict_code: int) -> None:
    report = report_with(*levels)
    assert report.verdict is verdict
    assert report.exit_code() == code
    assert report.exit_code(strict=True) == strict_code


def test_an_interrupted_report_is_130_and_never_ok() -> None:
    report = report_with(interrupted=True)
    assert (report.verdict, report.exit_code()) == (Verdict.UNKNOWN, 130)


def delivered(report: Report[None], capsys: pytest.CaptureFixture[str], *, as_json: bool) -> tuple[int, str]:
    with pytest.raises(typer.Exit) as end:
        deliver("test", lambda: report, lambda _: (), Output(json=as_json))
    return end.value.exit_code, capsys.readouterr().out


def test_the_json_keys_are_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = delivered(report_with(Level.FAIL), capsys, as_json=True)
    document = json.loads(out)
    assert code == document["exit_code"] == 1
    assert list(document) == ["schema", "version", "command", "exit_code", "verdict", "summary", "findings", "data"]
    assert document["schema"] == "distdiag/1"
    (finding,) = document["findings"]
    assert list(finding) == ["id", "level", "title", "detail", "where", "witnesses", "evidence", "fix"]
    assert finding["where"] == {"hosts": [], "ranks": [0], "pids": []}
    assert finding["witnesses"] == {"hosts": [], "ranks": []}
    assert finding["fix"] == {"text": "wait", "commands": ["true"]}


def test_the_json_keys_of_a_failure_are_pinned(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Report[None]:
        raise DistdiagError("no", hint="try again")

    with pytest.raises(typer.Exit) as end:
        deliver("test", broken, lambda _: (), Output(json=True))
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert end.value.exit_code == document["exit_code"] == 3
    keys = ["schema", "version", "command", "exit_code", "verdict", "summary", "findings", "error"]
    assert list(document) == keys
    assert (document["verdict"], document["summary"]) == ("unknown", "no")
    assert [(one["id"], one["fix"]["text"]) for one in document["findings"]] == [("distdiag.failed", "try again")]
    assert document["error"] == {"id": "distdiag.failed", "message": "no", "hint": "try again"}
    assert captured.err == "distdiag test: no\nhint: try again\n"


def test_square_brackets_in_data_survive(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = delivered(report_with(Level.WARN, Level.INFO), capsys, as_json=False)
    assert "[rank0] is [red]odd[/red]" in out


def test_the_verdict_and_its_fix_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = delivered(report_with(Level.FAIL, Level.INFO, Level.WARN), capsys, as_json=False)
    lines = out.splitlines()
    assert lines[0] == "distdiag test: FAIL"
    assert lines[-4:] == ["FAIL  test.0", "  a sentence", "  fix: wait", "    true"]


def test_a_warning_is_told_before_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = delivered(report_with(Level.WARN), capsys, as_json=False)
    assert out.splitlines()[-6:] == [
        "WARN  test.0",
        "  [rank0] is [red]odd[/red]",
        "  fix: wait",
        "    true",
        "",
        "WARN: a sentence",
    ]


def test_a_finding_that_is_the_summary_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    for level, verdict in ((Level.INFO, "OK"), (Level.WARN, "WARN")):
        report = report_with(level)
        _, out = delivered(replace(report, summary=report.findings[0].title), capsys, as_json=False)
        assert out.splitlines()[-4:] == [f"{verdict}  test.0", "  [rank0] is [red]odd[/red]", "  fix: wait", "    true"]


def test_the_usage_names_what_is_required_without_braces() -> None:
    usage = distdiag("floatcmp", "--help").out.splitlines()[0]
    assert usage.startswith("Usage: ")
    assert usage.endswith(" floatcmp [OPTIONS] A B")


def test_a_bug_keeps_its_traceback() -> None:
    def buggy() -> Report[None]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        deliver("test", buggy, lambda _: (), Output())


def test_starting_up_imports_nothing_heavy() -> None:
    heavy = "torch", "paramiko", "rich", "msgspec", "asyncio"
    script = f"import sys, distdiag, distdiag.cli; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_the_library_surface_is_lazy_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has torch."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "distdiag"]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    fresh = importlib.import_module("distdiag")
    assert "distdiag.report" not in sys.modules
    try:
        assert all(getattr(fresh, name).__name__ == name for name in fresh.__all__)
        with pytest.raises(AttributeError, match="module 'distdiag' has no attribute 'nothing'"):
            fresh.nothing  # noqa: B018 - it is asked for
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "distdiag" and name not in before]:
            del sys.modules[name]


def in_this_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command that ends before it does anything; return its status, its stdout and its stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["distdiag", *arguments])
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys.modules["__main__"], "__package__", None, raising=False)  # names the program
        with pytest.raises(SystemExit) as end:
            cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code, *capsys.readouterr()


@pytest.mark.parametrize("arguments", [("--help",), ("gpu-test", "--help"), ("gpu-test", "-h"), ("trace",)])
def test_every_help_fits_80_columns(arguments: tuple[str, ...]) -> None:
    result = distdiag(*arguments)
    text = result.out + result.err
    assert "Usage: distdiag" in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("words", [(), ("-h",)])
def test_distdiag_alone_shows_a_command_for_each_symptom(words: tuple[str, ...]) -> None:
    result = distdiag(*words)
    rows = [line.partition("distdiag ")[2].split() for line in result.out.splitlines() if line.startswith("  ")]
    known = set(leaves(cli._SUBCOMMANDS))
    assert result.code == 0
    assert max(len(line) for line in result.out.splitlines()) <= 80
    assert rows
    assert all((*words,)[:1] in known or (*words,)[:2] in known for words in rows)


def test_help_lists_every_command_in_its_group() -> None:
    text = distdiag("--help").out
    for title, group in cli.GROUPS.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        named = [line.split()[0] for line in section.splitlines() if re.match(r"  \S", line)]
        assert named == [sub.name for sub in group]


def test_short_help_folds_the_host_options_and_long_help_has_all() -> None:
    short, long, hosts = distdiag("hang", "-h").out, distdiag("hang", "--help").out, distdiag("help", "hosts").out
    assert re.findall(r"^  (--\S+)", short.partition("\nHosts:\n")[2], re.MULTILINE) == [
        "--hosts",
        "--slurm-job",
        "--kube",
    ]
    assert "distdiag help hosts" in short
    assert "Exit status:" not in short
    assert "while distdiag hang --save facts" in short
    assert "Exit status:" in long
    options = re.findall(r"^  (--\S+)", long.partition("\nHosts:\n")[2], re.MULTILINE)
    assert len(options) > 10
    assert re.findall(r"^  (--\S+)", hosts.partition("\nHosts:\n")[2], re.MULTILINE) == options
    assert max(len(line) for line in (short + hosts).splitlines()) <= 80


def test_all_missing_options_are_named_at_once_with_an_example() -> None:
    result = distdiag("estimate", "--batch", "8")
    assert result.code == 2
    assert "Missing options: --seq, --step-time, --gpus." in result.err
    assert "  distdiag estimate --params" in result.err


def test_in_the_shell_of_an_agent_the_text_ends_with_a_line_about_json() -> None:
    plain, agent = (distdiag("explain", "hang.lock", env=env).out for env in ({}, {"AI_AGENT": "some-agent"}))
    assert agent == plain + "For programs: the same command with --json prints one JSON document.\n"
    assert distdiag("explain", "hang.lock", "--json", env={"AI_AGENT": "some-agent"}).report["verdict"] == "ok"


def test_markdown_and_json_exclude_each_other() -> None:
    result = distdiag("doctor", "--json", "--markdown")
    assert result.code == 2
    assert "use either --json or --markdown" in result.report["error"]["message"]


def test_the_skill_is_printed_and_installed(tmp_path: Path) -> None:
    printed = distdiag("skill")
    assert printed.out.startswith("---\nname: distdiag\n")
    written = distdiag("skill", "--to", str(tmp_path / "skills"))
    assert (tmp_path / "skills/distdiag/SKILL.md").read_text() == printed.out
    assert written.out == f"{tmp_path}/skills/distdiag/SKILL.md\n"
    (tmp_path / "file").touch()
    assert distdiag("skill", "--to", str(tmp_path / "file")).code == 2


@each(
    "typed, meant",
    [
        (("pyspy_all",), "pyspy-all"),
        (("core_bt", "core"), "core-bt"),
        (("trace", "block"), "blocked"),
        (("ports", "--host", "gpu01"), "--hosts"),
        (("gpu-test", "--timeout", "30"), "--stall"),
        (("cuda-env", "--for", "build"), "--goal"),
        (("trace", "blocked", "--ranks", "1"), "--rank"),
        (("overflow", "show", "--jsn"), "--json"),
        (("overflow", "shwo", "frames"), "overflow show"),
    ],
)
def test_a_mistyped_command_or_option_suggests_the_nearest(
    typed: tuple[str, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = in_this_process(capsys, *typed)
    assert code == 2
    assert re.search(rf"(Did you mean|Possible options:?|did you mean).*{meant}\b", err)


def test_the_program_itself_suggests_it_and_ends_with_2() -> None:
    result = distdiag("pyspy_all")
    assert (result.code, "pyspy-all" in result.err) == (2, True)


def loadable(subs: tuple[lazy_typer.Sub, ...]) -> Iterator[lazy_typer.Sub]:
    for sub in subs:
        if sub.home:
            yield sub
        yield from loadable(sub.below)


def test_every_option_of_every_command_is_suggested_for_a_mistyped_one() -> None:
    missed = []
    for sub in loadable(cli._SUBCOMMANDS):
        command = lazy_typer.load(sub, [], lazy_typer.Invocation([]))
        options = [name for param in command.params for name in param.opts if name.startswith("--") and len(name) > 4]
        for option in options:
            mistyped = option[: len(option) // 2] + option[len(option) // 2 + 1 :]  # a letter of the middle is missing
            with pytest.raises(typer.BadParameter.__mro__[1]) as wrong:
                command.main([mistyped], standalone_mode=False, obj=lazy_typer.Invocation([]))
            if option not in (getattr(wrong.value, "possibilities", None) or ()):
                missed.append((sub.name, mistyped))
    assert not missed


def test_python_dash_m_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "distdiag", "--version"], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.startswith("distdiag 0.")


def test_no_project_file_breaks_the_import_rules() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [program], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout


def leaves(subs: tuple[lazy_typer.Sub, ...], *above: str) -> Iterator[tuple[str, ...]]:
    for sub in subs:
        if sub.home:
            yield (*above, sub.name)
        yield from leaves(sub.below, *above, sub.name)


@each("path", list(leaves(cli._SUBCOMMANDS)))
def test_every_subcommand_is_loaded_by_its_name_and_says_json_in_the_same_way(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = in_this_process(capsys, *path, "--help")
    assert code == 0
    assert out.startswith(f"Usage: distdiag {' '.join(path)} ")
    assert max(map(len, out.splitlines())) <= 80
    assert f"\n    distdiag {' '.join(path)}" in out.partition("\n  Examples:")[2], "an example of it"
    sub = next(sub for sub in cli._SUBCOMMANDS if sub.name == path[0])
    if len(path) == 2:
        sub = next(below for below in sub.below if below.name == path[1])
    parameters = lazy_typer.load(sub, (), lazy_typer.Invocation(())).params
    named = {option: parameter.name for parameter in parameters for option in parameter.opts}
    assert named.get("--json", "as_json") == "as_json"


def test_findings_are_left_out_by_id_and_the_verdict_is_that_of_the_others() -> None:
    whole = json.loads(distdiag("core-bt", "--check-setup", "--json").out)
    ids = list(dict.fromkeys(finding["id"] for finding in whole["findings"]))
    assert ids
    ignored = [word for id_ in ids for word in ("--ignore", f"{id_.partition('.')[2]}=known")]
    less = json.loads(distdiag("core-bt", "--check-setup", "--json", *ignored).out)
    assert (less["verdict"], less["exit_code"], less["findings"]) == ("ok", 0, [])
    assert all(f"{id_} (known)" in less["summary"] for id_ in ids)
    only = json.loads(distdiag("core-bt", "--check-setup", "--json", "--only", ids[0]).out)
    assert {finding["id"] for finding in only["findings"]} == {ids[0]}
    wrong = distdiag("core-bt", "--check-setup", "--only", "setup")
    assert wrong.code == 2
    assert "'setup' is not a finding id" in wrong.err
