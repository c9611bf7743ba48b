"""The one boundary to the terminal: reports, errors, progress, exit status.

stdout is data, stderr is progress and errors. rich never sees data as markup (it would eat "[rank0]").
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO, TypeVar

import typer

from distdiag import __version__, interrupts
from distdiag.errors import DistdiagError, Interrupted
from distdiag.fold import by_key
from distdiag.program_name import as_called
from distdiag.record import record
from distdiag.report import Level, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.status import Status
    from rich.table import Column, Table

    from distdiag.cluster.host_results import HostResult
    from distdiag.report import Finding, Report

Data = TypeVar("Data")
SCHEMA = "distdiag/1"
_AGENTS = ("AI_AGENT", "CLAUDECODE", "CURSOR_AGENT", "GEMINI_CLI", "CODEX_SANDBOX", "CODEX_THREAD_ID")
"""Variables set by coding agents in their shells."""
_is_markdown = False
_only: tuple[str, ...] = ()
_ignored: dict[str, str] = {}
"""Findings to leave out, with reasons."""
_WIDEST = 100
_LONGEST = 5000
_ROOM = 160
"""Maximum characters for the list of usable hosts; the others are all named."""
_MOVES = re.compile(
    r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\x1b(?!\[(?:0|1|(?:1;)?3[0-7])m)"
)
"""Characters that move the cursor, reverse text or worse: names of files, hosts and functions are untrusted.

Our own colours stay.
"""


@record(kw_only=True)
class Output:
    """How to print the answer."""

    json: bool = False
    strict: bool = False
    findings_in_view: bool = False
    """The view shows the findings in its own order, and the last line is its own."""
    brief: bool = False
    """Print the verdict and the summary alone, in one line."""


def deliver(
    command: str,
    diagnose: Callable[[], Report[Data]],
    view: Callable[[Report[Data]], Iterable[RenderableType]],
    output: Output,
) -> NoReturn:
    """Run a diagnosis, print its report or error, and exit with its status."""
    try:
        report = of_interest(diagnose())
    except DistdiagError as error:
        fail(command, error, as_json=output.json)
    except KeyboardInterrupt:
        fail(command, Interrupted(), as_json=output.json)
    with interrupts.held():
        text = _page(report, view, output)
        # All is known by now; of a launcher that ends the others because of the fault, the fault stays the answer.
        if interrupts.came() and report.verdict != Verdict.FAIL:
            report = replace(report, interrupted=True)
            text = _page(report, view, output)
    _leave_with(text, report.exit_code(strict=output.strict))


def _page(report: Report[Data], view: Callable[[Report[Data]], Iterable[RenderableType]], output: Output) -> str:
    if output.json:
        return _as_json(_envelope(report, report.exit_code(strict=output.strict)))
    if _is_markdown:
        from distdiag.markdown import markdown

        return markdown(report, as_page(report, view, findings_in_view=output.findings_in_view))
    if output.brief:
        return f"distdiag {report.command}: {report.verdict.upper()}: {' '.join(report.summary.split())}\n"
    hint = as_called("For programs: the same command with --json prints one JSON document.\n")
    return _render(report, view, whole=output.findings_in_view) + (hint if any(map(os.environ.get, _AGENTS)) else "")


def choose_markdown() -> None:
    """Print every report as Markdown from now on."""
    global _is_markdown
    _is_markdown = True


def choose_findings(*, only: Sequence[str] = (), ignore: Sequence[str] = ()) -> None:
    """Leave findings out of every report from now on: all but `only`, and `ignore`; ids or prefixes, ID[=REASON]."""
    global _only
    _only = (*_only, *only)
    _ignored.update({id_.strip(): reason.strip() for id_, _, reason in (each.partition("=") for each in ignore)})


def of_interest(report: Report[Data]) -> Report[Data]:
    """Leave out the findings that are not wanted; the verdict is that of the others, and the summary names them."""
    prefix = f"{report.command}."
    left: dict[str, str] = {}
    for finding in report.findings:
        names = (str(finding.id), finding.id.removeprefix(prefix))
        ignored = next((each for each in _ignored if any(_is_below(name, each) for name in names)), None)
        wanted = (
            not _only or finding.id.startswith("hosts.") or any(_is_below(n, each) for n in names for each in _only)
        )
        if ignored is not None or not wanted:
            left[finding.id] = _ignored.get(ignored or "", "")
    if not left:
        return report
    kept = replace(report, findings=tuple(finding for finding in report.findings if finding.id not in left))
    worst = next(
        (finding.title for finding in kept.findings if str(finding.level) == str(kept.verdict)), "no other finding"
    )
    shown = ", ".join(f"{each} ({reason})" if reason else each for each, reason in left.items())
    return replace(kept, summary=f"{report.summary if kept.verdict == report.verdict else worst}; left out: {shown}")


def _is_below(id_: str, prefix: str) -> bool:
    return id_ == prefix or id_.startswith(f"{prefix}.")


def load() -> None:
    """Import the rendering libraries, while waiting for other processes."""
    import msgspec  # noqa: F401
    import rich.console
    import rich.table  # noqa: F401


def document(report: Report[Data], *, strict: bool = False) -> dict[str, object]:
    """Return the document that --json prints."""
    return _envelope(report, report.exit_code(strict=strict))


def deliver_lines(command: str, write: Callable[[], list[str]], *, as_json: bool) -> NoReturn:
    """Print lines to paste instead of a report, as data on stdout, and leave."""
    try:
        lines = write()
    except DistdiagError as error:
        fail(command, error, as_json=as_json)
    except KeyboardInterrupt:
        fail(command, Interrupted(), as_json=as_json)
    document = {**_head(command, 0), "data": {"lines": lines}}
    _leave_with(_as_json(document) if as_json else "\n".join(lines) + "\n", 0)


def fail(command: str, error: DistdiagError, *, as_json: bool) -> NoReturn:
    """Print an error in place of a report: on stderr for people, as JSON on stdout for programs."""
    say(f"distdiag {command}: {error}")
    if error.hint:
        say(f"hint: {as_called(error.hint)}")
    if as_json:
        hint = as_called(error.hint)
        _leave_with(error_document(command, error.exit_code, error.id, str(error), hint), error.exit_code)
    raise typer.Exit(error.exit_code)


def _leave_with(text: str, exit_code: int) -> NoReturn:
    """Write the last output and exit: a later interrupt changes nothing."""
    try:
        emit(text)
        interrupts.settle()
    except KeyboardInterrupt:  # it is written, and a second document would be no JSON
        raise typer.Exit(Interrupted.exit_code) from None
    raise typer.Exit(exit_code)


def error_document(command: str, exit_code: int, id_: str, message: str, hint: str) -> str:
    """Make the JSON document of a diagnosis that failed: it has a verdict and findings as every other has."""
    from distdiag.ids import Id
    from distdiag.report import Finding, Fix, Level, Report

    finding = Finding(id=Id(id_), level=Level.UNKNOWN, title=message, fix=Fix(text=hint) if hint else None)
    whole = _envelope(Report(command=command, data=None, findings=(finding,), summary=message), exit_code)
    whole.pop("data")
    return _as_json({**whole, "error": {"id": id_, "message": message, "hint": hint}})


def harmless(text: str, encoding: str | None) -> str:
    """Remove terminal control characters, and replace letters missing from the stream's encoding.

    Applies to stdout and stderr: Python decodes names that are not UTF-8 to unprintable surrogates.
    """
    encoding = encoding or "utf-8"
    return _MOVES.sub("?", text).encode(encoding, "replace").decode(encoding)


def emit(text: str) -> None:
    """Write to stdout; a closed reader (`| head -1`) is no error.

    Raises:
        typer.Exit: status 3: stdout is not writable (disk full), with the reason on stderr; 130: interrupted, and the
            reader has left: a second document after half of this one would be invalid JSON.
    """
    if sys.stdout is None:  # started with stdout closed
        return
    try:
        sys.stdout.write(harmless(text, sys.stdout.encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    except KeyboardInterrupt:
        _discard(sys.stdout)
        raise typer.Exit(Interrupted.exit_code) from None
    except OSError as error:
        _discard(sys.stdout)
        say(f"distdiag: cannot write the report to stdout: {error.strerror}")
        raise typer.Exit(3) from error


def is_done_by_another() -> bool:
    """Return whether rank 0 of this launcher does the work in place of this process.

    A plain RANK does not count: a pod may set it for every process.
    """
    from distdiag.facts.process.rank_identity import identify

    me = identify(os.environ)
    if me is None or me.rank == 0 or me.launcher in ("environment", "torchrun"):
        return False
    say(f"distdiag: rank {me.rank} of {me.launcher} exits: rank 0 does the work")
    return True


def say(text: str) -> None:
    """Write a line to stderr, which cannot command the terminal.

    Nobody to read it (closed, full, a pipe without a reader) is no reason to fail.
    """
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(harmless(text, sys.stderr.encoding) + "\n")
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def plain_table(*columns: Column) -> Table:
    """Create a table without lines, which break when pasted."""
    from rich.table import Table

    class Bounded(Table):
        def add_row(self, *cells: RenderableType | None, **style: Any) -> None:  # noqa: ANN401 - as rich has them
            super().add_row(*(_bounded(cell) if isinstance(cell, str) else cell for cell in cells), **style)

    return Bounded(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


def _bounded(text: str) -> str:
    """Cut texts beyond any real path or sentence: wrapping a name of megabytes would dominate the run time."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters; --json has all)"


def host_table(rows: Iterable[HostResult]) -> Iterator[RenderableType]:
    """Draw a row for each error of hosts, none if all hosts could be used; equal errors fold."""
    from rich.table import Column

    from distdiag.cluster.host_results import HostState
    from distdiag.cluster.hosts import fold, fold_within

    groups = by_key(((row.state, row.stage), row) for row in rows)
    if all(state == HostState.OK for state, _ in groups):
        return
    table = plain_table(
        Column("hosts", overflow="fold"),
        Column("count", justify="right"),
        Column("state", no_wrap=True),
        Column("at stage", no_wrap=True),
        Column("seconds", justify="right", no_wrap=True),
    )
    for (state, stage), group in groups.items():
        slowest = max(row.seconds for row in group)
        names = [row.host for row in group]
        hosts = fold_within(names, _ROOM) if state == HostState.OK else fold(names)
        table.add_row(hosts, str(len(group)), state, stage, f"{slowest:.1f}")
    yield table
    yield ""


class Wide:
    """A table of numbers at its own width: lines may exceed the terminal, and no cell is cut."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement

        natural = Measurement.get(console, options.update(max_width=1000), self._table).maximum
        yield from console.render(self._table, options.update(width=max(natural, options.max_width)))


class Whole:
    """A line never wrapped, so that it pastes and greps. (rich drops no_wrap of a bare Text.)"""

    def __init__(self, line: str, *, style: str = "") -> None:
        self._line, self._style = _bounded(line), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(self._line, style=self._style, no_wrap=True, overflow="ignore")


class Wrapped:
    """Text wrapped at a margin (`hang`: margin of all lines but the first), without padding."""

    def __init__(self, text: str, *, margin: int, hang: int | None = None, style: str = "") -> None:
        self._text, self._style = _bounded(text), style
        self._first, self._rest = " " * margin, " " * (margin if hang is None else hang)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        import textwrap

        for line in self._text.splitlines():
            # Not rich's own wrapping: it pads each line to the full width, which shows when pasted.
            wrapped = textwrap.fill(
                line,
                min(options.max_width, _WIDEST),
                initial_indent=self._first,
                subsequent_indent=self._rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
            yield from Whole(wrapped, style=self._style).__rich_console__(console, options)


_BAR = 20  # columns


class Progress:
    """What is going on, on stderr: one changing line on a terminal, a line for each piece of news in a pipe."""

    def __init__(self) -> None:
        self._status: Status | None = None
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console

            console = Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
            self._status = console.status("starting")
            self._status.start()

    def __enter__(self) -> Self:
        return self

    def news(self, text: str) -> None:
        """Report a step; in a pipe it stays as a line of the log."""
        if self._status is not None:
            self._status.update(harmless(text, None))
        else:
            say(f"distdiag: {text}")

    def now(self, text: str, share: float | None = None) -> None:
        """Show the pending step, with a progress bar if `share` is known; only on a terminal."""
        if self._status is not None:
            full = round(_BAR * (share or 0.0))
            bar = "" if share is None else "\u2501" * full + "\u2500" * (_BAR - full) + " "
            self._status.update(bar + harmless(text, None))

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()


def _discard(stream: TextIO) -> None:
    # Python flushes its streams once more at its end, and would complain then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _as_json(document: dict[str, object]) -> str:
    text = json.dumps(document, indent=2)
    if "\\ud" in text:  # a lone surrogate, as in a name outside UTF-8: other programs reject the whole document
        whole = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
        text = json.dumps(json.loads(whole), indent=2)
    return text + "\n"


def _head(command: str, exit_code: int) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "version": __version__,
        "command": command,
        "exit_code": exit_code,
    }


def _envelope(report: Report[Data], code: int) -> dict[str, object]:
    import msgspec

    return {
        **_head(report.command, code),
        "verdict": report.verdict,
        "summary": report.summary,
        "findings": msgspec.to_builtins([_pasteable(finding) for finding in report.findings]),
        "data": msgspec.to_builtins(report.data),
    }


def _pasteable(finding: Finding) -> Finding:
    """Adapt the commands of a fix to this installation."""
    if finding.fix is None or not finding.fix.commands:
        return finding
    return replace(finding, fix=replace(finding.fix, commands=tuple(map(as_called, finding.fix.commands))))


def as_page(
    report: Report[Data], view: Callable[[Report[Data]], Iterable[RenderableType]], *, findings_in_view: bool
) -> str:
    """Return a report as people read it, for a file: no colours, 100 columns."""
    return _render(report, view, whole=findings_in_view, file_width=100)


def _is_colour_forced() -> bool:
    """Return whether colours are forced in pipes: https://force-color.org, https://bixense.com/clicolors."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))


def _render(
    report: Report[Data],
    view: Callable[[Report[Data]], Iterable[RenderableType]],
    *,
    whole: bool,
    file_width: int | None = None,
) -> str:
    from rich.console import Console

    # Rendered to a string first, so that output is complete, and only `emit` handles a broken stdout.
    page = io.StringIO()
    # Open MPI gives its processes a terminal, even with redirected output.
    on_terminal = sys.stdout is not None and sys.stdout.isatty() and "OMPI_COMM_WORLD_SIZE" not in os.environ
    console = Console(
        file=page,
        force_terminal=(on_terminal or _is_colour_forced()) and file_width is None,
        width=file_width,
        markup=False,
        highlight=False,
        emoji=False,
    )
    verdict = report.verdict.upper()
    console.print(f"distdiag {report.command}: {verdict}", style=_style(report.verdict))
    for part in view(report):
        console.print(part, crop=False)
    if whole:
        return _tidy(page.getvalue())
    # Readers look at the end of the output: the verdict and its fix are printed last (the sort is stable).
    findings = sorted(reversed(report.findings), key=_least_first)
    is_last = findings and (findings[-1].level in (Level.FAIL, Level.UNKNOWN) or findings[-1].title == report.summary)
    worst = findings.pop() if is_last else None
    for finding in findings:
        _print_finding(console, finding, finding.level, finding.title)
    if worst is not None:
        _print_finding(console, worst, verdict, report.summary)
    else:
        console.print()
        _print_text(console, f"{verdict}: {report.summary}", indent=0, style=_style(report.verdict))
    return _tidy(page.getvalue())


def _tidy(page: str) -> str:
    """Strip trailing blanks, rich's padding of tables, and merge empty lines."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" +$", "", page, flags=re.MULTILINE))


def _least_first(finding: Finding) -> int:
    return (Level.INFO, Level.WARN, Level.UNKNOWN, Level.FAIL).index(finding.level)


def _print_finding(console: Console, finding: Finding, level: str, title: str) -> None:
    console.print()
    console.print(f"{level.upper()}  {finding.id}", style=_style(level.lower()))
    _print_text(console, title)
    _print_text(console, finding.detail)
    for line in finding.evidence:
        # Whole in a pipe, so that it can be searched.
        if console.is_terminal:
            console.print(Wrapped(line, margin=4, hang=6), crop=False)
        else:
            console.print("    " + _bounded(line), soft_wrap=True)
    if finding.fix is not None:
        _print_text(console, finding.fix.labelled)
        for command in finding.fix.commands:
            console.print("    " + as_called(command), soft_wrap=True)


def _print_text(console: Console, text: str, *, indent: int = 2, style: str = "") -> None:
    if text:
        console.print(Wrapped(text, margin=indent, style=style), crop=False)


def _style(level: str) -> str:
    return {"fail": "bold red", "warn": "bold yellow", "unknown": "bold yellow", "ok": "bold green"}.get(level, "bold")
