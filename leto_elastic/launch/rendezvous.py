"""torchrun's rendezvous for backend `leto`: parameters in, a complete `RendezvousHandler` out.

Meeting is trivial on one node; the parameters are what matters. All of `--rdzv-endpoint`, `--rdzv-id` and `--rdzv-conf`
is read and checked here, before anything is started.
"""

from __future__ import annotations

import difflib
import socket
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

_OURS = ("config", "run_dir", "domain")
_TORCH = ("timeout",)
"""Put in by torchrun itself."""


@dataclass(frozen=True, slots=True)
class LaunchParameters:
    """What the command line says about the rendezvous, checked.

    `run_dir` None: the default. `etcd` None: the agent starts one of its own. `nodes`: least and most. `address`: of
    this node, as others reach it. `domain`: what fails together with it, such as its rack.
    """

    run_id: str
    config: str | None
    run_dir: str | None
    etcd: EtcdSettings | None
    nodes: tuple[int, int] = (1, 1)
    address: str = "127.0.0.1"
    domain: str = ""


def parameters_of(params: RendezvousParameters) -> LaunchParameters:
    """Raises ConfigError when leto cannot work with them."""
    known = (*_OURS, *CONF_KEYS, *_TORCH)
    for key in params.config:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown key {key!r} in --rdzv-conf, known are {', '.join((*_OURS, *CONF_KEYS))}{hint}")
    conf: Mapping[str, str] = {key: str(value) for key, value in params.config.items() if key in CONF_KEYS}
    for key in _OURS:
        if params.config.get(key) == "":
            raise ConfigError(f"{key} in --rdzv-conf is empty; it takes a {'name' if key == 'domain' else 'path'}")
    etcd = EtcdSettings.parse(params.endpoint, conf)
    check_run_id(params.run_id, etcd)
    nodes = (params.min_nodes, params.max_nodes)
    if etcd is None and nodes != (1, 1):
        raise ConfigError(
            f"--nnodes={nodes[0]}:{nodes[1]} needs an etcd where the nodes meet: give --rdzv-endpoint=HOST:PORT"
        )
    return LaunchParameters(
        nodes=nodes,
        address=address_of(params.local_addr, etcd),
        domain=params.config.get("domain", ""),
        run_id=params.run_id,
        config=params.config.get("config"),
        run_dir=params.config.get("run_dir"),
        etcd=etcd,
    )


def address_of(local: str | None, etcd: EtcdSettings | None) -> str:
    """The address at which other nodes reach this one: `--local-addr`, else that of the way to etcd.

    Raises ConfigError when `local` cannot be resolved, or is no address of this machine.
    """
    if not local:
        return _towards(etcd) if etcd is not None else "127.0.0.1"
    try:
        family, kind, _, _, where = socket.getaddrinfo(local, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as error:
        raise ConfigError(f"--local-addr={local} cannot be used: {error.strerror or error}") from error
    return str(where[0])


def _towards(etcd: EtcdSettings) -> str:
    for endpoint in etcd.endpoints:
        host, _, port = endpoint.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        except OSError:
            continue  # the coordinator tells about endpoints that do not work
        for family, kind, _, _, where in found:
            with socket.socket(family, kind) as probe:
                try:
                    probe.connect(where)  # sends nothing
                except OSError:
                    continue
                return str(probe.getsockname()[0])
    return "127.0.0.1"


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
