"""`leto shards`: which protected version each rank has, and which nodes hold its pieces, as etcd knows it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from leto_elastic.coordinator.client import EtcdClient
from leto_elastic.coordinator.schema import Keys, ShardRecord, decode
from leto_elastic.coordinator.settings import EtcdSettings

_COLUMNS = ("rank", "version", "generation", "state", "lag", "bytes", "chunks", "holders", "digest")
_PATIENCE = 8.0  # seconds for etcd


async def read(settings: EtcdSettings, run_id: str) -> list[ShardRecord]:
    """The records of a run, by rank. Raises LetoError when etcd does not answer."""
    keys = Keys(run_id)
    client = await EtcdClient.open(settings, timeout=_PATIENCE, check_key=keys.run)
    try:
        found = await client.get_prefix(keys.shards, timeout=_PATIENCE)
    finally:
        await client.close()
    return [decode(entry.key, entry.value, ShardRecord) for entry in found.entries]


def table(records: Sequence[ShardRecord]) -> str:
    """Lines for a person; `holders` are positions of nodes, a version of -1 is none."""
    rows = [_COLUMNS, *(tuple(_cell(getattr(record, name)) for name in _COLUMNS) for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def as_json(records: Sequence[ShardRecord]) -> str:
    """One JSON array."""
    return msgspec.json.format(msgspec.json.encode(records), indent=2).decode()


def _cell(value: object) -> str:
    return ",".join(map(str, value)) or "-" if isinstance(value, tuple) else str(value)
