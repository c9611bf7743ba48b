"""The command line of bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.errors import UsageError
from distdiag.options import JobOpt, JsonOpt, StrictOpt, UserOpt, called_as, on_hosts, parse_size

if TYPE_CHECKING:
    from distdiag.commands.bundle.types import Bundle, Request
    from distdiag.report import Report


@on_hosts
def bundle(
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write: FILE.tar.gz. [default: distdiag-bundle-TIME.tar.gz here]",
        ),
    ] = "",
    job: JobOpt = "",
    user: UserOpt = "",
    logs: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="More log files on the hosts."),
    ] = None,
    recorder: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Flight recorder dumps on the hosts, or the folder with dumps and pipes."),
    ] = None,
    max_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file to write; logs are cut first.")] = "20MiB",
    timeout: Annotated[float, typer.Option(min=10.0, max=3600.0, metavar="SECONDS", help="Overall time limit.")] = 60.0,
    show: Annotated[
        bool, typer.Option("--show", help="Print the redacted text of all files to stdout before it is packed.")
    ] = False,
    as_json: JsonOpt = False,
    strict: StrictOpt = False,
    *,
    cluster: Cluster,
) -> None:
    """Collect all evidence of a job in one redacted file, for a ticket or a colleague.

    Takes the ranks of one job and their launchers; if several jobs are running, --job must name one. The job is not
    stopped. Names of hosts and users, addresses, home folders and secrets become placeholders (host-1, 10.0.0.1,
    user-1); the map stays here, in FILE.map.json. The report lists which rules found secrets.

    hang, pyspy-all, doctor and cuda-env read the file, on any machine: distdiag hang --from FILE.

    Exit status: 0 written, 2 wrong usage, or several jobs and no --job, 3 no host returned facts, 130 interrupted.

    \b
    Examples:
      distdiag bundle                                   # the job on this node
      distdiag bundle --slurm-job 4711 -o hung.tar.gz   # all nodes of the job
      distdiag bundle --show -o hung.tar.gz             # read what is packed
    """
    from distdiag.commands.bundle.types import COMMAND
    from distdiag.output import Output, deliver

    def request() -> Request:
        from distdiag.commands.bundle.types import Request

        if show and as_json:
            raise UsageError("--show prints text, and --json prints one document", hint="leave out one of them")
        return Request(
            program=called_as(),
            cluster=cluster,
            target=_target(output),
            job=job,
            user=user,
            logs=tuple(logs or ()),
            recorder=tuple(recorder or ()),
            timeout_s=timeout,
            most_bytes=parse_size(max_size),
        )

    made: list[Request] = []

    def report() -> Report[Bundle]:
        made.append(request())
        return _write(made[0], show=show)

    def view(found: Report[Bundle]) -> list[object]:
        from distdiag.commands.bundle.view import bundle_view

        return list(bundle_view(found, made[0]))

    deliver(COMMAND, report, view, Output(json=as_json, strict=strict))  # type: ignore[arg-type]


def _target(output: str) -> str:
    """Return the file to write. Raises UsageError."""
    import os
    import time

    name = output or f"distdiag-bundle-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"
    if not name.endswith((".tar.gz", ".tgz")):
        raise UsageError(f"-o {name}: not the name of a bundle", hint="call it FILE.tar.gz")
    folder = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"-o {name}: cannot write to {folder}", hint="choose a writable folder")
    return name


def _write(request: Request, *, show: bool) -> Report[Bundle]:
    """Collect, redact, show and write. Raises DistdiagError; typer.Exit if another process of the launcher does it."""
    import json
    import time
    from dataclasses import replace

    from distdiag.commands.bundle.collect_all import collect, find_job
    from distdiag.commands.bundle.compose import as_text, compose, packed
    from distdiag.commands.bundle.diagnose import diagnose
    from distdiag.commands.bundle.types import Bundle
    from distdiag.files import write_whole
    from distdiag.output import Progress, emit, is_done_by_another

    if is_done_by_another():
        raise typer.Exit(0)
    with Progress() as progress:
        job = find_job(request, progress)
        details, collected = collect(replace(request, job=request.job or (job.name if job else "")), progress)
        progress.news("redacting")
        composed, redactor = compose(request, job, details, collected)
    if show:
        emit(as_text(composed))
    with Progress() as progress:
        progress.news("packing")
        data = packed(request, composed, redactor, time.time())
    map_file = f"{request.target}.map.json"
    write_whole(map_file, json.dumps(redactor.map, indent=1).encode("utf-8", "replace"))
    write_whole(request.target, data)

    def at_home(stand_in: str) -> str:
        return redactor.map.get(stand_in, stand_in)

    here = {each.part.name: each.report.summary for each in collected if each.report is not None}
    made = Bundle(
        file=request.target,
        bytes=len(data),
        map_file=map_file,
        hosts=tuple(map(at_home, composed.hosts)),
        missing=tuple(map(at_home, composed.missing)),
        verdicts=tuple(replace(verdict, summary=here[verdict.command]) for verdict in composed.verdicts),
        job=job,
        members=composed.members(),
        cut=tuple(composed.cut),
        secrets=sum(redactor.secrets.values()),
        replaced=redactor.secrets,
        stand_ins=len(redactor.map),
    )
    errors = [f"{each.part.name}: {each.error}" for each in collected if each.error]
    missing = {at_home(host): why for host, why in composed.missing.items()}
    report = diagnose(request, made, missing, errors)
    interrupted = details.interrupted or any(each.gathered.interrupted for each in collected)
    return replace(report, interrupted=interrupted)
