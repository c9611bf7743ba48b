"""Typer with lazily imported commands, grouped help, and defaults from files and variables.

Typer has no lazy commands, so this subclasses its non-public classes. Typer vendors Click: classes of the package click
do not match. Commands that pass words on to a second program have no completion of options.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer import _completion_classes, _completion_shared
from typer._click.exceptions import NoSuchOption
from typer._click.types import FloatRange, IntRange
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from distdiag import interrupts
from distdiag.errors import Interrupted
from distdiag.output import choose_findings, choose_markdown, say
from distdiag.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from distdiag.defaults import Default

_FOLDED = {"Hosts": (("hosts", "slurm_job", "kube"), "All host options: distdiag help hosts")}
"""Panels of options that -h shows in part: these options, and where the others are."""
_MEANT = {
    "--timeout": {"--stall", "--sample-timeout", "--tool-timeout", "--read-timeout", "--connect-timeout"},
    "--for": {"--goal", "--timeout"},
    "--nproc-per-node": {"--nproc"},
    "--nodes": {"--hosts"},
}
"""Words that are an option elsewhere, and the options meant by them where they are not."""
_ALIKE = 0.75
"""Least difflib ratio between a mistyped option and a suggested one."""
IntRange.name, FloatRange.name = "whole number", "number"  # "'x' is not a valid ..."
_ZSH = (
    _completion_shared.COMPLETION_SCRIPT_ZSH.partition("\ncompdef ")[0]
    + """
if [ "$funcstack[1]" = _%(prog_name)s ]; then
  %(complete_func)s "$@"
else
  compdef %(complete_func)s %(prog_name)s
fi
"""
)
"""Typer's script completes nothing at the first TAB if zsh autoloads it."""
_completion_shared._completion_scripts["zsh"] = _completion_classes.ZshComplete.source_template = _ZSH


@record
class Sub:
    """One subcommand.

    `home`: module below distdiag.commands and function, by default NAME.command:NAME; empty for a group. `starts_job`:
    its first word that is no option begins another program's command line, with or without `--`. `about`: shown on its
    own page instead of `help`, where it only has subcommands. `below`: its subcommands: `distdiag overflow show FILE`.
    """

    name: str
    help: str
    home: str = "{name}.command:{name}"
    starts_job: bool = False
    about: str = ""
    below: tuple[Sub, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", self.home.format(name=self.name.replace("-", "_")))


Groups = dict[str, tuple[Sub, ...]]
"""Subcommands by help group title."""


@dataclass
class Invocation:
    """What is known of the command line so far; each context has it as its `obj`."""

    words: Sequence[str]
    command: str = ""
    parsed_json: bool | None = None
    used: tuple[Default, ...] = ()
    """Defaults from files and variables that this command line uses."""

    @property
    def as_json(self) -> bool:
        """Whether --json was given; of a command line that cannot be parsed, whether it has that word.

        What follows `--` is another program's.
        """
        return self.has("--json") if self.parsed_json is None else self.parsed_json

    def has(self, word: str) -> bool:
        """Return whether a word is typed before `--`."""
        words = list(self.words)
        return word in (words[: words.index("--")] if "--" in words else words)

    @property
    def is_for_all(self) -> bool:
        """Whether this process reports for all processes of a launcher, which share one stdout."""
        from distdiag.facts.process.rank_identity import identify

        me = identify(os.environ)
        return me is None or me.rank == 0 or me.launcher == "environment"


def load(subcommand: Sub, words: Sequence[str], typed: Invocation) -> Any:  # noqa: ANN401 - Typer's command is private
    """Import a subcommand, and return it as Typer's command; `words` follow its name."""
    if not subcommand.home or (words and words[0] in [below.name for below in subcommand.below]):
        return get_command(
            listing(subcommand.name, {"Commands": subcommand.below}, subcommand.about or subcommand.help)
        )
    module, _, function = subcommand.home.partition(":")
    program = typer.Typer(add_completion=False, rich_markup_mode=None)
    command = getattr(import_module(f"distdiag.commands.{module}"), function)
    settings = {"allow_interspersed_args": not subcommand.starts_job}
    program.command(subcommand.name, cls=_Command, context_settings=settings)(_interruptible(command, typed))
    made = get_command(program)
    names = [each.name for each in made.params]
    if "as_json" in names and "strict" in names:  # it prints a report
        chosen = [] if {"only", "ignore"} & {*names} else [_choice("only"), _choice("ignore")]
        made.params[names.index("as_json") + 1 : names.index("as_json") + 1] = [_markdown_option(), *chosen]
    return made


def _output_option(name: str, about: str, choose: Callable[[Any, Any], None], **settings: Any) -> TyperOption:  # noqa: ANN401
    """Return an option of every report; `choose` gets the context and the typed value, if any."""

    def callback(ctx: Any, parameter: Any, value: Any) -> None:  # noqa: ANN401
        if value and not ctx.resilient_parsing:
            choose(ctx, value)

    return TyperOption(
        param_decls=[f"--{name}"],
        expose_value=False,
        callback=callback,
        help=about,
        rich_help_panel="Output",
        **settings,
    )


def _markdown_option() -> TyperOption:
    def choose(ctx: Any, _: object) -> None:  # noqa: ANN401
        if ctx.find_root().obj.has("--json"):
            raise typer.BadParameter("use either --json or --markdown")
        choose_markdown()

    return _output_option(
        "markdown", "Print the report as Markdown, for a ticket.", choose, is_flag=True, default=False
    )


_CHOICES = {
    "only": ("ID", "Show only these findings: an id or its prefix. Repeatable."),
    "ignore": ("ID[=REASON]", "Ignore a finding, with an optional reason. Repeatable."),
}


def _choice(name: str) -> TyperOption:
    def choose(_: object, value: Sequence[str]) -> None:
        from distdiag.diagnosis.finding_ids import declared

        for id_ in (each.partition("=")[0].strip() for each in value):
            names = (known for each in declared() for known in (each, each.partition(".")[2]))
            if not any(f"{known}.".startswith(f"{id_}.") for known in names):
                raise typer.BadParameter(f"{id_!r} is not a finding id; see docs/reference/finding-ids.md")
        choose_findings(**{name: value})

    metavar, about = _CHOICES[name]
    return _output_option(name, about, choose, type=str, multiple=True, metavar=metavar)


def listing(
    name: str, groups: Groups, about: str, settings: dict[str, object] | None = None, *, first_screen: str = ""
) -> typer.Typer:
    """Return a group of subcommands; `first_screen`: printed instead of help if run without any."""
    program = typer.Typer(
        name=name,
        cls=_group(groups, first_screen),
        help=about,
        no_args_is_help=not first_screen,
        invoke_without_command=bool(first_screen),
        # Plain text: it pastes, reads the same in a pipe, and spares every TAB the import of rich.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=settings,
        add_completion=bool(first_screen),
    )
    program.callback()(lambda: None)
    for subcommand in (subcommand for group in groups.values() for subcommand in group):
        program.command(subcommand.name, short_help=subcommand.help)(_not_loaded)
    return program


def _not_loaded() -> None:
    raise RuntimeError("called a subcommand that is not loaded")


def _group(groups: Groups, first_screen: str) -> type[TyperGroup]:
    """Return a group that imports only the subcommand to call; for the others, names and help lines suffice."""
    by_name = {subcommand.name: subcommand for group in groups.values() for subcommand in group}

    class Group(TyperGroup):
        def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
            name, command, rest = super().resolve_command(ctx, args)
            if command is not None:
                ctx.obj.command = f"{ctx.obj.command} {name}".strip()
                command = load(by_name[str(name)], rest, ctx.obj)
            return name, command, rest

        def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:  # Typer would make a mere exit status of it
                raise Interrupted from None

        def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
            if first_screen and _is_short(ctx):
                formatter.write(first_screen)
            else:
                super().format_help(ctx, formatter)

        def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
            for title, group in groups.items():
                with formatter.section(title):
                    formatter.write_dl([(subcommand.name, subcommand.help) for subcommand in group])

    return Group


class _Command(TyperCommand):
    """A command whose usage shows required arguments as man pages do: A B, not {A} {B}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401
        pieces = super().collect_usage_pieces(ctx)
        return [piece[1:-1] if piece[:1] + piece[-1:] == "{}" else piece for piece in pieces]

    def parse_args(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        try:
            return self._parse(ctx, args)
        except NoSuchOption as wrong:
            wrong.possibilities = self._meant(wrong.option_name)
            raise

    def _meant(self, word: str) -> list[str]:
        """Return the options meant by a word that is none."""
        from difflib import SequenceMatcher

        options = [
            option for each in self.params for option in (*each.opts, *each.secondary_opts) if option[:2] == "--"
        ]
        if meant := [option for option in options if option in _MEANT.get(word, ())]:
            return meant
        part = word.strip("-")
        ratios = {option: SequenceMatcher(None, word, option).ratio() for option in options}
        near = [option for option in options if ratios[option] >= _ALIKE or (len(part) > 2 and part in option)]
        return sorted(near, key=lambda option: -ratios[option])[:2]

    def _parse(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        if ctx.resilient_parsing:  # TAB
            return super().parse_args(ctx, args)
        from distdiag import defaults

        typed = ctx.find_root().obj
        needed = [each for each in self.params if each.required and each.param_type_name == "option"]
        if isinstance(typed, Invocation) and (needed or defaults.exist()):
            given, _, _ = self.make_parser(ctx).parse_args(list(args))
            if "help" in given:
                return super().parse_args(ctx, args)
            typed.used = self._defaults(ctx, typed.command, given)
            ctx.default_map = {default.parameter: default.value for default in typed.used}
            missing = [each.opts[0] for each in needed if each.name not in {*given, *ctx.default_map}]
            if len(missing) > 1:
                example = (self.help or "").partition("Examples:\n")[2].strip().partition("\n")[0]
                ctx.fail(f"Missing options: {', '.join(missing)}. An example:\n  {example}")
        return super().parse_args(ctx, args)

    def _defaults(self, ctx: Any, name: str, given: Container[str]) -> tuple[Default, ...]:  # noqa: ANN401
        from distdiag import defaults

        try:
            files = defaults.files()
            for file in files:
                if file.ignored:
                    say(f"distdiag: {file.path} is ignored: {file.ignored}")
            of_command = defaults.of_command(name, self.params, files)
            refused = (each.option for each in of_command if each.is_refused and each.parameter not in given)
            if why := defaults.refusal(refused):
                say(f"distdiag: {why}")
            return defaults.chosen(name, self.params, given, files)
        except ValueError as wrong:
            raise typer.BadParameter(str(wrong)) from wrong

    def format_help_text(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        whole = self.help
        if _is_short(ctx) and whole:
            paragraphs = whole.split("\n\n")  # the last one has the examples
            self.help = "\n\n".join(dict.fromkeys((paragraphs[0], paragraphs[-1])))
        super().format_help_text(ctx, formatter)
        self.help = whole

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        panels: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            is_argument = parameter.param_type_name == "argument"
            title = getattr(parameter, "rich_help_panel", "") or ("Arguments" if is_argument else "Options")
            panels.setdefault(title, []).append(parameter)
        for title, parameters in sorted(panels.items(), key=lambda panel: panel[0] in _FOLDED):
            names, more = _FOLDED.get(title, ((), "")) if _is_short(ctx) else ((), "")
            shown = [each for each in parameters if not names or each.name in names]
            with formatter.section(title):
                formatter.write_dl([row for each in shown if (row := each.get_help_record(ctx)) is not None])
                if more:
                    formatter.write_text(more)
        if _is_short(ctx):
            formatter.write(f"\nExit status and all options: distdiag {ctx.find_root().obj.command} --help\n")


def _is_short(ctx: Any) -> bool:  # noqa: ANN401
    typed = ctx.find_root().obj
    return isinstance(typed, Invocation) and typed.has("-h") and not typed.has("--help")


def _interruptible(command: Callable[..., None], typed: Invocation) -> Callable[..., None]:
    """Return a command that can be interrupted once its --json is known."""

    @functools.wraps(command)
    def run(**options: Any) -> None:  # noqa: ANN401 - what Typer parsed
        typed.parsed_json = bool(options.get("as_json"))
        interrupts.release()
        if options.get("verbose"):
            for default in typed.used:
                say(f"distdiag: {default.option} {default.shown} from {default.origin}")
        command(**options)

    return run
