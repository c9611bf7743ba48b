"""The shared path of all commands that inspect nodes, from options to report.

options -> facts of all hosts (collected now, or --from) -> diagnose -> report

A command supplies the collection, diagnosis and view. Shared here: --save and --from, --json,
Ctrl-C with a partial report, unusable hosts, several names for one machine, protocol violations.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import typer

from distdiag import pages
from distdiag.agent.protocol import Collect
from distdiag.cluster.pod_findings import with_pods
from distdiag.cluster.pods import find_pods
from distdiag.cluster.targets import describe, find_targets
from distdiag.errors import DistdiagError, UsageError
from distdiag.facts.text import printable
from distdiag.files import make_folder
from distdiag.ids import Id
from distdiag.output import Output, Progress, deliver, is_done_by_another, of_interest
from distdiag.record import record
from distdiag.report import Finding, Fix, Level
from distdiag.saved_facts import Foreign, Gathered, read, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from distdiag.cluster.fleet import Fleet
    from distdiag.cluster.node import Node
    from distdiag.cluster.pods import Kube
    from distdiag.cluster.start_fleet import Agent
    from distdiag.cluster.targets import Cluster, Targets
    from distdiag.report import Report

Asked = TypeVar("Asked")
First = TypeVar("First")
Part = TypeVar("Part")
Facts = TypeVar("Facts")
Data = TypeVar("Data")
UNFINISHED = "not finished when interrupted"
_WAITED_FOR = 4
_NOTABLE_S = 2.0


@record(kw_only=True)
class Subcommand(Generic[Asked, Facts, Data]):
    """The parts of one command. Its request has `program` and `cluster`; its facts have `host`."""

    name: str
    request: type[Asked]
    facts: type[Facts]
    collect: Callable[[Asked, Progress], Gathered[Facts]]
    """Raises UsageError, or DistdiagError if the node side failed on this machine."""
    diagnose: Callable[[Asked, Gathered[Facts]], Report[Data]]
    """Pure."""
    view: Callable[[Asked, Gathered[Facts], Report[Data]], Iterable[RenderableType]]
    shown_as_typed: tuple[str, ...] = ()
    """Display options in the request: with --from, values typed now override the saved values."""
    foreign: Foreign[Facts] | None = None
    """Parser for another tool's files given to --from."""
    findings_in_view: bool = False
    saved_as: str = ""
    """Name of its saved facts, if not `name`."""
    page: pages.Reduce = pages.whole
    """Reduces the data of the report to that shown on the HTML page."""
    by_every_rank: bool = False
    """Every process started by a launcher runs the command; else rank 0 alone."""


@record
class Options:
    """The options shared by all commands."""

    as_json: bool = False
    strict: bool = False
    save: str = ""
    from_: Sequence[str] | None = None
    brief: bool = False
    """Print one line."""
    html: str = ""
    """Path of the HTML page to write."""


def run(
    subcommand: Subcommand[Asked, Facts, Data],
    make_request: Callable[[], Asked],
    options: Options,
    finish: Callable[[Report[Data]], Report[Data]] = lambda report: report,
) -> NoReturn:
    """Run the command, print its report, and exit with its status.

    `make_request` may raise UsageError. `finish` may add to the report before printing, or raise DistdiagError.
    """
    judged: list[tuple[Asked, Gathered[Facts]]] = []

    def report() -> Report[Data]:
        unsaved: list[DistdiagError] = []
        asked = make_request()
        if options.html:
            pages.check_place(options.html)
        request, gathered = facts_of(subcommand, asked, options, unsaved)
        judged.append((request, gathered))
        with _of_files(options):
            made = subcommand.diagnose(request, gathered)
            if gathered.pods or gathered.pods_error:
                made = with_pods(made, gathered.pods, gathered.pods_error)
        made = of_interest(finish(made))
        if options.html:
            pages.write_page(made, options.html, subcommand.page, strict=options.strict)
        return not_saved(made, unsaved[0]) if unsaved else made

    def view(made: Report[Data]) -> Iterable[RenderableType]:
        with _of_files(options):
            return list(subcommand.view(*judged[0], made))

    output = Output(
        json=options.as_json,
        strict=options.strict,
        findings_in_view=subcommand.findings_in_view,
        brief=options.brief,
    )
    deliver(subcommand.name, report, view, output)


@contextlib.contextmanager
def _of_files(options: Options) -> Iterator[None]:
    """Attribute any exception to the input files, which may be arbitrarily inconsistent."""
    try:
        yield
    except DistdiagError:
        raise
    except Exception as error:
        if not options.from_:
            raise
        raise DistdiagError(
            f"the saved facts are inconsistent: {type(error).__name__}: {printable(str(error)[:200])}",
            hint="save them again; if the files were not edited, please report this and attach them",
        ) from error


def not_saved(report: Report[Data], error: DistdiagError) -> Report[Data]:
    """Add a file that could not be written to the report as a finding, so that the diagnosis is not lost."""
    fix = Fix(text=error.hint) if error.hint else None
    failed = Finding(id=Id.DISTDIAG_NOT_SAVED, level=Level.UNKNOWN, title=str(error), fix=fix)
    return replace(report, findings=(*report.findings, failed), summary=f"{report.summary}; {error}")


def facts_of(
    subcommand: Subcommand[Asked, Facts, Any],
    request: Asked,
    options: Options,
    unsaved: list[DistdiagError] | None = None,
) -> tuple[Asked, Gathered[Facts]]:
    """Collect and save the facts; or read saved facts, with the original request.

    A failed save does not lose the facts: the error is appended to `unsaved`, if given.

    Raises:
        UsageError: the options contradict each other, or a file cannot be read or written.
        DistdiagError: this machine's node side failed.
        typer.Exit: another process of the same launcher does the work.
    """
    if options.from_:
        return _read(subcommand, request, options)
    if not subcommand.by_every_rank and is_done_by_another():
        raise typer.Exit(0)
    if options.save:
        make_folder("--save", options.save)
    with Progress() as progress:
        gathered = subcommand.collect(request, progress)
        kube: Kube | None = getattr(getattr(request, "cluster", None), "kube", None)
        if kube is not None:
            gathered = _with_pods_now(kube, gathered, progress)
    if options.save:
        try:
            save(options.save, subcommand.saved_as or subcommand.name, request, gathered)
        except DistdiagError as error:
            if unsaved is None:
                raise
            unsaved.append(error)
    return request, gathered


def _with_pods_now(kube: Kube, gathered: Gathered[Facts], progress: Progress) -> Gathered[Facts]:
    """Query the pods again at the end: one may have been killed meanwhile."""
    progress.now("reading the states of the pods")
    if gathered.interrupted:
        return gathered
    try:
        return replace(gathered, pods=find_pods(kube))
    except DistdiagError as error:
        return replace(gathered, pods_error=str(error))
    except KeyboardInterrupt:
        return replace(gathered, interrupted=True)


def _read(
    subcommand: Subcommand[Asked, Facts, Any],
    request: Any,  # noqa: ANN401 - a dataclass
    options: Options,
) -> tuple[Asked, Gathered[Facts]]:
    if options.save or request.cluster.typed():
        raise UsageError(
            "--from cannot be combined with --save or options for hosts",
            hint="--from analyzes saved facts: leave them out",
        )
    types = (subcommand.request, subcommand.facts)
    saved: Any
    saved, gathered = read(options.from_ or (), subcommand.saved_as or subcommand.name, types, subcommand.foreign)
    if saved is None:
        return (subcommand.foreign.request(request) if subcommand.foreign is not None else request), gathered
    typed = {name: getattr(request, name) for name in subcommand.shown_as_typed}
    defaults = {field.name: field.default for field in fields(request)}
    changed = {name: value for name, value in typed.items() if value != defaults[name]}
    return replace(saved, program=request.program, **changed), gathered


@record(kw_only=True)
class Asks:
    """Requests by host, each of the type that the collect module's `more` declares, and one time limit for all."""

    by_host: Mapping[str, object]
    timeout_s: float
    doing: str = ""
    """Progress line, overriding that of the question."""
    steps: int = 0
    """Number of equal steps on each node, `step_s` each; 0 if unknown."""
    step_s: float = 0.0


@record(kw_only=True)
class Question(Generic[First, Part, Facts]):
    """A two-step query: each node first reports its basics, then receives a request."""

    part: type[Part]
    """Type of a node's answer; a node may send several."""
    plan: Callable[[Mapping[str, First], bool], Asks]
    """Maps the first reports to the request for each host: `plan(reports, local)`, local: only this machine.

    Omitted hosts receive no request. May raise DistdiagError.
    """
    join: Callable[[str, First, Sequence[Part], str], Facts | None]
    """Combines the reports of a host, and the reason for incomplete ones, into its facts; None: no facts."""
    doing: str = ""
    """Progress line; empty for quick queries."""
    each_name: bool = False
    """Query a machine under each of its names, which may lead to different environments."""
    before: Callable[[Mapping[str, Node]], object] = lambda _: None
    """Called first, with the nodes to be queried."""
    timed: Callable[[Part, float, float], Part] = lambda part, *_: part
    """Called with each answer, and the times of request and receipt, by this machine's clock (s)."""
    together: Callable[[Fleet, Mapping[str, Node], Sequence[Facts]], list[Facts]] | None = None
    """Called last, with the nodes by host; adds facts about connections between nodes."""


def gather(
    cluster: Cluster,
    agent: Agent,
    question: Question[First, Part, Facts],
    progress: Progress,
    again: Callable[[Gathered[Facts]], bool] = lambda _: False,
) -> Gathered[Facts]:
    """Connect to this machine or all target hosts, and query in parallel; repeat while `again` returns true.

    Ctrl-C ends it early, returning the facts received by then.

    Raises:
        UsageError: the options contradict each other.
        DistdiagError: the node side failed on this machine; or as raised by `plan`.
    """
    from distdiag.cluster.start_fleet import open_fleet  # with --from there is none

    targets = find_targets(cluster, os.environ)
    local = targets.launcher is None
    with open_fleet(cluster, targets, agent) as fleet:
        talk = _Exchange(fleet, question, progress, local=local)
        interrupted, gathered = False, None
        try:
            reach(fleet, targets, progress)
            talk.go()
            while again(gathered := talk.gathered()):
                talk.go()
            if question.together is not None and gathered is not None:
                gathered.facts = question.together(fleet, talk.nodes, gathered.facts)
        except KeyboardInterrupt:
            if not talk.nodes:
                raise
            interrupted = True
        gathered = gathered or talk.gathered()
        return replace(
            gathered, rows=() if local else fleet.rows, refusals=dict(fleet.refusals), interrupted=interrupted
        )


def merged(parts: Sequence[Part]) -> dict[str, Any]:
    """Join the messages of a node by field: tuples and dictionaries together, of other fields the first that is set.

    The result is the keyword arguments of the node's record, whose fields are those of its messages.
    """
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(parts[0])) if parts else ():  # type: ignore[arg-type]
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], tuple):
            found[name] = tuple(itertools.chain.from_iterable(values))
        elif isinstance(values[0], dict):
            found[name] = {key: value for own in values for key, value in own.items()}
        else:
            found[name] = next(filter(None, values), values[0])
    return found


def gather_once(cluster: Cluster, agent: Agent, progress: Progress) -> Gathered[Any]:
    """Collect the first reports of all nodes, for commands without a second step; facts have `host`.

    Raises:
        UsageError: the options contradict each other.
        DistdiagError: the node side failed on this machine.
    """
    question = Question[Any, Any, Any](
        part=agent.facts,
        plan=lambda *_: Asks(by_host={}, timeout_s=0.0),
        join=lambda host, facts, *_: replace(facts, host=host),
    )
    return gather(cluster, agent, question, progress)


def reach(fleet: Fleet, targets: Targets, progress: Progress) -> None:
    """Connect to the hosts, showing progress."""
    if targets.launcher is not None:
        progress.news(f"connecting to {describe(targets)}")
        fleet.gather(lambda now: progress.now(f"connecting, {len(now.up)} of {_count(len(now.hosts), 'host')}"))
    else:
        fleet.gather(lambda _: None)


def named(nodes: Iterable[Node], *, local: bool) -> dict[str, Node]:
    """Return nodes by host: by the names used to select hosts, or the host name of this machine."""
    found: dict[str, Node] = {}
    for node in nodes:
        host = node.reply.host if local else node.host
        found[host if host not in found else node.name] = node
    return found


class _Exchange(Generic[First, Part, Facts]):
    def __init__(
        self, fleet: Fleet, question: Question[First, Part, Facts], progress: Progress, *, local: bool
    ) -> None:
        self._fleet, self._question, self._progress, self._local = fleet, question, progress, local
        self.nodes: dict[str, Node] = {}
        self._parts: dict[str, list[Part]] = {}
        self._missing: dict[str, str] = {}
        self._asked_at: dict[str, float] = {}
        self._plan = Asks(by_host={}, timeout_s=0.0)

    def go(self) -> None:
        machines = self._fleet.machines(local=self._local)  # raises if this machine, alone, is unusable
        self.nodes = named(self._fleet.up if self._question.each_name else machines, local=self._local)
        self._plan = plan = self._question.plan({host: node.reply for host, node in self.nodes.items()}, self._local)
        asked = {host: self.nodes[host] for host in plan.by_host}
        self._question.before(asked)
        self._parts = {}
        for host, node in asked.items():
            self._asked_at[host] = time.time()
            node.order(Collect(ask=plan.by_host[host]))
            self._missing[host] = UNFINISHED
        if asked and self._doing:
            self._progress.news(self._doing)
        hosts = {node.name: host for host, node in asked.items()}
        for node, part, why in self._fleet.more_from(asked.values(), self._question.part, plan.timeout_s, self._tell):
            if part is not None:
                host, read_at = hosts[node.name], time.time() - (time.monotonic() - node.heard_at)
                timed = self._question.timed(part, self._asked_at[host], read_at)
                self._parts.setdefault(host, []).append(timed)
            else:
                self._missing[hosts[node.name]] = why or ""

    def gathered(self) -> Gathered[Facts]:
        missing = {host: why for host, why in self._missing.items() if why}
        each = (
            self._question.join(host, node.reply, self._parts.get(host, ()), missing.get(host, ""))
            for host, node in self.nodes.items()
        )
        return Gathered(facts=[facts for facts in each if facts is not None], missing=missing)

    @property
    def _doing(self) -> str:
        doing = self._plan.doing or self._question.doing
        return doing if self._local or not doing else f"{doing} on {_count(len(self._plan.by_host), 'host')}"

    def _tell(self, names: Sequence[str]) -> None:
        """Show progress by steps, finished hosts, or time."""
        total, elapsed_s = len(self._plan.by_host), time.time() - min(self._asked_at.values())
        steps, done = self._plan.steps, total - len(names)
        if total > 1 and done:
            more = " ..." if len(names) > _WAITED_FOR else ""
            waiting = f", waiting for {', '.join(names[:_WAITED_FOR])}{more}" if names else ""
            self._progress.now(f"{self._doing}, {done} of {total} done{waiting}", done / total)
        elif steps > 1 and elapsed_s < steps * self._plan.step_s:
            step = 1 + int(elapsed_s / self._plan.step_s)
            self._progress.now(f"{self._doing}, {step} of {steps}", step / steps)
        elif elapsed_s >= _NOTABLE_S:
            self._progress.now(f"{self._doing}, {elapsed_s:.0f} s")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
