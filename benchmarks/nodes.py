"""Jobs of several nodes on this machine, and of a spare: leto's, and those of plain torchrun.

A node is an agent with an address of its own out of 127/8 and all processes of it; to lose one is a SIGKILL of all.
etcd, and for plain torchrun the store of its c10d rendezvous, run beside the nodes and are never lost. (Plain torchrun
usually has that store in the agent of a node, and the job is lost for good with it.)
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from jobs import MARK, ROOT, Training

sys.path.insert(0, str(ROOT))

from leto_elastic.testing.cluster import Cluster, Node
from tests.process.etcd_server import server
from tests.process.registry import Registry

PLAIN = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d")
CONF = {"is_host": "0", "join_timeout": "3600", "last_call_timeout": "1"}
LIFE = 7200.0
"""Seconds that a job may last."""


class Nodes(Training):
    """One job of `nodes` nodes in `directory`; a context manager that leaves no process behind.

    Args:
        system: "leto" or "plain".
        script: path of the training script, relative to the repository.
        options: the script's options.
        nodes: at first, spares not counted.
        ranks: of each node.
        policy: what differs from leto's default policy.
        conf: more keys of `--rdzv-conf` of plain torchrun.
        spares: nodes that stand by from `settle` on.
    """

    def __init__(
        self,
        system: str,
        script: str,
        options: list[str],
        directory: Path,
        *,
        nodes: int,
        ranks: int = 1,
        policy: Mapping[str, Any] | None = None,
        conf: Mapping[str, str] | None = None,
        spares: int = 0,
    ) -> None:
        super().__init__(system, nodes * ranks, directory)
        self.per_node = ranks
        self._script = str(ROOT / script)
        self._options = options
        self._count = nodes
        self._policy = policy or {}
        self._conf = conf or {}
        self._spares = spares
        self._started = 0  # spares, from the beginning on
        self._generation = -1
        self.leader_hit = False
        """Whether the last `strike` hit the node that led a leto job."""
        self._stack = ExitStack()

    # ---- life

    def __enter__(self) -> Self:
        with self._stack:
            self._cluster = self._stack.enter_context(self._leto() if self.system == "leto" else self._plain())
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.system == "plain":  # its workers outlive their agent
            for node in self._cluster.nodes:
                node.kill_all()
        self._stack.__exit__(kind, error, trace)

    def _leto(self) -> Cluster:
        policy = self.directory / "policy.yaml"
        policy.write_text(yaml.safe_dump(dict(self._policy)))
        etcd = self._stack.enter_context(server(self.directory / "etcd"))
        self._registry = Registry(etcd)
        nnodes = f"{self._count}:{self._count + self._spares}"
        return self._job(self._options, endpoint=etcd.endpoints, nnodes=nnodes, conf={"config": str(policy)})

    def _plain(self) -> Cluster:
        from torch.distributed import TCPStore
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._rendezvous = C10dRendezvousBackend(store, "job")
        options = [*self._options, f"--run-dir={self.directory}"]
        conf = CONF | dict(self._conf)
        return self._job(options, endpoint=f"127.0.0.1:{store.port}", nnodes=None, conf=conf, launcher=PLAIN)

    def _job(self, options: list[str], **arguments: Any) -> Cluster:
        env = {MARK: str(self.directory), "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "TMPDIR": str(self.directory)}
        return Cluster(
            self._script,
            *options,
            run_dir=self.directory,
            nodes=self._count,
            nproc=self.per_node,
            options=["--max-restarts=1000"],
            env=env | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # plain gloo restarts fail without it
            deadline=LIFE,
            grace=30.0,
            **arguments,
        )

    # ---- what it is

    def living(self) -> list[Node]:
        """The nodes that there are, spares included."""
        return [node for node in self._cluster.nodes if not node.ended(0)]

    def homes(self) -> list[tuple[Node, set[int]]]:
        """The nodes that train, each with its ranks."""
        pids = self.trainers()
        found = []
        for node in self.living():
            mine = {pid for pid, _ in node.processes()}
            ranks = {rank for rank, pid in enumerate(pids) if pid in mine}
            if ranks:
                found.append((node, ranks))
        return found

    def events(self) -> list[dict[str, Any]]:
        """The events of all nodes so far, by time; none for a plain job."""
        return self._cluster.events()

    def shards(self) -> list[Any]:
        """What leto says about the protection of each rank."""
        return self._registry.shards()

    # ---- waiting

    def wait_for(self, what: str, ready: Callable[[], Any], seconds: float) -> Any:
        """See `Training`. Raises JobError."""
        deadline = time.monotonic() + seconds

        def look() -> Any:
            if found := ready():
                return found
            if time.monotonic() > deadline:
                raise self._cluster.error(f"{self.system} job: no {what} within {seconds:.0f} s")
            return None

        return self._cluster.wait_for(look, lambda: what, every=0.1)

    def wait_for_shadows(self, seconds: float = 300.0) -> None:
        """Until every trainer has a shadow that is ready."""

        def ready() -> bool:
            state = dict.fromkeys(range(self.ranks), False)
            for event in self.events():
                if event["event"] == "shadow_ready":
                    state[event["rank"]] = True
                elif event["event"] == "recovery":
                    state |= dict.fromkeys(event["ranks"], False)
            return all(state.values())

        self.wait_for("shadows", ready, seconds)

    def wait_for_protection(self, seconds: float = 120.0) -> None:
        """Until all ranks are protected, in a later generation than when this was called before a `strike`."""

        def ready() -> bool:
            time.sleep(0.3)  # looking is a process
            generation, _ = self._registry.protected(self.ranks)
            if generation <= self._generation:
                return False
            self._seen = generation
            return True

        self.wait_for("complete protection", ready, seconds)

    def settle(self) -> None:
        """Until spares stand by, and in a leto job shadows are ready and all ranks are protected."""
        while len(self.living()) < self._count + self._spares:
            self._cluster.start_node(self._free())
            self._started += 1
        if self.system == "leto":
            spares = self._started
            self.wait_for(
                "spare", lambda: sum(event["event"] == "spare" for event in self.events()) >= spares, seconds=120.0
            )
            self.wait_for_shadows()
            if self._policy.get("protect", {}).get("global", {}).get("parity") != 0:
                self.wait_for_protection()
        else:
            self.wait_for("spare", self._waiting_spares, seconds=120.0)

    def _free(self) -> int | None:
        """The place of a node that is gone."""
        living = {node.number for node in self.living()}
        return min({node.number for node in self._cluster.nodes} - living, default=None)

    def _waiting_spares(self) -> bool:
        found = self._rendezvous.get_state()
        if found is None:
            return False
        state = pickle.loads(found[0])
        return state.complete and len(state.redundancy_list) + len(state.wait_list) >= self._spares

    # ---- hurting it

    def strike(self, rng: random.Random) -> tuple[float, set[int]]:
        """Kill all processes of one node that trains, its agent first."""
        node, ranks = rng.choice(self.homes())
        self.leader_hit = self.system == "leto" and self._registry.leader() == node.pid
        pids = sorted((pid for pid, _ in node.processes()), key=lambda pid: pid != node.pid)
        instant = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        node.kill_all()
        self._generation = getattr(self, "_seen", -1)
        return instant, ranks
