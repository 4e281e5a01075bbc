"""torchrun's entry point (group `torchrun.handlers`, name `leto`).

torch loads this while it imports its own rendezvous package, so nothing heavy may be imported here; the entry point is
called without arguments and must return the same function each time, because registering another one is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The function that makes a rendezvous handler."""
    return create_handler


def create_handler(params: RendezvousParameters) -> RendezvousHandler:
    """The handler for torchrun's parameters; also has torchrun construct leto's agent.

    Raises SystemExit, after one line on stderr, when they or the installed torch cannot work.
    """
    from leto_elastic.errors import ConfigError
    from leto_elastic.launch import seam
    from leto_elastic.launch.agent import refuse
    from leto_elastic.launch.rendezvous import LetoRendezvousHandler, parameters_of

    try:
        seam.check_torch()
        handler = LetoRendezvousHandler(parameters_of(params))
        seam.install()
    except ConfigError as error:
        refuse(error)
    return handler
