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


if __name__ == "__main__":
    main()
