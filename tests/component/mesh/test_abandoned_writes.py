"""Nothing is done for a node that was given up while it passed a write on, also when it is back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

from meshd.cluster.replication.forwarded_writes import FORWARD_REQUEST, FORWARD_WRITE
from meshd.cluster.replication.replicated_store import ReplicatedWriter
from meshd.rpc.peer_client import PeerUnreachableError
from meshd.server.proxy.response_relay import ResponseRelay
from meshd.store.errors import (
    NotReplicatedError,
)
from meshd.store.records import Meta, Upload, WriteContext
from meshwire.cluster.transitions import (
    cancel_drain,
    drain_node,
    join_node,
    mark_complete,
    mark_node_away,
    mark_node_down,
)
from meshwire.http_values.conditional_requests import Conditions
from tests.support.bounded_wait import await_true
from tests.support.mesh_nodes import (
    among,
    change_map,
    decider_of,
    owners_alike,
    shared_store,
    with_clients,
)
from tests.support.store_calls import error_of, fake_etag, new_object, put_object

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from meshd.rpc.http_connection import ResponseHead
    from meshd.store.records import Record
    from meshwire.cluster import ClusterMap, Node
    from tests.support.mesh_nodes import Running

LARGE = 3_000_000


@pytest.mark.parametrize("gone", ["who decided", "who passed it on"])
def test_nothing_is_done_for_a_caller_that_was_marked_away(gone: str) -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        store, name = decider.node.replicated_store, decider.node.settings.node_id
        other = next(node for node in nodes if node is not decider).node.settings.node_id
        upload = await store.create_upload(Upload("", "b", "k"))
        await put_object(store, "k", b"kept")
        version = decider.node.mesh.current_map().version
        await change_map(
            nodes, lambda cluster: mark_node_away(cluster, name if gone == "who decided" else other)
        )

        async def nothing_is_done() -> None:
            old = WriteContext(other, version)
            for size in (10, LARGE):
                data = b"x" * size
                await error_of(NotReplicatedError, put_object(store, "k", data, size=size, context=old))
            await error_of(NotReplicatedError, store.delete("b", "k", context=old))
            await error_of(NotReplicatedError, store.amend("b", "k", None, tags={"a": "b"}, context=old))
            await error_of(NotReplicatedError, store.create_upload(Upload("", "b", "k"), context=old))
            await error_of(NotReplicatedError, store.abort_upload(upload, context=old))
            owners_alike(nodes, "k", b"kept")

        await nothing_is_done()
        if gone == "who decided":
            await change_map(nodes, lambda cluster: join_node(cluster, decider.member))
            await nothing_is_done()
            await change_map(nodes, lambda cluster: mark_complete(cluster, name))
            assert decider_of(nodes, "b", "k") is decider
            await nothing_is_done()
        context = WriteContext(other, decider.node.mesh.current_map().version)
        await put_object(store, "k", b"done", context=context)
        owners_alike(nodes, "k", b"done")

    among(3, test, copies=3)


@pytest.mark.parametrize("gone", ["who decided", "who passed it on"])
def test_nothing_is_done_for_a_caller_that_was_given_up_and_came_back(gone: str) -> None:
    async def test(nodes: list[Running]) -> None:
        decider = decider_of(nodes, "b", "k")
        other = next(node for node in nodes if node is not decider)
        back, names = decider if gone == "who decided" else other, [n.node.settings.node_id for n in nodes]
        await put_object(decider.node.replicated_store, "k", b"kept")
        version, name = decider.node.mesh.current_map().version, back.node.settings.node_id
        await change_map(nodes, lambda cluster: mark_node_down(cluster, name))
        for change in (None, lambda cluster: join_node(cluster, back.member), *map(_settles, names)):
            if change is not None:
                await change_map(nodes, change)
            old = put_object(
                decider.node.replicated_store,
                "k",
                b"old",
                context=WriteContext(other.node.settings.node_id, version),
            )
            await error_of(NotReplicatedError, old)
        assert all(node.state == "up" for node in decider.node.mesh.current_map().nodes)
        assert decider_of(nodes, "b", "k") is decider
        owners_alike(nodes, "k", b"kept")

    among(3, test, copies=3)


def test_what_a_node_passed_on_between_two_absences_is_refused_once_it_is_up() -> None:
    """It is marked away a second time while it returns."""

    async def test(nodes: list[Running]) -> None:
        store = decider_of(nodes, "b", "k").node.replicated_store
        passing = next(node for node in nodes if node.node.replicated_store is not store)
        name = passing.node.settings.node_id
        await change_map(nodes, partial(mark_node_away, node_id=name))
        asked = await change_map(nodes, _joins(passing))
        await change_map(nodes, partial(mark_node_away, node_id=name))
        returned = await change_map(nodes, _joins(passing))
        await change_map(nodes, _settles(name))
        await put_object(store, "k", b"new")
        old = put_object(store, "k", b"old", context=WriteContext(name, asked))
        await error_of(NotReplicatedError, old)
        await put_object(store, "k", b"newer", context=WriteContext(name, returned))

    among(3, test)


def _state(node: Running) -> str:
    me = node.node.mesh.own_node
    assert me is not None
    return me.state


def _settles(name: str) -> Callable[[ClusterMap], ClusterMap]:
    return lambda cluster: mark_complete(cluster, name)


def test_a_write_through_a_node_that_is_drained_and_stays_after_all_is_taken() -> None:
    async def test(nodes: list[Running]) -> None:
        changing, *others = nodes
        states: list[str] = []
        name = changing.node.settings.node_id
        settling = [_settles(node.node.settings.node_id) for node in (*others, changing)]
        drains, stays = partial(drain_node, node_id=name), partial(cancel_drain, node_id=name)
        changes: list[Callable[[ClusterMap], ClusterMap]] = [drains, *settling, stays, *settling]
        for number, change in enumerate(changes):
            version = changing.node.mesh.current_map().version
            await change_map(nodes, change)
            store = decider_of(nodes, "b", f"k{number}").node.replicated_store
            await put_object(store, f"k{number}", b"x", context=WriteContext(name, version))
            states.append(_state(changing))
        assert states == ["draining"] * 4 + ["joining"] * 3 + ["up"]

    among(3, test)


@pytest.mark.parametrize("what", ["one", "large", "many"])
def test_a_node_that_stands_still_while_it_passes_a_write_on_passes_it_on_no_more(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with the newest map, and with a request that was begun by an older one."""

    def test(clients: list[Any], nodes: list[Running]) -> None:
        asked = nodes[0]
        name, peers = asked.node.settings.node_id, asked.node.peers
        key = next(f"k{n}" for n in range(100) if not asked.node.mesh.is_primary("bench", f"k{n}"))
        clients[1].put_object(Bucket="bench", Key=key, Body=b"kept")
        wire, stood = peers.acquire_connection, list[str]()

        async def stands_still(*args: Any, **more: Any) -> Any:
            if not stood:
                stood.append(name)
                for change in (partial(mark_node_away, node_id=name), _joins(asked), _settles(name)):
                    await change_map(nodes, change)
            return await wire(*args, **more)

        monkeypatch.setattr(peers, "acquire_connection", stands_still)
        ask = partial(clients[0].put_object, Key=key, Body=b"o" * (10 if what == "one" else LARGE))
        if what == "many":
            ask = partial(clients[0].delete_objects, Delete={"Objects": [{"Key": key}]})
        with pytest.raises(ClientError, match="SlowDown"):
            ask(Bucket="bench")
        assert stood
        assert clients[1].get_object(Bucket="bench", Key=key)["Body"].read() == b"kept"
        clients[0].put_object(Bucket="bench", Key=key, Body=b"new")

    with_clients(3, test)


def _joins(node: Running) -> Callable[[ClusterMap], ClusterMap]:
    return lambda cluster: join_node(cluster, node.member)


def test_a_node_that_stands_still_before_it_gives_a_write_to_who_decides_gives_it_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(nodes: list[Running]) -> None:
        former = decider_of(nodes, "b", "k")
        others = [node.node.settings.node_id for node in nodes if node is not former]
        name = former.node.settings.node_id
        await change_map(nodes, partial(drain_node, node_id=name))
        for settles in map(_settles, others):
            await change_map(nodes, settles)
        writer = former.node.replicated_store.writer("b", "k", size=1)
        await writer.write(b"x")
        assert isinstance(writer, ReplicatedWriter)
        drop, stood = writer._abort_streams, list[str]()

        async def stands_still() -> None:
            if not stood:
                stood.append(name)
                await change_map(nodes, partial(mark_node_away, node_id=name))
                await change_map(nodes, _joins(former))
            await drop()

        monkeypatch.setattr(writer, "_abort_streams", stands_still)
        context = WriteContext(name, former.node.mesh.current_map().version)
        await error_of(NotReplicatedError, writer.commit(Meta("x"), context=context))
        assert stood
        owners_alike(nodes, "k", None)

    among(3, test)


@pytest.mark.parametrize("what", ["put", "put many", "delete", "copy", "abort"])
def test_a_write_that_was_committed_before_an_absence_is_not_acknowledged_after_it(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its primary returns with it, after another node has decided about the same state of the name."""

    async def test(nodes: list[Running]) -> None:
        former = decider_of(nodes, "b", "k")
        store, name = shared_store(former), former.node.settings.node_id
        heir = next(node for node in nodes if node is not former)
        upload = await store.create_upload(Upload("", "b", "k"))
        first = await put_object(store, "k", b"first")
        context = WriteContext(name, former.node.mesh.current_map().version)
        call_typed, returned = former.peers.call_typed, asyncio.Event()

        async def stands_still(*args: Any, **more: Any) -> Any:
            if former.node.mesh.current_map().version == context.map_version:
                await returned.wait()
            return await call_typed(*args, **more)

        monkeypatch.setattr(former.peers, "call_typed", stands_still)
        since = Conditions(if_match=(fake_etag(b"first"),))
        writes: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "put": lambda: put_object(store, "k", b"second", conditions=since, context=context),
            "put many": lambda: store.put_many("b", [new_object("k", b"second")], context=context),
            "delete": lambda: store.delete("b", "k", conditions=since, context=context),
            "copy": lambda: store.link("b", "k", first, Meta("copied"), since, context=context),
            "abort": lambda: store.abort_upload(upload, context=context),
        }
        writing = asyncio.ensure_future(writes[what]())
        await asyncio.to_thread(await_true, lambda: _committed(former, upload, first))
        await change_map(nodes, partial(mark_node_away, node_id=name))
        if what == "abort":
            await shared_store(heir).abort_upload(upload)
        else:  # the same condition holds there
            await put_object(shared_store(heir), "k", b"third", conditions=since)
        await change_map(nodes, _joins(former))
        await put_object(shared_store(heir), "k", b"fourth")  # which the former primary gets, too
        returned.set()
        assert "may or may not have taken effect" in str(await error_of(NotReplicatedError, writing))
        owners_alike(nodes, "k", b"fourth")

    among(2, test)


def _committed(node: Running, upload: Upload, first: Record) -> bool:
    store = node.node.store
    return store.get("b", "k") != first or store.get_upload("b", "k", upload.upload_id) is None


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("what", ["create", "replace", "delete", "copy"])
def test_a_conditional_write_whose_answer_is_lost_is_not_refused_by_its_own_result(
    what: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(nodes: list[Running]) -> None:
        primary = decider_of(nodes, "b", "k")
        passing = next(node for node in nodes if node is not primary)
        store, name = shared_store(passing), passing.node.settings.node_id
        before = None if what == "create" else await put_object(store, "k", b"first" * size)
        source = await put_object(passing.node.store, "source", b"source" * size)
        context = WriteContext(name, passing.node.mesh.current_map().version)
        call_typed, sent = passing.peers.call_typed, list[str]()

        async def loses_answers(node: Node, call: Any, request: Any, **more: Any) -> Any:
            answer = await call_typed(node, call, request, **more)
            if call in (FORWARD_REQUEST, FORWARD_WRITE):
                sent.append(node.node_id)
                if len(sent) == 1:
                    raise PeerUnreachableError("the connection was closed", begun=True)
            return answer

        monkeypatch.setattr(passing.peers, "call_typed", loses_answers)
        conditions = Conditions(if_none_match=("*",)) if before is None else Conditions((before.etag,))
        body = b"second" * size
        writes: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "create": lambda: put_object(store, "k", body, conditions=conditions, context=context),
            "replace": lambda: put_object(store, "k", body, conditions=conditions, context=context),
            "delete": lambda: store.delete("b", "k", conditions=conditions, context=context),
            "copy": lambda: store.link("b", "k", source, Meta("copied"), conditions, context=context),
        }
        error = await error_of(NotReplicatedError, writes[what]())
        assert "may or may not have taken effect" in str(error)
        assert sent == [primary.node.settings.node_id]
        found = primary.node.store.get("b", "k")
        etags = {"create": fake_etag(body), "replace": fake_etag(body), "delete": None, "copy": "copied"}
        assert (None if found is None else found.etag) == etags[what]

    among(3, test)


def test_a_conditional_request_whose_answer_is_lost_is_not_forwarded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost, pass_on = list[int](), ResponseRelay.on_head

    def lose_answer(relay: ResponseRelay, head: ResponseHead) -> None:
        lost.append(head.status)
        if len(lost) > 1:
            return pass_on(relay, head)
        relay.fail(PeerUnreachableError("the connection was closed", begun=True))
        return None

    def test(clients: list[Any], nodes: list[Running]) -> None:
        primary = nodes.index(decider_of(nodes, "bench", "k"))
        monkeypatch.setattr(ResponseRelay, "on_head", lose_answer)
        with pytest.raises(ClientError, match=r"SlowDown.*may or may not have been executed"):
            clients[primary - 1].put_object(Bucket="bench", Key="k", Body=b"1", IfNoneMatch="*")
        assert lost == [200]
        assert clients[primary].get_object(Bucket="bench", Key="k")["Body"].read() == b"1"

    with_clients(3, test)
