"""What the records of a run in etcd say, for tests: who leads, who is there, what is protected."""

from __future__ import annotations

import base64
import json

from leto_elastic.coordinator.schema import Keys, NodeRecord, RunRecord, ShardRecord, decode
from tests.process.etcd_server import Server


class Registry:
    """The records of a run; every call reads them afresh."""

    def __init__(self, etcd: Server, run_id: str = "job") -> None:
        self._etcd = etcd
        self._keys = Keys(run_id)

    def _read(self, prefix: str) -> dict[str, bytes]:
        found = json.loads(self._etcd.etcdctl("get", "--prefix", prefix, "--write-out=json"))
        entries = {base64.b64decode(entry["key"]).decode(): entry.get("value", "") for entry in found.get("kvs", [])}
        return {key: base64.b64decode(value) for key, value in entries.items()}

    def nodes(self) -> dict[str, NodeRecord]:
        """The live agents by node id."""
        entries = self._read(self._keys.nodes).items()
        return {self._keys.node_of(key): decode(key, value, NodeRecord) for key, value in entries}

    def leader(self) -> int:
        """The pid of the agent that leads."""
        return self.nodes()[self._read(self._keys.leader)[self._keys.leader].decode()].pid

    def run(self) -> RunRecord:
        """How the run stands."""
        return decode(self._keys.run, self._read(self._keys.run)[self._keys.run], RunRecord)

    def shards(self) -> list[ShardRecord]:
        """What is protected, of all slots."""
        return [decode(key, value, ShardRecord) for key, value in self._read(self._keys.shards).items()]

    def protected(self, ranks: int) -> tuple[int, int]:
        """(generation, version) that all slots are completely protected in; (-1, -1) for none."""
        shards = self.shards()
        if len(shards) < ranks or any(shard.state != "complete" for shard in shards):
            return -1, -1
        return min((shard.generation, shard.version) for shard in shards)
