"""etcd: membership, epochs, failures and plans of a job.

Public interface, for `launch` (everything is asyncio, in the loop of the agent's main thread):

    settings = EtcdSettings.parse(endpoint, conf)      # None: nothing was asked for, use an EmbeddedEtcd
    check_run_id(run_id, settings)                     # refuses "none" on a shared etcd

    embedded = await EmbeddedEtcd.start(timeout=policy.deadlines.etcd_start)
    embedded.settings                                  # EtcdSettings of it
    await embedded.stop()

    coordinator = await Coordinator.open(settings, run_id, node_id, policy)   # node_id: unique per agent process
    await coordinator.register(NodeRecord(host=..., pid=..., slots=nproc))
    epoch = await coordinator.begin()                  # 0, the job is new
    await coordinator.put_slot(slot, SlotRecord(rank=..., pid=..., ...))      # queues; returns at once
    accepted = await coordinator.report_failure(epoch, FailureRecord(...))    # False: stale, look again
    async for plan in coordinator.plans(after=epoch): ...                     # PlanRecord, each once, in order
    await coordinator.finish("succeeded")
    await coordinator.close()

    leader = Leader(coordinator, make_store=make_store, max_restarts=0)        # async (epoch) -> (host, port)
    task = leader.start()                              # an asyncio.Task; ends only by an error or by close()
    await leader.close()

Modules: `settings` (endpoints, TLS, users), `connection` (channel, authentication, reconnecting), `client` (the narrow
interface to etcd), `schema` (keys and records), `coordinator` and `leader` (the protocol), `embedded` (a server of
our own).
"""
