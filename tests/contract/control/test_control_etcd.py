"""The control store on a real etcd: the shipped suite, and what etcd's failures may and may not do."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import uuid
from contextlib import aclosing, asynccontextmanager
from contextlib import closing as closed
from typing import TYPE_CHECKING, Any

import pytest

from meshd.control.control_api import ABSENT, ControlError, VersionConflictError, Write
from meshd.control.etcd import EtcdControl, durability_barrier
from meshd.control.etcd.durability_barrier import DurabilityBarrier, may_answer_early
from meshd.control.etcd.gateway import EtcdAmbiguousError, Gateway, encoded
from meshd.util.clock import SystemClock
from tests.support.certificates import Authority
from tests.support.control_suite import ControlSuite, closing
from tests.support.etcd import OperatedEtcd
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from meshd.control.control_api import Change, ControlStore
    from meshd.util.clock import Clock
    from tests.support.manual_clock import ManualClock

require_etcd()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedEtcd]:
    with OperatedEtcd(tmp_path_factory.mktemp("etcd"), 1, "--unsafe-no-fsync") as cluster:
        yield cluster


class JumpingClock(SystemClock):
    """The machine's, and some seconds more."""

    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead


@asynccontextmanager
async def closing_watch(control: ControlStore) -> AsyncIterator[AsyncGenerator[Change, None]]:
    """A watch that does not wait for ever."""
    async with asyncio.timeout(30), aclosing(control.watch("topic")) as watch:
        yield watch


class TestEtcd(ControlSuite):
    ttl = 4.0
    cluster: OperatedEtcd

    @pytest.fixture(autouse=True)
    def _place(self, one: OperatedEtcd) -> None:
        self.cluster = one

    async def elapse(self, clock: ManualClock, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def open_control(self, clock: Clock) -> AbstractAsyncContextManager[ControlStore]:
        return closing(EtcdControl(self.cluster.gateway(), f"/{uuid.uuid4().hex}/"))


def test_two_processes_see_each_other(one: OperatedEtcd) -> None:
    async def main() -> None:
        with (
            closed(EtcdControl(one.gateway(), "/two/")) as a,
            closed(EtcdControl(one.gateway(), "/two/")) as b,
        ):
            watch = b.watch("topic")
            coming = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            version = await a.put("topic/a", b"1")
            change = await asyncio.wait_for(coming, 10)
            assert change.entry is not None
            assert (change.entry.value, change.entry.version) == (b"1", version)
            assert b.revision("topic") == version
            assert b.complete_revision("topic") >= version
            await watch.aclose()
            # b's copy may be behind a's next write; a conflict tells, and then it is not
            newer = await a.put("topic/a", b"2")
            with pytest.raises(VersionConflictError) as caught:
                await b.put("topic/a", b"3", expect=version)
            assert caught.value.found == newer
            assert b.cached_entries("topic")["topic/a"].value == b"2"
            await a.delete("topic/a")
            with pytest.raises(VersionConflictError):
                await b.put("topic/a", b"3", expect=newer)
            assert b.cached_entries("topic") == {}
            assert await b.put("topic/a", b"4", expect=ABSENT) > newer

    asyncio.run(main())


def test_reports_are_sent_to_nobody_and_read_by_those_who_ask(one: OperatedEtcd) -> None:
    """Every process of every node would get them."""

    async def main() -> None:
        prefix = f"/{uuid.uuid4().hex}/"
        with closed(EtcdControl(one.gateway(), prefix)) as a, closed(EtcdControl(one.gateway(), prefix)) as b:
            before = b.complete_revision("moves")
            first = await a.put("moves/n1", b"1", expect=ABSENT)
            second = await a.put("moves/n1", b"2", expect=first)
            with pytest.raises(VersionConflictError):
                await b.put("moves/n1", b"3", expect=first)
            await a.put("scrubs/n1", b"s")
            found = await b.get("moves/n1")
            assert found is not None
            assert (found.value, found.version) == (b"2", second)
            assert {key: entry.value for key, entry in (await b.list_all("moves/")).items()} == {
                "moves/n1": b"2"
            }
            async with closing_watch(b) as watch:
                await a.put("topic/last", b"1")  # comes after the reports would have
                while "topic/last" not in b.cached_entries("topic"):
                    await anext(watch)
            assert not b.cached_entries("moves")
            assert not b.cached_entries("scrubs")
            assert b.revision("moves") <= before
            assert await b.delete("moves/n1")
            assert not await a.delete("moves/n1")
            assert not await a.list_all("moves/")

    asyncio.run(main())


def test_reports_of_an_earlier_release_are_read_until_the_node_writes_again(one: OperatedEtcd) -> None:
    async def main() -> None:
        prefix = f"/{uuid.uuid4().hex}/"
        with closed(one.gateway()) as gateway:
            for name in ("n1", "n2"):
                key = encoded(f"{prefix}moves/{name}".encode())
                gateway.call("kv/put", {"key": key, "value": encoded(b"old")}, repeatable=True)
        with closed(EtcdControl(one.gateway(), prefix)) as control:
            await control.put("moves/n1", b"new")
            found = {key: entry.value for key, entry in (await control.list_all("moves/")).items()}
            assert found == {"moves/n1": b"new", "moves/n2": b"old"}
            assert await control.delete("moves/n2")
            async with closing_watch(control) as watch:
                await control.put("topic/last", b"1")
                while "topic/last" not in control.cached_entries("topic"):
                    await anext(watch)
            assert not control.cached_entries("moves")
            assert set(await control.list_all("moves/")) == {"moves/n1"}

    asyncio.run(main())


def test_versions_that_may_answer_before_they_sync() -> None:
    early = ["3.3.27", "3.4.20", "3.5.0", "3.5.1", "3.5.4"]
    known = [*early, "3.4.21", "3.4.23", "3.5.5", "3.6.0", ""]
    assert [version for version in known if may_answer_early(version)] == early


@pytest.mark.parametrize("early", [True, False])
def test_reads_after_changes_are_for_an_etcd_that_answers_early(
    one: OperatedEtcd, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    monkeypatch.setattr(durability_barrier, "may_answer_early", lambda version: early)

    async def main() -> None:
        gateway = one.gateway()
        with closed(EtcdControl(gateway, f"/early-{early}/")) as control:
            asked, call = list[str](), gateway.call

            def counted(path: str, body: Mapping[str, Any], *, repeatable: bool) -> dict[str, Any]:
                asked.append(path)
                return call(path, body, repeatable=repeatable)

            monkeypatch.setattr(gateway, "call", counted)
            await control.put("topic/a", b"1")
            # one by the writer, one by the thread that watches, in any order
            assert asked == ["kv/txn", *(["kv/range"] * 2 if early else [])]

    asyncio.run(main())


def test_a_change_before_a_restart_is_in_doubt(tmp_path: Path) -> None:
    with OperatedEtcd(tmp_path, 1, "--unsafe-no-fsync") as cluster, closed(cluster.gateway()) as gateway:
        barrier = DurabilityBarrier(gateway, b"/")
        answer = gateway.call("kv/put", {"key": encoded(b"/doubt"), "value": ""}, repeatable=True)
        barrier.await_change(answer)
        cluster.kill_member(0)
        cluster.start_all()
        with pytest.raises(EtcdAmbiguousError, match="it has restarted"):
            barrier.await_change(answer)


def test_a_prefix_is_a_world_of_its_own(one: OperatedEtcd) -> None:
    async def main() -> None:
        with closed(EtcdControl(one.gateway(), "/p/")) as p, closed(EtcdControl(one.gateway(), "/p2/")) as q:
            await p.put("topic/a", b"1")
            assert await q.get("topic/a") is None
            assert q.cached_entries("topic") == {}

    asyncio.run(main())


def test_hundreds_of_keys_are_written_together(one: OperatedEtcd) -> None:
    async def main() -> None:
        with closed(EtcdControl(one.gateway(), "/many/")) as control:
            await control.write_many([Write(f"topic/{n:04d}", b"x" * n) for n in range(350)])
            assert [len(e.value) for e in control.cached_entries("topic").values()] == list(range(350))
            await control.write_many([Write(f"topic/{n:04d}", None) for n in range(350)])
            assert control.cached_entries("topic") == {}

    asyncio.run(main())


def test_what_was_forgotten_is_read_anew(one: OperatedEtcd) -> None:
    """The watch was away while etcd compacted what it missed."""

    async def main() -> None:
        with closed(EtcdControl(one.gateway(), "/compact/")) as a:
            await a.put("topic/gone", b"1")
            b = EtcdControl(one.gateway(), "/compact/")
            await b.put("topic/mine", b"1")  # comes back by the watch: it has begun
            held, b._watch = b._watch, lambda: False  # type: ignore[method-assign]
            for connection in tuple(b._gateway._connections[0].streams):
                connection.sock.shutdown(socket.SHUT_RDWR)
            for number in range(5):
                latest = await a.put("topic/a", b"%d" % number)
            await a.delete("topic/gone")
            with closed(one.gateway()) as gateway:
                gateway.call("kv/compaction", {"revision": str(latest)}, repeatable=True)
            assert list(b.cached_entries("topic")) == ["topic/gone", "topic/mine"]
            b._watch = held  # type: ignore[method-assign]
            async with closing_watch(b) as watch:
                while b.cached_entries("topic") != a.cached_entries("topic"):
                    await anext(watch)
            assert b.revision("topic") >= latest
            b.close()

    asyncio.run(main())


def test_a_watch_that_heard_nothing_is_followed_at_once(
    one: OperatedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written between two watches would be late by the pause."""
    monkeypatch.setattr("meshd.control.etcd.etcd_control._IDLE", 0.2)
    monkeypatch.setattr("meshd.control.etcd.etcd_control._PAUSE", 600.0)

    async def main() -> None:
        with closed(EtcdControl(one.gateway(), "/quiet/")) as a:
            await a.put("topic/a", b"1")
            begun, stream = list[str](), a._gateway.stream

            def watched(path: str, *arguments: Any) -> Iterator[dict[str, Any]]:
                begun.append(path)
                return stream(path, *arguments)

            monkeypatch.setattr(a._gateway, "stream", watched)
            async with asyncio.timeout(30):
                while len(begun) < 3:  # noqa: ASYNC110  nothing tells of it
                    await asyncio.sleep(0.05)
            with closed(EtcdControl(one.gateway(), "/quiet/")) as b:
                await b.put("topic/b", b"1")
                async with closing_watch(a) as watch:
                    while a.cached_entries("topic").keys() != b.cached_entries("topic").keys():
                        await anext(watch)

    asyncio.run(main())


def test_without_etcd_reads_go_on_and_writes_say_so(tmp_path: Path) -> None:
    async def main() -> None:
        with OperatedEtcd(tmp_path) as cluster:
            with closed(EtcdControl(cluster.gateway(deadline=0.5))) as control:
                version = await control.put("topic/a", b"1")
                cluster.kill_member(0)
                for _ in range(2):
                    assert control.cached_entries("topic")["topic/a"].value == b"1"
                    assert control.revision("topic") == version
                    with pytest.raises(ControlError, match="no etcd member answers"):
                        await control.put("topic/a", b"2")
                cluster.start_member(0)
                cluster.await_reads()
                assert await control.put("topic/a", b"3", expect=version) > version
                assert control.cached_entries("topic")["topic/a"].value == b"3"
            cluster.kill_member(0)
            with pytest.raises(ControlError, match="is etcd running"):
                EtcdControl(cluster.gateway(deadline=0.2))

    asyncio.run(main())


def test_a_backup_that_was_put_back_is_what_there_is(tmp_path: Path) -> None:
    """It ends at an earlier revision than the copy: a watch from there on would tell nothing for long."""

    async def main() -> None:
        with OperatedEtcd(tmp_path) as cluster, closed(EtcdControl(cluster.gateway())) as control:
            await control.put("mesh/id", b"1")
            first = await control.put("topic/a", b"old")
            await control.put("topic/gone", b"1")
            await control.put("other/gone", b"1")
            cluster.save_snapshot(tmp_path / "backup")
            await control.put("topic/a", b"new")
            await control.put("topic/later", b"1")
            await control.delete("topic/gone")
            await control.delete("other/gone")
            later, elsewhere = control.revision("topic"), control.revision("other")
            cluster.kill_member(0)
            cluster.restore_snapshot(tmp_path / "backup")
            cluster.start_member(0)
            async with closing_watch(control) as watch:
                while "topic/later" in control.cached_entries("topic"):
                    await anext(watch)
            assert {key: entry.value for key, entry in control.cached_entries("topic").items()} == {
                "topic/a": b"old",
                "topic/gone": b"1",
            }
            assert control.revision("topic") != later, "who remembers what was there looks again"
            assert list(control.cached_entries("other")) == ["other/gone"]
            assert control.revision("other") != elsewhere, "where something came back, too"
            await control.put("topic/a", b"newer", expect=first)
            assert control.cached_entries("topic")["topic/a"].value == b"newer"
            with closed(EtcdControl(cluster.gateway())) as other:
                await other.put("topic/b", b"1")
                async with closing_watch(control) as watch:
                    while control.cached_entries("topic").keys() != other.cached_entries("topic").keys():
                        await anext(watch)

    asyncio.run(main())


def test_an_etcd_that_is_full_is_told_where_nothing_is_written(tmp_path: Path) -> None:
    """It answers reads and keeps leases alive as if all were well, and refuses every change."""

    async def main() -> None:
        clock, flags = JumpingClock(), ("--quota-backend-bytes=300000",)
        with (
            OperatedEtcd(tmp_path, 1, *flags) as cluster,
            closed(EtcdControl(Gateway(cluster.members, clock))) as control,
        ):
            lease = await control.acquire_lease("node/n1", "n1", 60)
            assert lease is not None
            assert await control.renew_lease(lease) == lease
            refused = ""
            while "space" not in refused:
                try:
                    await control.put("topic/a", bytes(100_000))
                except ControlError as error:
                    refused = str(error)
            clock.ahead += 60
            with pytest.raises(ControlError, match=r"rejects writes \(alarm:NOSPACE\)"):
                await control.renew_lease(lease)
            with pytest.raises(ControlError, match="alarm disarm"):
                await control.lease_holders("node/")
            with closed(cluster.gateway()) as gateway:
                (alarm,) = gateway.call("maintenance/alarm", {"action": "GET"}, repeatable=True)["alarms"]
                gateway.call("maintenance/alarm", alarm | {"action": "DEACTIVATE"}, repeatable=True)
            clock.ahead += 60
            assert await control.renew_lease(lease) == lease, "it was prolonged all the while"
            assert await control.lease_holders("node/") == {"node/n1": "n1"}

    asyncio.run(main())


@pytest.mark.parametrize("how", ["disk", "keys"])
def test_an_emptied_etcd_counts_as_one_that_is_out_of_reach(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        with OperatedEtcd(tmp_path) as cluster, closed(EtcdControl(cluster.gateway())) as control:
            for key in ("mesh/id", "topic/a"):
                await control.put(key, b"1")
            cluster.save_snapshot(tmp_path / "backup")
            if how == "disk":
                cluster.kill_member(0)
                cluster.remove_data()
                cluster.start_member(0)
            else:
                with closed(cluster.gateway()) as gateway:
                    gateway.call("kv/deleterange", {"key": "AA==", "range_end": "AA=="}, repeatable=True)
            said = ""
            while "etcd was emptied" not in said:
                await asyncio.sleep(0.05)
                try:
                    await control.list_all("topic/")
                except ControlError as error:
                    said = str(error)
            for change in (control.put("topic/b", b"1"), control.acquire_lease("node/n1", "n1", 2)):
                with pytest.raises(ControlError, match="from its backup"):
                    await change
            assert list(control.cached_entries("topic")) == ["topic/a"]
            cluster.kill_member(0)
            cluster.restore_snapshot(tmp_path / "backup")
            cluster.start_member(0)
            while "topic/b" not in control.cached_entries("topic"):
                try:
                    await control.put("topic/b", b"1")
                except ControlError:
                    await asyncio.sleep(0.05)

    asyncio.run(main())


def test_a_leader_that_dies_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """Counting up by compare-and-swap from two clients while leaders are killed: no step is lost or doubled,
    unless a client was told that nobody knows."""

    async def count(control: EtcdControl, steps: int) -> tuple[int, int]:
        sure = unsure = 0
        while sure + unsure < steps:
            try:
                entry = await control.get("topic/n")
                version, value = (entry.version, int(entry.value)) if entry else (ABSENT, 0)
                await control.put("topic/n", b"%d" % (value + 1), expect=version)
            except VersionConflictError:
                continue
            except ControlError:
                unsure += 1
            else:
                sure += 1
        return sure, unsure

    async def main() -> None:
        flags = ("--heartbeat-interval=50", "--election-timeout=500")
        with OperatedEtcd(tmp_path, 3, *flags) as cluster:
            controls = [EtcdControl(cluster.gateway(deadline=20)) for _ in range(2)]
            counting = [asyncio.ensure_future(count(control, 120)) for control in controls]
            for blow in ("kill", "stop"):
                await asyncio.sleep(0.3)
                leader = await asyncio.to_thread(cluster.leader)
                if blow == "kill":
                    cluster.kill_member(leader)
                    await asyncio.sleep(1)
                    cluster.start_member(leader)
                    await asyncio.to_thread(cluster.await_reads)
                else:
                    cluster.signal_member(leader, signal.SIGSTOP)
                    await asyncio.sleep(2)
                    cluster.signal_member(leader, signal.SIGCONT)
            told = await asyncio.gather(*counting)
            entry = await controls[0].get("topic/n")
            assert entry is not None
            sure, unsure = (sum(part) for part in zip(*told, strict=True))
            assert sure <= int(entry.value) <= sure + unsure
            for control in controls:
                async with closing_watch(control) as watch:
                    while control.cached_entries("topic")["topic/n"].value != entry.value:
                        await anext(watch)
            for control in controls:
                control.close()

    asyncio.run(main())


def test_users_and_passwords(tmp_path: Path) -> None:
    with OperatedEtcd(tmp_path) as cluster:
        with closed(cluster.gateway()) as gateway:
            gateway.call("auth/user/add", {"name": "root", "password": "s3cret"}, repeatable=True)
            gateway.call("auth/user/grant", {"user": "root", "role": "root"}, repeatable=True)
            gateway.call("auth/enable", {}, repeatable=True)
        with pytest.raises(ControlError, match="rejects"):
            EtcdControl(cluster.gateway())
        with pytest.raises(ControlError, match="check the name and the password") as caught:
            EtcdControl(Gateway(cluster.members, SystemClock(), login=("root", "wr0ng")))
        assert "wr0ng" not in str(caught.value)
        with closed(
            EtcdControl(Gateway(cluster.members, SystemClock(), login=("root", "s3cret")))
        ) as control:
            assert asyncio.run(control.put("topic/a", b"1")) > 0
            control._gateway._token = "stale.1"
            assert asyncio.run(control.put("topic/a", b"2")) > 0
            assert control.cached_entries("topic")["topic/a"].value == b"2"


def test_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    with OperatedEtcd(tmp_path, tls=(authority.issue(), authority.cert)) as cluster:
        with closed(EtcdControl(cluster.gateway())) as control:
            assert asyncio.run(control.put("topic/a", b"1")) > 0
            assert control.cached_entries("topic")["topic/a"].value == b"1"
        strangers = ssl.create_default_context()
        with pytest.raises(ControlError, match="certificate"):
            EtcdControl(Gateway(cluster.members, SystemClock(), deadline=0.2, tls=strangers))
