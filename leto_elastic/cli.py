"""The command `leto`: `leto run` is torchrun with leto's agent and without the seam into torchrun's launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from leto_elastic import __version__

_RUN_SETTINGS = {"ignore_unknown_options": True, "help_option_names": []}


def main() -> None:
    """Entry point of the command. A job runs after click is done, so that a failed job's traceback is short."""
    try:
        chosen: Callable[[], None] | int | None = commands.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(1)
    if callable(chosen):
        chosen()
    elif chosen is not None:
        sys.exit(chosen)


@click.group()
@click.version_option(__version__, prog_name="leto")
def commands() -> None:
    """Repairs a training job in place."""


@commands.command(context_settings=_RUN_SETTINGS, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(arguments: tuple[str, ...]) -> Callable[[], None]:
    """Run a script with torchrun's own arguments (see torchrun --help)."""

    def job() -> None:
        from leto_elastic.launch.direct import launch

        launch(list(arguments))

    return job


@commands.command()
@click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="etcd of the job, as for torchrun.")
@click.option("--rdzv-id", required=True, help="Run id of the job.")
@click.option("--rdzv-conf", default="", metavar="K=V,...", help="How to be let in to etcd, as for torchrun.")
@click.option("--json", "json", is_flag=True, help="As JSON instead of a table.")
def shards(rdzv_endpoint: str, rdzv_id: str, rdzv_conf: str, json: bool) -> None:
    """Show the protected state of a job: version, state and holders of each rank's pieces."""
    import asyncio

    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    from leto_elastic.coordinator.settings import EtcdSettings
    from leto_elastic.errors import LetoError
    from leto_elastic.observe import shards as shard_map

    try:
        settings = EtcdSettings.parse(rdzv_endpoint, _parse_rendezvous_config(rdzv_conf))
        if settings is None:
            raise click.UsageError("give the etcd of the job: --rdzv-endpoint=HOST:PORT")
        records = asyncio.run(shard_map.read(settings, rdzv_id))
    except (LetoError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if not records:
        raise click.ClickException(f"run {rdzv_id!r} on etcd at {settings.where} has no protected state")
    click.echo(shard_map.as_json(records) if json else shard_map.table(records))


@commands.command()
@click.option("--yes", is_flag=True, help="Remove what is listed.")
@click.option(
    "--dir",
    "dirs",
    multiple=True,
    default=("/dev/shm",),  # noqa: S108
    metavar="PATH",
    help="Where states are (state.dir).",
)
@click.option("--json", "json", is_flag=True, help="As JSON instead of a table.")
def clean(yes: bool, dirs: tuple[str, ...], json: bool) -> None:
    """List what dead agents of yours have left on this host, and remove it with --yes; living ones are not touched."""
    import tempfile
    from pathlib import Path

    from leto_elastic.launch import leftovers

    temporary = sorted({Path(tempfile.gettempdir()), Path("/tmp")})  # noqa: S108
    found = leftovers.find([Path(path) for path in dirs], temporary)
    if json:
        click.echo(leftovers.as_json(found))
    else:
        click.echo(leftovers.table(found) if found else "nothing is left of dead agents")
    if yes:
        kept = [leftover.path for leftover in found if not leftovers.remove(leftover)]
        for path in kept:
            click.echo(f"leto: {path} is in use by now, or gone", err=True)
        click.echo(f"removed {len(found) - len(kept)} of {len(found)}", err=True)


if __name__ == "__main__":
    main()
