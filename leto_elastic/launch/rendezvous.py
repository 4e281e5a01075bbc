"""torchrun's rendezvous for backend `leto`: parameters in, a complete `RendezvousHandler` out.

Meeting is trivial on one node; the parameters are what matters. All of `--rdzv-endpoint`, `--rdzv-id` and `--rdzv-conf`
is read and checked here, before anything is started.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from torch._C._distributed_c10d import Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from leto_elastic.coordinator.settings import CONF_KEYS, EtcdSettings, check_run_id
from leto_elastic.errors import ConfigError
from leto_elastic.launch.stores import Stores

BACKEND = "leto"

_STORE_TIMEOUT = 300.0  # seconds that a client of a rendezvous's store waits for a key

_OURS = ("config", "run_dir")
_TORCH = ("timeout",)
"""Put in by torchrun itself."""


@dataclass(frozen=True, slots=True)
class LaunchParameters:
    """What the command line says about the rendezvous, checked.

    `run_dir` None: the default. `etcd` None: the agent starts one of its own.
    """

    run_id: str
    config: str | None
    run_dir: str | None
    etcd: EtcdSettings | None


def parameters_of(params: RendezvousParameters) -> LaunchParameters:
    """Raises ConfigError when leto cannot work with them."""
    if params.max_nodes != 1:
        raise ConfigError(
            f"--nnodes={params.min_nodes}:{params.max_nodes}: this version of leto repairs jobs on one node; "
            "use --nnodes=1"
        )
    known = (*_OURS, *CONF_KEYS, *_TORCH)
    for key in params.config:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown key {key!r} in --rdzv-conf, known are {', '.join((*_OURS, *CONF_KEYS))}{hint}")
    conf: Mapping[str, str] = {key: str(value) for key, value in params.config.items() if key in CONF_KEYS}
    for key in _OURS:
        if params.config.get(key) == "":
            raise ConfigError(f"{key} in --rdzv-conf is empty; it takes a path")
    etcd = EtcdSettings.parse(params.endpoint, conf)
    check_run_id(params.run_id, etcd)
    return LaunchParameters(
        run_id=params.run_id,
        config=params.config.get("config"),
        run_dir=params.config.get("run_dir"),
        etcd=etcd,
    )


class LetoRendezvousHandler(RendezvousHandler):
    """Of a single node. The store of a rendezvous is new each time and served by this process."""

    def __init__(self, parameters: LaunchParameters) -> None:
        self.parameters = parameters
        self._stores = Stores(_STORE_TIMEOUT)
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._closed:
            raise RendezvousClosedError
        address = self._stores.fresh()
        store: Store = self._stores.server
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(address.host, address.port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.parameters.run_id

    def shutdown(self) -> bool:
        self._closed = True
        self._stores.close()
        return True
