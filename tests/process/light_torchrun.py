"""torchrun, but the zygote imports nothing, so that scripts without torch start at once."""

from __future__ import annotations

import functools
import sys

from torch.distributed import run as torchrun

from leto_elastic.launch import supervisor
from leto_elastic.launch.forker import Forker

if __name__ == "__main__":
    supervisor.Forker = functools.partial(Forker, imports=())  # type: ignore[assignment,misc]
    torchrun.main(["--rdzv-backend=leto", *sys.argv[1:]])
