"""torchrun's agent, ours: what `launch_agent` constructs and runs in place of `LocalElasticAgent`.

Everything torchrun users know is inherited: events and metrics, the health check, the watchdog, `LOCAL_RANK` and
visible devices. Replaced is the part between: one supervised process per slot instead of one context per group (torch's
`SubprocessContext` ends all workers when one fails), and repair instead of restart.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from string import Template
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsSpecs, SignalException

from leto_elastic.coordinator.schema import NodeRecord, Seat
from leto_elastic.errors import ConfigError, LetoError
from leto_elastic.launch.etcd_decider import EtcdDecider
from leto_elastic.launch.logs import Logs
from leto_elastic.launch.posix import become_subreaper
from leto_elastic.launch.protection import Protection
from leto_elastic.launch.rendezvous import LetoRendezvousHandler
from leto_elastic.launch.retention import Retention
from leto_elastic.launch.setup import RunDirectory, entry_of
from leto_elastic.launch.signals import handled
from leto_elastic.launch.supervisor import Supervisor
from leto_elastic.launch.terms import Interrupted, Outcome, Settings
from leto_elastic.launch.world import World, code_of
from leto_elastic.observe.events import EventLog
from leto_elastic.recovery.config import load_policy
from leto_elastic.recovery.policy import Policy
from leto_elastic.testing import faults
from leto_elastic.wire import StoreAddress

USAGE_ERROR = 2


def refuse(error: LetoError) -> NoReturn:
    """End this process as a command line tool does: one line on stderr, no traceback."""
    print(f"leto: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(USAGE_ERROR) from None


class LetoElasticAgent(LocalElasticAgent):
    """Supervises the workers of one node and repairs the job in place.

    Args:
        spec: its rendezvous handler must be a `LetoRendezvousHandler`.
        logs_specs: torchrun's.
        **kwargs: as for `LocalElasticAgent`.

    Raises SystemExit, after one line on stderr, for settings that cannot work.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs, **kwargs: Any) -> None:
        super().__init__(spec, logs_specs, **kwargs)
        self._workers_logs_specs = logs_specs
        try:
            self._check()
        except LetoError as error:
            refuse(error)

    def _check(self) -> None:
        spec = self._worker_group.spec
        handler = spec.rdzv_handler
        if not isinstance(handler, LetoRendezvousHandler):
            raise ConfigError(f"the agent of leto needs --rdzv-backend=leto, not {handler.get_backend()}")
        self._parameters = handler.parameters
        if spec.local_world_size * self._parameters.nodes[0] < 2:
            raise ConfigError(
                "a job of one worker has nobody to repair it with: use --nproc-per-node=2 or more, or plain torchrun"
            )
        if spec.numa_options is not None:
            raise ConfigError("--numa-binding is not supported by leto; start torchrun under numactl instead")
        self._entry = entry_of(spec.entrypoint, spec.args)
        shutdown = self._shutdown_timeout
        self._policy: Policy = load_policy(
            self._parameters.config,
            max_restarts=spec.max_restarts,
            shutdown_timeout=shutdown if shutdown > 0 else None,
        )
        least = self._parameters.nodes[0]
        code_of(
            self._policy, [Seat(node=str(n), slots=1, place=str(n)) for n in range(least)]
        )  # refused here, if at all
        self._shutdown_seconds = self._policy.deadlines.shutdown if shutdown > 0 else 0.0

    def _invoke_run(self, role: str = "default") -> RunResult:  # noqa: ARG002  (torch's signature)
        try:
            outcome = asyncio.run(self._run())
        except Interrupted as signalled:
            name = signal.Signals(signalled.number)
            raise SignalException(f"Process {os.getpid()} got signal: {name}", sigval=name) from None
        except LetoError as error:
            refuse(error)
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        if outcome.reason is None:
            self._worker_group.state = WorkerState.SUCCEEDED
            return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))
        print(f"leto: the job ends: {outcome.reason}", file=sys.stderr, flush=True)
        self._worker_group.state = WorkerState.FAILED
        if not outcome.failures:
            refuse(LetoError(outcome.reason))
        return RunResult(WorkerState.FAILED, failures=outcome.failures)

    async def _run(self) -> Outcome:
        spec = self._worker_group.spec
        parameters = self._parameters
        several = parameters.nodes[1] > 1
        directory = RunDirectory(parameters.run_dir or os.path.join(".leto", parameters.run_id), shared=several)  # noqa: PTH118
        node = f"{socket.gethostname()}-{os.getpid()}"
        become_subreaper()
        try:
            if directory.first:
                faults.prepare(directory.path, None if several else spec.local_world_size)
            directory.let_others()
            name = f"events.{node}.jsonl" if several else "events.jsonl"
            events = EventLog(os.path.join(directory.path, name))  # noqa: PTH118
            try:
                ranks = spec.local_world_size * parameters.nodes[0]
                events.write("run_started", run_id=parameters.run_id, world_size=ranks, pid=os.getpid())
                settings = Settings(
                    run_id=parameters.run_id,
                    run_dir=directory.path,
                    slots=spec.local_world_size,
                    entry=self._entry,
                    policy=self._policy,
                    max_restarts=spec.max_restarts,
                    shutdown=self._shutdown_seconds,
                    logs=os.path.join(directory.path, f"logs.{node}" if several else "logs"),  # noqa: PTH118
                    address=parameters.address,
                )
                decider = self._make_decider()
                protects = several or self._policy.protect.local.parity > 0
                protection = Protection(settings, decider, events) if protects else None
                retention = self._make_retention()
                supervisor = Supervisor(settings, self, decider, events, protection=protection, retention=retention)
                with handled(supervisor.interrupt, supervisor.forward):
                    return await supervisor.run()
            finally:
                events.close()
        finally:
            become_subreaper(False)
            directory.close()

    def _make_retention(self) -> Retention | None:
        """Raises ConfigError when the state of this run is in use, or cannot be kept in files."""
        state, parameters = self._policy.state, self._parameters
        if state.retain == "memory":
            return None
        if parameters.nodes[1] > 1 or parameters.etcd is not None:
            raise ConfigError(
                "state.retain: file is for jobs of one node with an etcd of their own; with several nodes the others "
                "keep the state (protect.global)"
            )
        if self._policy.protect.local.parity:
            raise ConfigError("state.retain: file and protect.local.parity: 1 do not go together yet")
        if parameters.run_id == "none":
            raise ConfigError("state.retain: file needs a run id, by which the state is found again: --rdzv-id=NAME")
        return Retention(
            state.dir, parameters.run_id, self._worker_group.spec.local_world_size, self._policy.deadlines.abort
        )

    def _make_decider(self) -> EtcdDecider:
        spec = self._worker_group.spec
        parameters = self._parameters
        record = NodeRecord(
            host=socket.gethostname(),
            pid=os.getpid(),
            slots=spec.local_world_size,
            address=parameters.address,
            domain=parameters.domain,
        )
        return EtcdDecider(
            parameters.etcd, parameters.run_id, record, parameters.nodes, self._policy, max_restarts=spec.max_restarts
        )

    # ---- what the supervisor asks for

    def worker_env(self, local_rank: int, attempt: int, store: StoreAddress, world: World) -> dict[str, str]:
        """torchrun's variables of a worker (`LocalElasticAgent._start_workers`)."""
        spec = self._worker_group.spec
        env: dict[str, str | None] = {
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "WORLD_SIZE": str(world.size),
            "GROUP_WORLD_SIZE": str(len(world.seats)),
            "ROLE_WORLD_SIZE": str(world.size),
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": self._parameters.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        if world.position is None:
            env["LETO_START_DEADLINE"] = "inf"  # it waits for a rank
        else:
            rank = str(world.own[local_rank])
            env |= {"RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": str(world.position)}
        self._set_local_rank_env(env, local_rank, spec)
        return {key: value for key, value in env.items() if value is not None}

    def make_logs(self, envs: dict[int, dict[str, str]]) -> Logs:
        spec = self._worker_group.spec
        prefixes = None
        if self._log_line_prefix_template:
            template = Template(self._log_line_prefix_template)
            prefixes = {
                rank: template.safe_substitute(role_name=spec.role, rank=rank, local_rank=rank) for rank in envs
            }
        self._setup_local_watchdog(envs=envs)
        self._setup_healthcheck()
        filters = (spec.duplicate_stdout_filters, spec.duplicate_stderr_filters)
        return Logs(self._workers_logs_specs, spec.role, envs, prefixes, filters)

    def group_starting(self, attempt: int, world: World) -> None:
        group: WorkerGroup = self._worker_group
        spec = group.spec
        self._remaining_restarts = spec.max_restarts - attempt
        vars_of_torch: Any = group  # annotated as None for ever
        vars_of_torch.group_rank, vars_of_torch.group_world_size = world.position, len(world.seats)
        group.state = WorkerState.HEALTHY
        ranks = world.own or range(spec.local_world_size)
        group.workers = [
            Worker(index, global_rank=rank, role_rank=rank, world_size=world.size, role_world_size=world.size)
            for index, rank in enumerate(ranks)
        ]

    def trainer_started(self, local_rank: int, pid: int) -> None:
        self._worker_group.workers[local_rank].id = pid
