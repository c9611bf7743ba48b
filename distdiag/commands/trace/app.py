"""The subcommands of `distdiag trace`: one line for each."""

from __future__ import annotations

import typer

from distdiag.commands.trace.blocked.command import blocked
from distdiag.commands.trace.fds.command import fds
from distdiag.commands.trace.py.command import trace_py
from distdiag.commands.trace.show.command import trace_show
from distdiag.commands.trace.sys.command import trace_sys

app = typer.Typer(
    name="trace",
    help="What did each rank do last: its system calls, its lines of Python; and what is it blocked on?",
    short_help="What is every rank blocked on, and what did it do last? (blocked, fds, py, show, sys)",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command("blocked", short_help="Who is blocked on what, and which rank do all of them wait for?")(blocked)
app.command("fds", short_help="What do the file descriptors of a process point to, and who has the other ends?")(fds)
app.command("py", short_help="Run a job and keep the last lines of Python of every thread of every rank.")(trace_py)
app.command("show", short_help="Where was, or is, each rank? The last lines that trace py kept.")(trace_show)
app.command("sys", short_help="System calls of ranks that run, of a job to start, or of logs of strace.")(trace_sys)
