"""The control store on a real Kubernetes API: the shipped suite, and what its failures may and may not do."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import uuid
from contextlib import closing as closed
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from lightkube.resources.core_v1 import ConfigMap, Secret

from meshd.cluster.node_lease import NodeLease
from meshd.config import KubernetesAddress, parse_control
from meshd.control.cluster_map_store import ClusterMapStore
from meshd.control.control_api import ABSENT, ControlError, VersionConflictError, Versioned, Write
from meshd.control.kubernetes.api_client import AmbiguousError, ApiClient, ApiServer, server_from_kubeconfig
from meshd.control.kubernetes.kubernetes_control import KubernetesControl, open_kubernetes
from meshd.control.kubernetes.resource_encoding import OPEN_TOPICS
from meshd.control.kubernetes.watch_cache import LocalCopy
from meshd.util.clock import SystemClock
from meshwire.cluster import Node
from meshwire.cluster import transitions as turn
from tests.support.bounded_wait import await_true
from tests.support.control_suite import ControlSuite, closing
from tests.support.manual_clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from lightkube import Client

    from meshd.control.control_api import ControlStore, Lease
    from meshd.control.kubernetes.watch_cache import WatchCache
    from meshd.util.clock import Clock


def store(
    kubeconfig: Path, namespace: str, name: str = "mesh", clock: Clock | None = None, **changes: Any
) -> KubernetesControl:
    api = ApiClient(server_from_kubeconfig(kubeconfig), SystemClock(), deadline=changes.pop("deadline", 5.0))
    return KubernetesControl(api, namespace, name, clock or SystemClock(), **changes)


class Suite(ControlSuite):
    open_topics: frozenset[str]

    @pytest.fixture(autouse=True)
    def _here(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def open_control(self, clock: Clock) -> AbstractAsyncContextManager[ControlStore]:
        name = f"t{uuid.uuid4().hex[:20]}"
        return closing(store(self.kubeconfig, "default", name, clock, open_topics=self.open_topics))


class TestSecrets(Suite):
    open_topics = frozenset({"cluster"})


class TestConfigMaps(Suite):
    open_topics = frozenset({"topic", "other", "a", "b", "bb", "buckets", "access"})


def test_two_processes_see_each_other(kubeconfig: Path, namespace: str) -> None:
    async def main() -> None:
        with closed(store(kubeconfig, namespace)) as a, closed(store(kubeconfig, namespace)) as b:
            watch = b.watch("cluster")
            coming = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            version = await a.put("cluster/map", b"1")
            change = await asyncio.wait_for(coming, 60)
            assert change.entry is not None
            assert (change.entry.value, change.entry.version) == (b"1", version)
            assert b.revision("cluster") == version
            assert b.complete_revision("cluster") >= version
            await watch.aclose()
            newer = await a.put("cluster/map", b"2")
            with pytest.raises(VersionConflictError) as caught:
                await b.put("cluster/map", b"3", expect=version)
            assert caught.value.found == newer
            assert b.cached_entries("cluster")["cluster/map"].value == b"2"
            await a.delete("cluster/map")
            with pytest.raises(VersionConflictError):
                await b.put("cluster/map", b"3", expect=newer)
            assert b.cached_entries("cluster") == {}
            assert await b.put("cluster/map", b"4", expect=ABSENT) > newer

    asyncio.run(main())


def test_a_store_is_a_world_of_its_own(kubeconfig: Path, namespace: str) -> None:
    async def main() -> None:
        with closed(store(kubeconfig, namespace, "p")) as p, closed(store(kubeconfig, namespace, "p2")) as q:
            await p.put("topic/a", b"1")
            assert await q.get("topic/a") is None
            assert await q.list_all("topic/") == {}
            assert q.cached_entries("topic") == {}
            assert await p.acquire_lease("rebalancer", "n1", 10) is not None
            assert await q.acquire_lease("rebalancer", "n2", 10) is not None

    asyncio.run(main())


def test_a_node_that_ends_while_it_renews_its_lease_leaves_none(kubeconfig: Path, namespace: str) -> None:
    """The API server has renewed it, and the answer is late, when the renewal is cancelled."""

    async def main() -> None:
        renewed, answer = asyncio.Event(), threading.Event()
        with closed(store(kubeconfig, namespace)) as control:
            maps, loop = ClusterMapStore(control), asyncio.get_running_loop()
            await control.put("mesh/id", b"1")
            await maps.update_map(lambda _: turn.bootstrap_map(Node("n1", "http://n1:1")))
            lease = NodeLease(control, maps, "n1", "n1", SystemClock(), 60.0)
            assert await lease.renew()
            assert await lease.renew()
            renew = control._leases.renew_lease

            def late(lease: Lease) -> Lease:
                found = renew(lease)
                loop.call_soon_threadsafe(renewed.set)
                assert answer.wait(60)
                return found

            with patch.object(control._leases, "renew_lease", late):  # the answer's way back
                renewing = asyncio.create_task(lease.renew())
                await asyncio.wait_for(renewed.wait(), 60)
                renewing.cancel()
                with suppress(asyncio.CancelledError):
                    await renewing
                loop.call_later(0.1, answer.set)
                await lease.release()
            assert await control.lease_holders("node/") == {}

    asyncio.run(main())


def test_what_people_see(kubeconfig: Path, kube: Client, namespace: str) -> None:
    """The map is a ConfigMap that can be read; keys of users are not in any."""

    async def main() -> None:
        with closed(store(kubeconfig, namespace)) as control:
            await control.put("cluster/map", b'{"version": 1}')
            await control.put("access/key-AK1", b"s3cret")

    asyncio.run(main())
    found = [
        each for each in kube.list(ConfigMap, namespace=namespace, labels={"shardmesh.io/store": "mesh"})
    ]
    assert [each.data for each in found] == [{"value": '{"version": 1}'}]
    assert found[0].metadata is not None
    assert str(found[0].metadata.name).startswith("mesh.cluster-map-")
    secrets = list(kube.list(Secret, namespace=namespace, labels={"shardmesh.io/topic": "access"}))
    assert [each.type for each in secrets] == ["shardmesh.io/control"]
    assert {"access", "secrets"} & OPEN_TOPICS == set()


def test_odd_names_and_large_values(kubeconfig: Path, namespace: str) -> None:
    async def main() -> None:
        with closed(store(kubeconfig, namespace)) as control:
            keys = ["tö pic/ü", "UPPER/A", "UPPER/a", "upper/a", "a-b/c", "a/b-c", "t/" + "x" * 478, "-/-"]
            for number, key in enumerate(keys):
                await control.put(key, b"%d" % number)
            assert [int((await control.get(key) or pytest.fail(key)).value) for key in keys] == list(range(8))
            assert list(await control.list_all("tö pic/")) == ["tö pic/ü"]
            assert list(await control.list_all("UP")) == ["UPPER/A", "UPPER/a"]
            await control.put("t/large", bytes(1_000_000))
            with pytest.raises(ControlError, match="keeps at most"):
                await control.put("t/large", bytes(1_000_001))

    asyncio.run(main())


def test_counting_from_many_sides_loses_no_step(kubeconfig: Path, namespace: str) -> None:
    async def count(control: KubernetesControl, steps: int) -> None:
        while steps:
            entry = await control.get("topic/n")
            version, value = (entry.version, int(entry.value)) if entry else (ABSENT, 0)
            try:
                await control.put("topic/n", b"%d" % (value + 1), expect=version)
            except VersionConflictError:
                continue
            steps -= 1

    async def main() -> None:
        controls = [store(kubeconfig, namespace) for _ in range(3)]
        await asyncio.gather(*(count(control, 15) for control in controls))
        assert [(await control.get("topic/n") or pytest.fail("gone")).value for control in controls] == [
            b"45"
        ] * 3
        for control in controls:
            control.close()

    asyncio.run(main())


def test_without_the_api_reads_go_on_and_writes_say_so(kubeconfig: Path, namespace: str) -> None:
    async def main() -> None:
        with relayed(kubeconfig) as relay:
            api = ApiClient(relay.server, SystemClock())
            with closed(KubernetesControl(api, namespace, "mesh", SystemClock())) as control:
                version = await control.put("topic/a", b"1")
                relay.cut()
                patience, api._deadline = api._deadline, 0.5
                for _ in range(2):
                    assert control.cached_entries("topic")["topic/a"].value == b"1"
                    assert control.revision("topic") == version
                    with pytest.raises(ControlError, match="does not answer"):
                        await control.put("topic/a", b"2")
                with closed(store(kubeconfig, namespace)) as other:
                    newer = await other.put("topic/a", b"3")  # while nobody here can see it
                relay.mend()
                api._deadline = patience
                async with asyncio.timeout(60):
                    async for change in control.watch("topic"):
                        if change.entry is not None and change.entry.version == newer:
                            break
                assert await control.put("topic/a", b"4", expect=newer) > newer
            relay.cut()
            with pytest.raises(ControlError, match="is it running"):
                KubernetesControl(
                    ApiClient(relay.server, SystemClock(), deadline=0.2), namespace, "mesh", SystemClock()
                )

    asyncio.run(main())


def test_an_answer_that_was_lost_is_looked_for(kubeconfig: Path, namespace: str) -> None:
    """A conditional write whose answer never came: it is found out whether it happened."""

    async def main() -> None:
        with closed(store(kubeconfig, namespace)) as control:
            api, held = control._api, control._api.call

            def losing(method: str, path: str, *rest: Any, **query: Any) -> dict[str, Any]:
                answer = held(method, path, *rest, **query)
                if method in ("POST", "PUT"):
                    raise AmbiguousError("no answer")
                return answer

            def silent(method: str, path: str, *rest: Any, **query: Any) -> dict[str, Any]:
                if method in ("POST", "PUT"):
                    raise AmbiguousError("no answer")
                return held(method, path, *rest, **query)

            api.call = losing  # type: ignore[method-assign]
            version = await control.put("topic/a", b"1", expect=ABSENT)
            version = await control.put("topic/a", b"2", expect=version)
            assert control.cached_entries("topic")["topic/a"].version == version
            api.call = silent  # type: ignore[method-assign]
            with pytest.raises(AmbiguousError):
                await control.put("topic/a", b"3", expect=version)

    asyncio.run(main())


def test_what_was_forgotten_is_read_anew(kubeconfig: Path, namespace: str) -> None:
    """A watch from a version that the API no longer has (410) begins again with everything."""

    async def main() -> None:
        with closed(store(kubeconfig, namespace)) as a, closed(store(kubeconfig, namespace)) as b:
            await a.put("topic/gone", b"1")
            await b.put("topic/mine", b"1")
            mirror = b._mirrors["secrets"]
            held, forgotten = b._api.watch, threading.Event()
            await_true(
                lambda: [each.sock is not None for each in tuple(b._api._connections.streams)] == [True, True]
            )

            def gone(path: str, idle: float, **query: str) -> Iterator[dict[str, Any]]:
                if forgotten.is_set():
                    yield from held(path, idle, **query)
                else:
                    forgotten.set()
                    yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}

            for connection in tuple(b._api._connections.streams):
                b._api.watch = gone  # type: ignore[method-assign]
                assert connection.sock is not None
                connection.sock.shutdown(socket.SHUT_RDWR)
            await a.delete("topic/gone")
            latest = await a.put("topic/a", b"2")
            async with asyncio.timeout(60):
                async for _ in b.watch("topic"):
                    if mirror.snapshot().revision >= latest:
                        break
            assert b.cached_entries("topic") == a.cached_entries("topic")
            assert b.revision("topic") >= latest

    asyncio.run(main())


def _comes_later(mirror: WatchCache, **entries: Versioned) -> None:
    """As if this copy were of a time after the one that the API's store was put back to."""
    with mirror._moved:
        copy = mirror._copy
        mirror._copy = LocalCopy({**copy.entries, **entries}, copy.topics, copy.revision + 1_000_000)


def _break_off(control: KubernetesControl) -> None:
    """Its watches, as when the API server ends."""
    await_true(
        lambda: [each.sock is not None for each in tuple(control._api._connections.streams)] == [True, True]
    )
    for connection in tuple(control._api._connections.streams):
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)


def test_an_api_that_was_put_back_from_a_backup_is_read_anew(kubeconfig: Path, namespace: str) -> None:
    """A watch from a version that is still to come is silent for as long as that takes."""

    async def main() -> None:
        with closed(store(kubeconfig, namespace)) as control:
            await control.put("mesh/id", b"ours")
            version = await control.put("topic/kept", b"of the backup")
            mirror = control._mirrors["secrets"]
            lost = Versioned(b"made since", version + 900_000)
            _comes_later(mirror, **{"topic/made-since": lost, "topic/kept": lost})
            assert control.cached_entries("topic")["topic/kept"] == lost
            _break_off(control)
            await asyncio.to_thread(
                await_true, lambda: list(control.cached_entries("topic")) == ["topic/kept"]
            )
            assert control.cached_entries("topic")["topic/kept"] == Versioned(b"of the backup", version)
            assert version <= control.revision("topic") < lost.version
            newer = await control.put("topic/kept", b"today")
            assert control.cached_entries("topic")["topic/kept"] == Versioned(b"today", newer)

    asyncio.run(main())


def test_an_api_that_was_emptied_is_not_believed(
    kubeconfig: Path, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        with closed(store(kubeconfig, namespace)) as control:
            await control.put("topic/other", b"1")
            mirror = control._mirrors["secrets"]
            _comes_later(mirror, **{"mesh/id": Versioned(b"ours", 1)})
            before = mirror.snapshot()
            _break_off(control)
            await asyncio.to_thread(await_true, lambda: "was emptied" in caplog.text)
            assert mirror.snapshot() is before
            with closed(store(kubeconfig, namespace)) as other:
                await other.put("mesh/id", b"ours")  # from its backup
            await asyncio.to_thread(await_true, lambda: mirror.snapshot().revision < before.revision)
            assert control.cached_entries("topic")["topic/other"].value == b"1"

    asyncio.run(main())
    told = [each for each in caplog.records if "was emptied" in each.getMessage()]
    assert [each.levelno for each in told if each.levelno > logging.DEBUG] == [logging.WARNING]
    assert "put this mesh's back from their backup" in told[0].getMessage()


def test_a_lease_is_only_taken_after_it_was_seen_to_rest(kubeconfig: Path, namespace: str) -> None:
    """Two processes whose clocks say different things: the one that comes new waits by its own."""

    async def main() -> None:
        here, there = ManualClock(), ManualClock(now_ns=1)
        with (
            closed(store(kubeconfig, namespace, clock=here)) as a,
            closed(store(kubeconfig, namespace, clock=there)) as b,
        ):
            lease = await a.acquire_lease("guardian", "n1", 10)
            assert lease is not None
            there.advance(1e6)  # how late it is there says nothing
            assert await b.acquire_lease("guardian", "n2", 10) is None
            there.advance(6)
            lease = await a.renew_lease(lease)
            assert await b.acquire_lease("guardian", "n2", 10) is None
            there.advance(9)
            assert await b.acquire_lease("guardian", "n2", 10) is None
            there.advance(2)
            taken = await b.acquire_lease("guardian", "n2", 10)
            assert taken is not None
            with pytest.raises(ControlError, match="no longer n1's"):
                await a.renew_lease(lease)

    asyncio.run(main())


def test_a_renewal_is_one_call(kubeconfig: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node renews its lease all the time."""

    async def main() -> None:
        with closed(store(kubeconfig, namespace)) as a, closed(store(kubeconfig, namespace)) as b:
            lease = await a.acquire_lease("guardian", "n1", 10)
            assert lease is not None
            calls, call = list[str](), a._api.call

            def counted(method: str, *arguments: Any, **options: Any) -> Any:
                calls.append(method)
                return call(method, *arguments, **options)

            monkeypatch.setattr(a._api, "call", counted)
            lease = await a.renew_lease(await a.renew_lease(lease))
            assert calls == ["PUT", "PUT"]
            assert await b.acquire_lease("guardian", "n1", 10) is not None  # the same node, started again
            with pytest.raises(ControlError, match="no longer n1's"):
                await a.renew_lease(lease)

    asyncio.run(main())


def test_many_keys_at_once(kubeconfig: Path, namespace: str) -> None:
    async def main() -> None:
        with closed(store(kubeconfig, namespace)) as control:
            await control.write_many([Write(f"topic/{n:03d}", b"x" * n) for n in range(60)])
            assert [len(e.value) for e in control.cached_entries("topic").values()] == list(range(60))
            await control.write_many([Write(f"topic/{n:03d}", None) for n in range(60)])
            assert control.cached_entries("topic") == {}

    asyncio.run(main())


def test_who_may_not_is_told_so(kubeconfig: Path, namespace: str, tmp_path: Path) -> None:
    document = json.loads(kubeconfig.read_text())
    document["users"][0]["user"] = {"token": "wr0ng"}
    stranger = tmp_path / "kubeconfig"
    stranger.write_text(json.dumps(document))
    with pytest.raises(ControlError, match="the token is not, or no longer, valid") as caught:
        store(stranger, namespace)
    assert "wr0ng" not in str(caught.value) + repr(server_from_kubeconfig(stranger))


def test_an_address_opens_it(kubeconfig: Path, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with closed(open_kubernetes(address(f"kubernetes://{namespace}/mesh"), SystemClock())) as control:
        assert asyncio.run(control.put("topic/a", b"1")) > 0
    for bad in ("kubernetes://", "kubernetes://ns", "kubernetes://NS/mesh", "kubernetes://ns/mesh/more"):
        with pytest.raises(ValueError, match="NAMESPACE/NAME"):
            parse_control(bad)
    with pytest.raises(ControlError, match="name the namespace"):
        open_kubernetes(address("kubernetes:///mesh"), SystemClock())


def address(text: str) -> KubernetesAddress:
    found = parse_control(text)
    assert isinstance(found, KubernetesAddress)
    return found


class Relay:
    """A TCP relay to the API that can be cut."""

    def __init__(self, target: ApiServer) -> None:
        self._target, self._open = (target.host, target.port), True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        port = int(self._listener.getsockname()[1])
        self.server = ApiServer("127.0.0.1", port, target.path, target.tls, target.token)

    def cut(self) -> None:
        self._open = False
        self._end_all()

    def mend(self) -> None:
        self._open = True

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._end_all()
        for thread in self._threads:
            thread.join(10)

    def _end_all(self) -> None:
        for end in tuple(self._ends):
            with suppress(OSError):  # its other side ended just now
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if not self._open:
                client.close()
                continue
            upstream = socket.create_connection(self._target)
            for one, other in ((client, upstream), (upstream, client)):
                self._ends.add(one)
                thread = threading.Thread(target=self._carry, args=(one, other), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        finally:
            self._ends.discard(one)
            one.close()


@contextmanager
def relayed(kubeconfig: Path) -> Iterator[Relay]:
    relay = Relay(server_from_kubeconfig(kubeconfig))
    try:
        yield relay
    finally:
        relay.close()
