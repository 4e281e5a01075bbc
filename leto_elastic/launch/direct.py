"""`leto run`: torchrun's arguments, torchrun's configuration, leto's agent; nothing of torchrun is replaced."""

from __future__ import annotations

from torch.distributed import run as torchrun
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig, _get_entrypoint_name

from leto_elastic.errors import ConfigError
from leto_elastic.launch.agent import LetoElasticAgent, refuse
from leto_elastic.launch.rendezvous import BACKEND, LetoRendezvousHandler, parameters_of
from leto_elastic.launch.seam import check_torch


@record
def launch(arguments: list[str]) -> None:
    """Run a job to its end, as `torchrun` with these arguments and `--rdzv-backend=leto` would.

    Raises SystemExit after one line on stderr for what cannot work, ChildFailedError when the job failed, and torch's
    SignalException when a signal ended it.
    """
    args = torchrun.get_args_parser().parse_args(arguments)
    if args.rdzv_backend not in ("static", BACKEND):  # static is torchrun's default
        refuse(ConfigError(f"leto run has its own rendezvous backend; leave out --rdzv-backend={args.rdzv_backend}"))
    args.rdzv_backend = BACKEND
    if args.master_port is None:
        args.master_port = 29500
    config, entrypoint, script_args = torchrun.config_from_args(args)
    try:
        check_torch()
        handler = _handler(config)
    except ConfigError as error:
        refuse(error)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(script_args),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    assert config.logs_specs is not None
    assert config.shutdown_timeout is not None
    agent = LetoElasticAgent(
        spec,
        config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        shutdown_timeout=config.shutdown_timeout,
    )
    _run(agent, config, spec, _get_entrypoint_name(entrypoint, script_args))


def _handler(config: LaunchConfig) -> LetoRendezvousHandler:
    params = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    return LetoRendezvousHandler(parameters_of(params))


def _run(agent: LetoElasticAgent, config: LaunchConfig, spec: WorkerSpec, name: str) -> None:
    """The end of torch's `launch_agent`."""
    try:
        metrics.initialize_metrics(MetricsConfig(config.metrics_cfg))
        result = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result.is_failed():
            raise ChildFailedError(name=name, failures=result.failures)
    except SignalException:
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    finally:
        spec.rdzv_handler.shutdown()
