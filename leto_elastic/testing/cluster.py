"""A job of several torchrun agents under test: like `leto_elastic.testing.job.Job`, with nodes that can be lost.

The nodes write `events*.jsonl` into one run directory; `events` is all of them, ordered by time. A node that is killed,
cut off or interrupted on purpose may end as it likes; any other that ends with an exit code but 0 ends every wait.

Example:
    >>> with Hosts(3) as hosts, server(tmp_path / "etcd", place=hosts.switch) as etcd:
    ...     with Cluster("train.py", run_dir=run_dir, nodes=2, endpoint=etcd.endpoints, network=hosts) as cluster:
    ...         cluster.wait_event("worker_started", role="trainer", count=4)
    ...         cluster.start_node()  # a spare
    ...         cluster.nodes[1].kill_all()
    ...         cluster.expect_success(dead=(1,))
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from leto_elastic.testing.job import TORCHRUN
from leto_elastic.testing.network import Hosts, Loopback, Network, Place
from leto_elastic.testing.processes import JobError, Launched, Resources, environment, resources
from leto_elastic.testing.watching import Digest, Event, EventFile, Watched, digests_in

_POLL = 0.1


class Node(Launched):
    """One agent and its processes. `number` is that of its place, which another node may have had before."""

    def __init__(
        self,
        command: Sequence[str],
        number: int,
        place: Place,
        *,
        env: Mapping[str, str],
        deadline: float,
        grace: float,
    ) -> None:
        super().__init__([*place.launcher, *command], env=env, deadline=deadline, grace=grace)
        self.number = number
        self.place = place
        self.hurt = False
        """Its end says nothing about the job."""

    def kill_all(self) -> None:
        """SIGKILL the agent and then everything of it; see `Launched.kill_all`."""
        self.hurt = True
        super().kill_all()

    @property
    def pidfd(self) -> int:
        """A descriptor of the agent, readable once it has ended."""
        return self._pidfd


class Cluster(Watched):
    """A job of several agents; they start when the context is entered, in order.

    Args:
        script: the training script; `args` are its arguments.
        run_dir: the job's run directory, which all nodes share.
        nodes: agents to start at first.
        nproc: workers of each.
        nnodes: `--nnodes`; None: as many as are started at first.
        endpoint: of etcd, or the endpoints of its members.
        run_id: `--rdzv-id`.
        network: where the nodes live.
        faults: `LETO_FAULTS` of the job.
        conf: more keys of `--rdzv-conf`.
        options: more options of torchrun.
        env: changes to the environment.
        deadline: seconds until everything must have ended, from the start on.
        launcher: the command that torchrun's options are appended to.
        grace: seconds that the processes of a node have to be gone after its agent is.
    """

    def __init__(
        self,
        script: str | Path,
        *args: str,
        run_dir: str | Path,
        endpoint: str | Sequence[str],
        nodes: int = 4,
        nproc: int = 2,
        nnodes: str | None = None,
        run_id: str = "job",
        network: Network | None = None,
        faults: str = "",
        conf: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        deadline: float = 180.0,
        launcher: Sequence[str] = TORCHRUN,
        grace: float = 5.0,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.deadline = deadline
        self.nodes: list[Node] = []
        self._count = nodes
        self._network = network if network is not None else Loopback()
        self._env = environment(faults, env)
        self._grace = grace
        first, *more = [endpoint] if isinstance(endpoint, str) else endpoint
        pairs = {"run_dir": str(run_dir), **({"endpoints": ";".join(more)} if more else {}), **(conf or {})}
        self._launcher = [
            *launcher,
            f"--nnodes={nnodes or nodes}",
            f"--nproc-per-node={nproc}",
            f"--rdzv-endpoint={first}",
            f"--rdzv-id={run_id}",
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in pairs.items())}",
        ]
        self._script = [*options, str(script), *args]
        self._stack = ExitStack()
        self._files: dict[Path, EventFile] = {}
        self._stale = {path.stat().st_ino for path in self._paths()}

    # ---- life

    def __enter__(self) -> Self:
        self._end = time.monotonic() + self.deadline
        with self._stack:
            for _ in range(self._count):
                self.start_node()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:  # all agents before any of the rest, or those still there would repair the job
            node.kill_agent()
        self._stack.__exit__(kind, error, trace)

    def start_node(self, number: int | None = None) -> Node:
        """Start one more agent, the last of `nodes` then: at the next free place, or at that of one which has ended."""
        if number is None:
            number = max((node.number for node in self.nodes), default=-1) + 1
        if any(node.number == number and not node.ended(0) for node in self.nodes):
            raise RuntimeError(f"the node at place {number} is still running")
        place = self._network.place(number)
        command = [*self._launcher, f"--local-addr={place.address}", *self._script]
        deadline = max(0.0, self._end - time.monotonic())
        node = Node(command, number, place, env=self._env, deadline=deadline, grace=self._grace)
        self._stack.enter_context(node)
        self.nodes.append(node)
        return node

    # ---- waiting

    def expect_success(self, dead: Collection[int] = ()) -> None:
        """Wait for the end of all nodes but the `dead`. JobError unless all exit codes are 0 and all events whole."""
        for index, code in self._wait(dead, any).items():
            if code != 0:
                raise self.error(f"node {index} ended with exit code {code}")
        self._check_events()

    def expect_failure(self, dead: Collection[int] = ()) -> None:
        """Wait for the end of all nodes but the `dead`. JobError when an exit code is 0."""
        for index, code in self._wait(dead, lambda codes: 0 in codes).items():
            if code == 0:
                raise self.error(f"node {index} ended with exit code 0, a failure was expected")

    def _wait(self, dead: Collection[int], enough: Callable[[Collection[int]], bool]) -> dict[int, int]:
        """Exit codes by index, once all nodes but the `dead` have ended or those that have are `enough`."""
        living = {index: node for index, node in enumerate(self.nodes) if index not in dead}
        while True:
            codes = {index: node.wait() for index, node in living.items() if node.ended(0)}
            if len(codes) == len(living) or enough(codes.values()):
                return codes
            if time.monotonic() > self._end:
                running = sorted(living.keys() - codes.keys())
                raise self.error(f"nodes {running} were still running after {self.deadline:g} s")
            self._any_ended(_POLL)

    def _hopeless(self, within: float) -> str | None:
        if within > 0:
            self._any_ended(within)
        codes = {index: node.wait() for index, node in enumerate(self.nodes) if node.ended(0)}
        for index, code in codes.items():
            if code != 0 and not self.nodes[index].hurt:
                return f"node {index} ended with exit code {code}"
        return "all nodes ended" if len(codes) == len(self.nodes) else None

    def _any_ended(self, within: float) -> None:
        """Returns at the next end of a node, at the latest after `within` seconds."""
        poll = select.poll()
        for node in self.nodes:
            if not node.ended(0):
                poll.register(node.pidfd, select.POLLIN)
        poll.poll(within * 1000)

    # ---- what it says

    def events(self) -> list[Event]:
        """The events of all nodes so far, by time; each has the name of its file as `file`."""
        found = []
        for path in self._paths():
            file = self._files.setdefault(path, EventFile(path))
            if file.inode not in self._stale:
                found += [{**event, "file": path.name} for event in file.events()]
        return sorted(found, key=_time)

    def _paths(self) -> list[Path]:
        """Those renamed aside included: a node that comes back may do that to its own."""
        return sorted(self.run_dir.glob("events*.jsonl"))

    def digests(self) -> dict[int, Digest]:
        """By rank, from the output of all nodes. JobError when a rank that moved has printed different ones."""
        found: dict[int, Digest] = {}
        for index, node in enumerate(self.nodes):
            for rank, digest in digests_in(node.output()).items():
                if found.setdefault(rank, digest) != digest:
                    raise self.error(f"rank {rank} printed on node {index} another digest than on one before")
        return found

    def node_of(self, rank: int) -> int:
        """Index of the node on which `rank` is trained now. Raises JobError when the events do not tell."""
        return self.node_with(self.pid_of(rank))

    def node_with(self, pid: int) -> int:
        """Index of the node that a live process is on. Raises JobError when there is none."""
        for index, node in enumerate(self.nodes):
            if pid in dict(node.processes()):
                return index
        raise self.error(f"process {pid} is on none of the nodes")

    def resources(self) -> dict[int, Resources]:
        """What each live agent holds, by the node's index."""
        return {index: resources(node.pid) for index, node in enumerate(self.nodes) if not node.ended(0)}

    def error(self, problem: str) -> JobError:
        """The error to raise about this job: the problem, its last events, and what each node said last."""
        said = [f"{problem}\nlast events:", *(str(event) for event in self.events()[-25:])]
        for index, node in enumerate(self.nodes):
            state = f"exit code {node.wait()}" if node.ended(0) else "running"
            tail = "\n".join(node.output().splitlines()[-30:])
            said.append(f"---- node {index}, {state}{', hurt' if node.hurt else ''}: {' '.join(node.command)}\n{tail}")
        return JobError("\n".join(said))

    # ---- hurting it

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process of any node. Raises JobError when it is none (so that a wrong pid hits nobody)."""
        self.nodes[self.node_with(pid)].kill(pid, number)

    def interrupt(self, index: int, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the agent of a node a signal, as a scheduler does that wants the machine."""
        node = self.nodes[index]
        node.hurt = True
        node.kill(node.pid, number)

    def link_down(self, index: int) -> None:
        """Cut a node off from all others. Needs `Hosts`."""
        self._hosts().link_down(self.nodes[index].number)
        self.nodes[index].hurt = True

    def link_up(self, index: int) -> None:
        """Plug it in again."""
        self._hosts().link_up(self.nodes[index].number)

    def _hosts(self) -> Hosts:
        if not isinstance(self._network, Hosts):
            raise RuntimeError("only hosts have a link: give the cluster network=Hosts(...)")
        return self._network


def _time(event: Event) -> float:
    time = event["time"]
    return time if isinstance(time, float) else 0.0
