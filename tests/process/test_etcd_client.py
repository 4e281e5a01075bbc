"""The contract of EtcdClient against real servers: plain, with client certificates, with users, killed, compacted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from leto_elastic.coordinator.client import (
    Batch,
    Compacted,
    Condition,
    Created,
    Delete,
    DeletePrefix,
    EtcdClient,
    EtcdClosed,
    EtcdRefused,
    EtcdUnavailable,
    Holds,
    Missing,
    NoneSince,
    Put,
    Snapshot,
)
from leto_elastic.coordinator.settings import EtcdSettings
from leto_elastic.errors import ConfigError
from tests.process.etcd_server import LIMIT, Certificates, Server, connect, eventually, run, server

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("pki") / "made")


@pytest.fixture(scope="module", params=["plain", "certificates", "users"])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[tuple[Server, EtcdSettings]]:
    """A server of each kind, and how to connect to it. Tests may kill it, but leave it running."""
    directory = tmp_path_factory.mktemp("etcd") / "data"
    tls: dict[str, Any] = {"certificates": certificates, "client_auth": True}
    with server(directory, **(tls if request.param == "certificates" else {})) as etcd:
        if request.param == "users":
            etcd.enable_users()
            yield etcd, etcd.settings(user="ann", password="annpw")
        else:
            yield etcd, etcd.settings()


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """Keys of this test only."""
    return f"/leto/{request.node.name}/"


def test_keys(shared: tuple[Server, EtcdSettings], prefix: str) -> None:
    async def test() -> None:
        client = await connect(shared[1])
        assert await client.get(f"{prefix}a", timeout=LIMIT) is None
        revision = await client.put(f"{prefix}a", b"\x00\xff", timeout=LIMIT)
        await client.put(f"{prefix}b", b"2", timeout=LIMIT)
        await client.put(prefix.removesuffix("/") + "0", b"outside", timeout=LIMIT)
        entry = await client.get(f"{prefix}a", timeout=LIMIT)
        assert entry is not None
        assert (entry.value, entry.create_revision, entry.mod_revision) == (b"\x00\xff", revision, revision)
        snapshot = await client.get_prefix(prefix, timeout=LIMIT)
        assert [(e.key, e.value) for e in snapshot.entries] == [(f"{prefix}a", b"\x00\xff"), (f"{prefix}b", b"2")]
        assert snapshot.revision == revision + 2
        assert await client.delete(f"{prefix}a", timeout=LIMIT)
        assert not await client.delete(f"{prefix}a", timeout=LIMIT)
        assert await client.delete_prefix(prefix, timeout=LIMIT) == 1
        assert (await client.get_prefix(prefix, timeout=LIMIT)).entries == ()
        await client.close()

    run(test)


def test_transactions(shared: tuple[Server, EtcdSettings], prefix: str) -> None:
    async def test() -> None:
        client = await connect(shared[1])
        key, other = f"{prefix}k/1", f"{prefix}k/2"
        created = await client.txn([Missing(key)], [Put(key, b"1"), Put(f"{prefix}x", b"")], timeout=LIMIT)
        assert created.done
        again = await client.txn([Missing(key)], [Put(key, b"2")], timeout=LIMIT)
        assert not again.done
        assert again.current[key].value == b"1"
        new = created.revision
        good: list[Condition] = [Holds(key, b"1"), Created(key, new), NoneSince(f"{prefix}k/", new)]
        assert (await client.txn(good, [Put(key, b"1")], timeout=LIMIT)).done
        bad_ones: list[Condition] = [Holds(key, b"2"), Holds(other, b""), Created(key, 1), NoneSince(f"{prefix}k/", 1)]
        for bad in (*bad_ones, Missing(key)):
            assert not (await client.txn([*good, bad], [Delete(key)], timeout=LIMIT)).done
        assert (await client.txn([NoneSince(f"{prefix}none/", 1)], [Put(other, b"")], timeout=LIMIT)).done
        assert not (await client.txn([good[2]], [Delete(key)], timeout=LIMIT)).done
        done = await client.txn([], [DeletePrefix(f"{prefix}k/"), Delete(f"{prefix}x")], timeout=LIMIT)
        assert done.done
        assert (await client.get_prefix(prefix, timeout=LIMIT)).entries == ()
        await client.close()

    run(test)


def test_of_many_that_create_a_key_one_does(shared: tuple[Server, EtcdSettings], prefix: str) -> None:
    async def test() -> None:
        clients = [await connect(shared[1]) for _ in range(3)]
        puts = [
            client.txn([Missing(f"{prefix}{n}")], [Put(f"{prefix}{n}", bytes([i]))], timeout=LIMIT)
            for n in range(20)
            for i, client in enumerate(clients)
        ]
        answers = await asyncio.gather(*puts)
        for n in range(20):
            assert sum(answer.done for answer in answers[3 * n : 3 * n + 3]) == 1
        for client in clients:
            await client.close()

    run(test)


def test_a_watch_loses_and_repeats_nothing_when_the_server_is_killed(
    shared: tuple[Server, EtcdSettings], prefix: str
) -> None:
    etcd, settings = shared

    async def test() -> None:
        client, writer = await connect(settings), await connect(settings)
        seen: list[bytes] = []

        async def watching() -> None:
            async with aclosing(client.watch(prefix, first)) as batches:
                async for batch in batches:
                    seen.extend(event.entry.value for event in batch.events if event.entry)
                    if seen[-1] == b"last":
                        return

        first = await writer.put(f"{prefix}k", b"0", timeout=LIMIT)
        await writer.put(f"{prefix}k", b"1", timeout=LIMIT)
        task = asyncio.create_task(watching())
        for n in (2, 3):
            await writer.put(f"{prefix}k", b"%d" % n, timeout=LIMIT)
            etcd.kill()
            restarted = asyncio.create_task(etcd.restart())
            await writer.put(f"{prefix}k", b"%d again" % n, timeout=LIMIT)
            await restarted
        await writer.put(f"{prefix}k", b"last", timeout=LIMIT)
        await task
        # A put whose answer got lost may have been written twice; the watch must show just what was written.
        assert list(dict.fromkeys(seen)) == [b"0", b"1", b"2", b"2 again", b"3", b"3 again", b"last"]
        entry = await client.get(f"{prefix}k", timeout=LIMIT)
        assert entry is not None
        history = [b.entry.value for b in (await _history(client, prefix, first, entry.mod_revision)) if b.entry]
        assert seen == history
        await client.close()
        await writer.close()

    async def _history(client: EtcdClient, prefix: str, first: int, last: int) -> list[Any]:
        events: list[Any] = []
        async with aclosing(client.watch(prefix, first)) as batches:
            async for batch in batches:
                events.extend(batch.events)
                if batch.revision >= last:
                    return events
        return events

    run(test)


def test_a_watch_broken_while_it_catches_up_goes_on_from_what_it_delivered(tmp_path: Path) -> None:
    """etcd sends at most 1000 revisions at once, each time with the newest revision of all in the header."""

    async def test(etcd: Server) -> None:
        client = await connect(etcd.settings())
        first = await client.put("/leto/k", b"", timeout=LIMIT)
        for _ in range(25):
            await asyncio.gather(*(client.put("/leto/k", b"", timeout=LIMIT) for _ in range(100)))
        async with aclosing(client.watch("/leto/", first)) as batches:
            seen = [event.revision for event in (await anext(batches)).events]
            assert len(seen) < 2501
            etcd.kill()
            await etcd.restart()
            await client.put("/leto/k", b"", timeout=LIMIT)
            while seen[-1] < first + 2501:
                seen += [event.revision for event in (await anext(batches)).events]
        assert seen == list(range(first, first + 2502))
        await client.close()

    with server(tmp_path / "etcd") as etcd:
        run(lambda: test(etcd))


def test_what_was_compacted_away_is_reported_by_watch_and_read_again_by_follow(
    shared: tuple[Server, EtcdSettings], prefix: str
) -> None:
    etcd, settings = shared
    if settings.user is not None:
        settings = etcd.settings(user="root", password="rootpw")  # compaction is for root

    async def test() -> None:
        client = await connect(settings)
        first = await client.put(f"{prefix}k", b"1", timeout=LIMIT)
        async with (
            aclosing(client.watch(prefix, first)) as batches,
            aclosing(client.follow(prefix)) as views,
        ):
            assert (await anext(batches)).revision == first
            assert isinstance(await anext(views), Snapshot)
            second = await client.put(f"{prefix}k", b"2", timeout=LIMIT)
            assert (await anext(views)).revision == second
            # Both are suspended now, and cannot reconnect before all of this has happened.
            etcd.kill()
            await etcd.restart()
            await client.put(f"{prefix}k", b"3", timeout=LIMIT)
            last = await client.put(f"{prefix}k", b"4", timeout=LIMIT)
            await client.compact(last, timeout=LIMIT)
            with pytest.raises(Compacted):
                await _until_it_ends(batches)
            view = await anext(views)
            while not isinstance(view, Snapshot):  # what had arrived before the kill
                view = await anext(views)
            assert [entry.value for entry in view.entries] == [b"4"]
            after = await client.put(f"{prefix}k", b"5", timeout=LIMIT)
            batch = await anext(views)
            assert isinstance(batch, Batch)
            assert batch.revision == after
        await client.close()

    async def _until_it_ends(batches: Any) -> None:
        async for _ in batches:
            pass

    run(test)


def test_leases(shared: tuple[Server, EtcdSettings], prefix: str) -> None:
    """One that is renewed lives, over a restart of the server; one whose client is gone ends; one can be ended."""
    etcd, settings = shared

    async def test() -> None:
        client, gone = await connect(settings), await connect(settings)
        kept = await client.grant(2, timeout=LIMIT)
        dropped = await gone.grant(2, timeout=LIMIT)
        first = await client.put(f"{prefix}kept", b"", lease=kept.id, timeout=LIMIT)
        await client.put(f"{prefix}dropped", b"", lease=dropped.id, timeout=LIMIT)
        etcd.kill()
        await etcd.restart()
        await gone.close()
        deleted: list[str] = []
        async with aclosing(client.watch(prefix, first)) as batches:
            async for batch in batches:
                deleted += [event.key for event in batch.events if event.entry is None]
                if deleted == [f"{prefix}dropped"]:
                    # Granted earlier and as short, `kept` would be gone too, had it not been renewed.
                    assert await client.get(f"{prefix}kept", timeout=LIMIT) is not None
                    assert not kept.lost.is_set()
                    await client.revoke(kept, timeout=LIMIT)
                if len(deleted) == 2:
                    break
        assert deleted == [f"{prefix}dropped", f"{prefix}kept"]
        with pytest.raises(EtcdRefused):
            await client.put(f"{prefix}kept", b"", lease=kept.id, timeout=LIMIT)
        await client.close()

    run(test)


def test_a_lease_that_somebody_ended_is_known_to_be_lost(shared: tuple[Server, EtcdSettings]) -> None:
    async def test() -> None:
        client, other = await connect(shared[1]), await connect(shared[1])
        lease = await client.grant(2, timeout=LIMIT)
        await other.revoke(lease_of_other(lease), timeout=LIMIT)
        await lease.lost.wait()
        await client.close()
        await other.close()

    def lease_of_other(lease: Any) -> Any:
        return type(lease)(lease.id, lease.ttl)

    run(test)


def test_no_call_outlasts_its_deadline(tmp_path: Path) -> None:
    async def test(etcd: Server) -> None:
        client = await connect(etcd.settings())
        etcd.pause()
        started = time.monotonic()
        with pytest.raises(EtcdUnavailable, match=r"within 0\.3 s"):
            await client.put("/leto/k", b"", timeout=0.3)
        waiting = asyncio.create_task(client.put("/leto/k", b"", timeout=None))
        with pytest.raises(EtcdUnavailable):
            await client.grant(2, timeout=0.2)
        assert time.monotonic() - started < 3.0
        etcd.resume()
        await waiting
        etcd.kill()
        with pytest.raises(EtcdUnavailable, match="refused"):
            await client.get("/leto/k", timeout=0.3)
        await client.close()

    with server(tmp_path / "etcd") as etcd:
        run(lambda: test(etcd))


def test_close_ends_whatever_is_under_way(tmp_path: Path) -> None:
    async def test(etcd: Server) -> None:
        client = await connect(etcd.settings())
        await client.grant(2, timeout=LIMIT)
        etcd.pause()
        watch = client.watch("/leto/", 1)
        tasks = [
            asyncio.create_task(client.get("/leto/k", timeout=None)),
            asyncio.ensure_future(anext(watch)),
        ]
        await asyncio.wait(tasks, timeout=0.05)
        await client.close()
        for task in tasks:
            with pytest.raises(EtcdClosed):
                await task
        with pytest.raises(EtcdClosed):
            await client.get("/leto/k", timeout=None)
        etcd.resume()

    with server(tmp_path / "etcd") as etcd:
        run(lambda: test(etcd))


def test_close_also_closes_the_channel_of_an_endpoint_that_was_left(tmp_path: Path) -> None:
    """A suspended watch still holds it; `run` sees to it that no socket is left."""

    async def test(etcd: Server) -> None:
        client = await connect(etcd.settings())
        watch = client.watch("/leto/", await client.put("/leto/k", b"", timeout=LIMIT))
        await anext(watch)
        etcd.pause(0)
        await client.put("/leto/k", b"", timeout=LIMIT)  # by another member
        await client.close()
        await watch.aclose()
        etcd.resume(0)

    with server(tmp_path / "etcd", members=3) as etcd:
        run(lambda: test(etcd))


def test_cancelling_a_call_is_no_error_of_the_client(tmp_path: Path) -> None:
    async def test(etcd: Server) -> None:
        client = await connect(etcd.settings())
        etcd.pause()
        task = asyncio.create_task(client.get("/leto/k", timeout=None))
        await asyncio.wait([task], timeout=0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        etcd.resume()
        await client.put("/leto/k", b"", timeout=LIMIT)
        await client.close()

    with server(tmp_path / "etcd") as etcd:
        run(lambda: test(etcd))


def test_three_members_any_of_which_may_die(tmp_path: Path) -> None:
    """Each is killed in turn, so the one in use is among them: calls, watch and lease go on with another."""

    async def test(etcd: Server) -> None:
        client = await connect(etcd.settings())
        lease = await client.grant(3, timeout=LIMIT)
        first = await client.put("/leto/a", b"", lease=lease.id, timeout=LIMIT)
        async with aclosing(client.watch("/leto/k", first)) as batches:
            for member in range(3):
                etcd.kill(member)
                await client.put("/leto/k", b"%d" % member, timeout=LIMIT)
                value = b""
                while value != b"%d" % member:  # the one before may show up twice, if its answer was lost
                    last = (await anext(batches)).events[-1].entry
                    assert last is not None
                    value = last.value
                await etcd.restart(member)
        assert await client.get("/leto/a", timeout=LIMIT) is not None
        assert not lease.lost.is_set()
        await client.close()

    with server(tmp_path / "etcd", members=3) as etcd:
        run(lambda: test(etcd))


def test_tokens_that_became_invalid_are_renewed(tmp_path: Path) -> None:
    """Of calls, many at once, and of a watch, which etcd only ever tells that it has no permission."""

    async def test(etcd: Server) -> None:
        calling, watching = [await connect(etcd.settings(user="ann", password="annpw")) for _ in range(2)]
        for _ in range(2):
            await asyncio.to_thread(etcd.forget_tokens, "ann")
            await asyncio.gather(*(calling.put(f"/leto/{n}", b"", timeout=LIMIT) for n in range(4)))
            async with aclosing(watching.watch("/leto/", 1)) as batches:
                await anext(batches)
        await calling.close()
        await watching.close()

    with server(tmp_path / "etcd") as etcd:
        etcd.enable_users()
        run(lambda: test(etcd))


def test_a_watch_that_is_not_permitted_any_more_ends(tmp_path: Path) -> None:
    async def test(etcd: Server) -> None:
        client = await connect(etcd.settings(user="ann", password="annpw"))
        await asyncio.to_thread(
            etcd.etcdctl, "--user=root:rootpw", "role", "revoke-permission", "leto", "/leto/", "/leto0"
        )
        async with aclosing(client.watch("/leto/", 1)) as batches:
            with pytest.raises(ConfigError, match="no permission"):
                await anext(batches)
        await client.close()

    with server(tmp_path / "etcd") as etcd:
        etcd.enable_users()
        run(lambda: test(etcd))


def test_a_host_name_and_an_endpoint_that_is_dead(tmp_path: Path, certificates: Certificates) -> None:
    async def test(etcd: Server) -> None:
        port = etcd.endpoints[0].rpartition(":")[2]
        settings = EtcdSettings(endpoints=("127.0.0.1:1", f"localhost:{port}"), tls=True, ca=certificates.ca)
        client = await connect(settings)
        await client.put("/leto/k", b"", timeout=LIMIT)
        await client.close()

    with server(tmp_path / "etcd", certificates=certificates) as etcd:
        run(lambda: test(etcd))


def test_eventually_is_bounded_by_run() -> None:
    async def never() -> bool:
        return False

    async def test() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(eventually(never), 0.05)

    run(test)
