"""`leto shards`: the map of what is protected, for a person and for a program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner, Result

from leto_elastic.cli import commands
from leto_elastic.coordinator.client import KeyValue, Snapshot
from leto_elastic.coordinator.schema import Keys, ShardRecord, encode
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.errors import LetoError
from leto_elastic.observe import shards

RECORDS = [
    ShardRecord(rank=0, version=120, generation=0, bytes=4096, chunks=2, digest="9f2c", holders=(1,), state="complete"),
    ShardRecord(
        rank=10, version=-1, generation=3, bytes=1 << 30, chunks=1024, digest="0d", holders=(), state="writing", lag=7
    ),
    ShardRecord(
        rank=11, version=110, generation=3, bytes=64, chunks=1, digest="00ff", holders=(2, 0), state="repairing"
    ),
]

TABLE = """\
rank  version  generation      state  lag       bytes  chunks  holders  digest
   0      120           0   complete    0        4096       2        1    9f2c
  10       -1           3    writing    7  1073741824    1024        -      0d
  11      110           3  repairing    0          64       1      2,0    00ff"""


class Etcd:
    """Stands for the client: what it is asked, and what it has."""

    def __init__(self, entries: Sequence[tuple[str, bytes]] = (), error: LetoError | None = None) -> None:
        self.entries, self.error = entries, error
        self.said: list[object] = []

    async def open(self, settings: EtcdSettings, *, timeout: float, check_key: str) -> Etcd:
        self.said.append(("open", settings.where, timeout, check_key))
        return self

    async def get_prefix(self, prefix: str, *, timeout: float) -> Snapshot:
        self.said.append(("get", prefix, timeout))
        if self.error is not None:
            raise self.error
        return Snapshot(1, tuple(KeyValue(key, value, 1, 1, 0) for key, value in self.entries))

    async def close(self) -> None:
        self.said.append("close")


def etcd_with(monkeypatch: pytest.MonkeyPatch, *records: ShardRecord, error: LetoError | None = None) -> Etcd:
    keys = Keys("a job")
    etcd = Etcd([(keys.shard(record.rank), encode(record)) for record in records], error)
    monkeypatch.setattr(shards, "EtcdClient", etcd)
    return etcd


def leto(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["shards", *arguments])


AT = ("--rdzv-endpoint=10.0.0.1:2379", "--rdzv-id=a job")


# ---- what is shown


def test_the_table() -> None:
    assert shards.table(RECORDS) == TABLE


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    lines = shards.table(RECORDS).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert all(name in lines[0] for name in ("rank", "version", "holders"))


def test_the_table_of_nothing_is_its_heading() -> None:
    assert shards.table([]).splitlines() == ["rank  version  generation  state  lag  bytes  chunks  holders  digest"]


def test_json_has_every_field_of_every_rank() -> None:
    shown: list[dict[str, Any]] = json.loads(shards.as_json(RECORDS))
    assert [row["rank"] for row in shown] == [0, 10, 11]
    assert shown[2] == {
        "v": 1,
        "rank": 11,
        "version": 110,
        "generation": 3,
        "bytes": 64,
        "chunks": 1,
        "digest": "00ff",
        "holders": [2, 0],
        "state": "repairing",
        "lag": 0,
    }
    assert json.loads(shards.as_json([])) == []


# ---- the command


def test_a_table_for_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = etcd_with(monkeypatch, *RECORDS)
    result = leto(*AT)
    assert (result.exit_code, result.output) == (0, TABLE + "\n")
    assert etcd.said == [
        ("open", "10.0.0.1:2379", 8.0, "/leto/a%20job/run"),
        ("get", "/leto/a%20job/shards/", 8.0),
        "close",
    ]


def test_json_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd_with(monkeypatch, *RECORDS)
    result = leto(*AT, "--json")
    assert result.exit_code == 0
    assert json.loads(result.output) == json.loads(shards.as_json(RECORDS))
    assert len(result.output.splitlines()) > len(RECORDS), "a person may have to read it, too"


def test_etcd_may_be_named_as_for_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = etcd_with(monkeypatch, *RECORDS)
    assert leto("--rdzv-id=a job", "--rdzv-conf=endpoints=h1:1;h2:2,user=ann,password=pw").exit_code == 0
    assert etcd.said[0] == ("open", "h1:1, h2:2", 8.0, "/leto/a%20job/run")


# ---- errors: one line that says what to do, exit code 1 or 2, no traceback


def complaint(result: Result, code: int = 1) -> str:
    assert result.exit_code == code
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    return result.stderr.strip().splitlines()[-1]


def test_there_is_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd_with(monkeypatch)
    message = complaint(leto(*AT))
    assert message == "Error: run 'a job' on etcd at 10.0.0.1:2379 has no protected state"
    assert complaint(leto(*AT, "--json")) == message, "rather than an empty array, which would look like success"


def test_no_etcd_is_named() -> None:
    assert complaint(leto("--rdzv-id=a"), 2) == "Error: give the etcd of the job: --rdzv-endpoint=HOST:PORT"


def test_no_run_is_named() -> None:
    assert "--rdzv-id" in complaint(leto("--rdzv-endpoint=h:1"), 2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rdzv-endpoint=h:0",), "etcd endpoint 'h:0' is not host:port"),
        (("--rdzv-conf=user=ann,password=pw",), "names no etcd"),
        (("--rdzv-endpoint=h:1", "--rdzv-conf=ca=/no/such.pem"), "cannot read the file of ca= for etcd: /no/such.pem"),
        (("--rdzv-endpoint=h:1", "--rdzv-conf=nonsense"), "nonsense"),
    ],
)
def test_settings_that_cannot_work(arguments: tuple[str, ...], told: str) -> None:
    assert told in complaint(leto("--rdzv-id=a", *arguments))


def test_etcd_that_does_not_answer_is_left_again(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = etcd_with(monkeypatch, error=LetoError("etcd at 10.0.0.1:2379 does not answer"))
    assert complaint(leto(*AT)) == "Error: etcd at 10.0.0.1:2379 does not answer"
    assert etcd.said[-1] == "close"


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_PATIENCE", 0.2)
    message = complaint(leto("--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=a"))
    assert "no etcd to work with within 0.2 s: 127.0.0.1:1" in message


def test_a_record_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    etcd = etcd_with(monkeypatch)
    etcd.entries = [(Keys("a job").shard(0), b'{"v": 2}')]
    message = complaint(leto(*AT))
    assert "etcd key /leto/a%20job/shards/000000 has layout version 2" in message
    assert "use the same version on all nodes" in message
