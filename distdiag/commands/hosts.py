"""`distdiag help hosts`: the options for hosts, which most commands share."""

from __future__ import annotations

import typer

from distdiag.cluster.targets import Cluster  # noqa: TC001 - on_hosts reads the annotations
from distdiag.options import on_hosts


@on_hosts
def hosts(ctx: typer.Context, *, cluster: Cluster) -> None:
    """Choose the hosts of a command and the way to reach each.

    Most commands take these options. Without one, a command reads this machine, or all nodes of its SLURM
    allocation. Nothing is installed on a host; it needs Python 3.9 or newer.

    DISTDIAG_HOSTS, DISTDIAG_PYTHON, DISTDIAG_SETUP and so on set a default for an option; so do files, see
    `distdiag config`.

    \b
    Examples:
      distdiag hang --hosts node[1-4],gpu7         # over ssh
      distdiag hang --slurm-job 4711               # by srun
      distdiag hang --kube pytorchjob/train        # by kubectl
      distdiag hang --hosts node[1-4] --setup 'source ~/env.sh'
    """
    typer.echo(ctx.get_help())
