"""Buckets with origins on a mesh of three: one fetch for all nodes, writes, listings, a node killed."""

from __future__ import annotations

import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ClientError

import meshsdk
from meshsdk.admin import jobs, views
from meshwire.frame import tensor_frame
from tests.component.origins.test_origins_training import epoch, fill, opened
from tests.component.origins.test_origins_writing import at_origin, is_at_origin
from tests.support import origin_views
from tests.support.daemon_cluster import DaemonCluster
from tests.support.origin_fixtures import bucket, code, eventually, put, read, sdk, write_credentials
from tests.support.required import require_etcd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.origin_places import Place

require_etcd()
MIB = 1 << 20


@pytest.fixture(scope="module")
def started(_origin: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonCluster]:
    credentials = tmp_path_factory.mktemp("credentials")
    write_credentials(credentials, _origin)
    with DaemonCluster.start(3, args=["--origin-credentials", str(credentials)]) as three:
        yield three
        assert "Traceback" not in three.output()


@pytest.fixture
def mesh(started: DaemonCluster) -> DaemonCluster:
    return started.await_healthy()


@pytest.fixture
def clients(mesh: DaemonCluster) -> list[Any]:
    return [mesh[f"n{number}"].client() for number in (1, 2, 3)]


def patiently(client: Any, name: str, key: str) -> bytes:
    """As a client with retries reads."""
    found: list[bytes] = []

    def tried() -> bool:
        try:
            found.append(read(client, name, key))
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 503:
                raise
        return bool(found)

    eventually(tried)
    return found[0]


def test_a_bucket_is_known_at_every_node_when_its_creation_is_answered(
    mesh: DaemonCluster, origin: Place
) -> None:
    put(origin, "known", "one", b"1")
    backed = {
        "url": f"s3://{origin.bucket}/known",
        "endpoint": origin.proxy.endpoint,
        "credentials": "weed",
    }
    view = {"bucket": "known-copies", "name": "seen", "view": {"kind": "shards", "count": 4}}
    for method, path, shown, document in [
        ("PUT", "/-/buckets/known", "/-/buckets/known", backed),
        ("PUT", "/-/buckets/known-copies", "/-/buckets/known-copies", {"copies": 2}),
        ("PATCH", "/-/buckets/known", "/-/buckets/known", {"write": "off"}),
        ("POST", "/-/views", "/-/views/known-copies--seen", view),
    ]:
        mesh.pause("n2")
        with ThreadPoolExecutor(1) as pool:
            change = pool.submit(mesh["n1"].request, method, path, json.dumps(document).encode())
            with pytest.raises(TimeoutError):  # n2 does not know of it
                change.result(0.5)
            mesh.resume("n2")
        answer = change.result()
        found = mesh["n2"].request("GET", shown)
        assert (answer.status, found.status) == (200, 200), (answer.body, found.body)
        known = json.loads(found.body)
        assert known | json.loads(answer.body) == known


def test_readers_at_all_nodes_cost_one_fetch(mesh: DaemonCluster, clients: list[Any], origin: Place) -> None:
    data = os.urandom(5 * MIB)
    put(origin, "eight", "one", data)
    bucket(mesh["n1"], origin, "eight")
    origin.faults.delay = 0.3
    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(lambda number: read(clients[number % 3], "eight", "one"), range(9)))
    assert all(each == data for each in found)
    assert len(origin.faults.gets("/one")) == 1


def test_what_one_node_wrote_all_read_and_list(
    mesh: DaemonCluster, clients: list[Any], origin: Place
) -> None:
    bucket(mesh["n2"], origin, "written")
    put(origin, "written", "z-there", b"z")
    for number in range(12):
        clients[number % 3].put_object(Bucket="written", Key=f"k{number:02d}", Body=b"%d" % number)
        assert at_origin(origin, "written", f"k{number:02d}") == b"%d" % number
        assert read(clients[(number + 1) % 3], "written", f"k{number:02d}") == b"%d" % number
        listed = clients[(number + 2) % 3].list_objects_v2(Bucket="written")["Contents"]
        assert [each["Key"] for each in listed] == [*[f"k{n:02d}" for n in range(number + 1)], "z-there"]
    clients[0].put_object(Bucket="written", Key="k00", Body=b"newer")
    assert [read(client, "written", "k00") for client in clients] == [b"newer"] * 3
    clients[1].delete_object(Bucket="written", Key="k00")
    assert [code(each.get_object, Bucket="written", Key="k00") for each in clients] == ["NoSuchKey"] * 3
    wanted = [{"Key": f"k{number:02d}"} for number in range(12)]
    assert len(clients[2].delete_objects(Bucket="written", Delete={"Objects": wanted})["Deleted"]) == 12
    assert [each["Key"] for each in clients[0].list_objects_v2(Bucket="written")["Contents"]] == ["z-there"]


def test_pages_of_a_listing_are_kept_until_somebody_writes(
    mesh: DaemonCluster, clients: list[Any], origin: Place
) -> None:
    bucket(mesh["n1"], origin, "paged")
    put(origin, "paged", "a", b"a")

    def listed(client: Any) -> list[str]:
        return [each["Key"] for each in client.list_objects_v2(Bucket="paged").get("Contents", [])]

    def asked() -> int:
        return sum("list-type" in head for head in origin.faults.heads)

    def none_is_asked() -> bool:
        before = asked()
        return all(listed(client) == ["a"] for client in clients) and asked() == before

    eventually(none_is_asked)
    for number, writer in enumerate(clients):
        writer.put_object(Bucket="paged", Key=f"b{number}", Body=b"b")
        wanted = ["a", *[f"b{each}" for each in range(number + 1)]]
        assert [listed(client) for client in clients] == [wanted] * 3
    clients[0].delete_object(Bucket="paged", Key="b1")
    assert [listed(client) for client in clients] == [["a", "b0", "b2"]] * 3


def test_copies_between_nodes(mesh: DaemonCluster, clients: list[Any], origin: Place) -> None:
    bucket(mesh["n1"], origin, "from")
    clients[0].create_bucket(Bucket="lives")
    for number in range(6):
        put(origin, "from", f"{number}", b"%d" % number)
    for number in range(6):
        source = {"Bucket": "from", "Key": f"{number}"}
        clients[number % 3].copy_object(Bucket="lives", Key=f"copy-{number}", CopySource=source)
        assert read(clients[(number + 1) % 3], "lives", f"copy-{number}") == b"%d" % number


def test_an_epoch_through_any_node(mesh: DaemonCluster, origin: Place) -> None:
    fill(mesh["n3"], origin, "far", "here")
    hashes = []
    for node in mesh.nodes.values():
        with sdk(node) as client:
            hashes.append(epoch(opened(client, "far")))
            hashes.append(epoch(opened(client, "here")))
    assert all(each == hashes[0] for each in hashes)
    assert len(origin.faults.gets("far/train")) <= 44  # each photograph once, and some were looked at


def unasked(clients: list[Any], origin: Place, name: str, keys: dict[str, bytes]) -> None:
    """All nodes give these, and the origin is not asked for any."""
    before = len(origin.faults.gets(f"{name}/"))
    for number, (key, data) in enumerate(keys.items()):
        assert read(clients[number % 3], name, key) == data
    assert len(origin.faults.gets(f"{name}/")) == before


def test_prefetching_over_all_nodes(mesh: DaemonCluster, clients: list[Any], origin: Place) -> None:
    keys = {f"a/{number:02d}": os.urandom(2000) for number in range(40)} | {"big": os.urandom(20 * MIB)}
    for key, data in keys.items():
        put(origin, "warmed", key, data)
    bucket(mesh["n1"], origin, "warmed", immutable=True)
    clients[1].create_bucket(Bucket="lists")
    clients[1].put_object(Bucket="lists", Key="m.txt", Body=b"a/01\na/02\nmissing\na/03\n")
    with sdk(mesh["n1"]) as one, sdk(mesh["n2"]) as two:
        listed = {"kind": "prefetch", "source": "s3://warmed", "manifest": "s3://lists/m.txt"}
        done = jobs.wait_for_job(two.transport, jobs.start_job(one.transport, listed).id)
        assert (done.state, done.progress.written, done.failed) == ("done", 3, 1), done
        assert "missing" in done.failures[0][0]
        document = {"kind": "prefetch", "source": "s3://warmed/"}
        begun = jobs.start_job(two.transport, document | {"rate": 1000})  # of hours
        eventually(lambda: jobs.show_job(one.transport, begun.id).progress.outputs >= 3)
        jobs.pause_job(one.transport, begun.id)
        assert jobs.wait_for_job(two.transport, begun.id).state == "paused"
        done = jobs.wait_for_job(one.transport, jobs.start_job(one.transport, document).id)
    assert (done.state, done.progress.outputs, done.failed) == ("done", 41, 0), done
    assert done.progress.bytes == 80_000 + 20 * MIB
    assert done.progress.there >= 3
    unasked(clients, origin, "warmed", keys)


def test_a_rate_is_that_of_all_nodes_together(mesh: DaemonCluster, origin: Place) -> None:
    for number in range(24):
        put(origin, "slow", f"{number:02d}", os.urandom(100_000))
    bucket(mesh["n1"], origin, "slow", immutable=True)
    document = {"kind": "prefetch", "source": "s3://slow/"}
    with sdk(mesh["n1"]) as one, sdk(mesh["n2"]) as two:
        begun = jobs.start_job(one.transport, document | {"rate": 1})  # of weeks
        eventually(lambda: jobs.show_job(two.transport, begun.id).progress.outputs >= 1)
        limited = jobs.start_job(two.transport, document | {"rate": 1_200_000})
        assert (limited.id, limited.run, limited.spec["rate"]) == (begun.id, begun.run, 1_200_000)
        done = jobs.wait_for_job(two.transport, begun.id)
    assert (done.state, done.progress.outputs, done.failed) == ("done", 24, 0), done
    assert done.ended_ms - done.started_ms > 1000  # 2.4 MB, of which a moment's are free


@pytest.mark.parametrize("killed", ["n3", "n1"], ids=["another", "who-counts"])
def test_prefetching_goes_on_when_a_node_is_killed(mesh: DaemonCluster, origin: Place, killed: str) -> None:
    keys = {f"{number:03d}": os.urandom(1000) for number in range(150)}
    name = f"lost-{killed}"
    for key, data in keys.items():
        put(origin, name, key, data)
    bucket(mesh["n1"], origin, name, immutable=True)
    origin.faults.delay = 0.3
    with sdk(mesh["n1"]) as one:
        job = jobs.start_job(one.transport, {"kind": "prefetch", "source": f"s3://{name}/"}).id
        eventually(lambda: jobs.show_job(one.transport, job).progress.outputs >= 30)
    mesh.kill(killed)
    try:
        with sdk(mesh["n2"]) as two:
            done = jobs.wait_for_job(two.transport, job)
        assert (done.state, done.progress.outputs, done.failed) == ("done", 150, 0), done
        mesh.await_state(killed, "away")
        others = [mesh[node].client() for node in ("n1", "n2", "n3") if node != killed]
        unasked([*others, others[0]], origin, name, keys)
    finally:
        origin.faults.delay = 0
        mesh.up(killed)
        mesh.await_state(killed, "up")


def test_homes_keep_a_copy_each_and_all_others_none(
    mesh: DaemonCluster, clients: list[Any], origin: Place
) -> None:
    for number in range(8):
        put(origin, "homely", f"{number}", b"%d" % number * 1000)
    bucket(mesh["n1"], origin, "homely", write="off", homes=["n3"])

    def lies() -> list[int]:
        asked = [mesh[name].request("GET", "/-/residence/homely") for name in ("n1", "n2", "n3")]
        return [json.loads(each.body)["objects"] for each in asked]

    def change(*homes: str) -> None:
        body = json.dumps({"homes": homes}).encode()
        assert mesh["n2"].request("PATCH", "/-/buckets/homely", body).status == 200

    for client in clients:
        for number in range(8):
            assert read(client, "homely", f"{number}") == b"%d" % number * 1000
    eventually(lambda: lies() == [0, 0, 8])
    assert len(origin.faults.gets("homely/")) == 8  # each once, whoever was asked
    change("n1", "n3")
    eventually(lambda: [read(clients[0], "homely", f"{number}") for number in range(8)] and lies()[0] == 8)
    assert lies() == [8, 0, 8]  # asked at home, it answers itself
    change("n1", "n2")
    with sdk(mesh["n3"]) as client:
        done = jobs.wait_for_job(
            client.transport,
            jobs.start_job(client.transport, {"kind": "prefetch", "source": "s3://homely/"}).id,
        )
    assert (done.progress.outputs, done.progress.bytes, done.failed) == (16, 16_000, 0)  # 8 at each home
    assert done.progress.copies == 2
    assert lies() == [8, 8, 8]  # what n3 has nobody reads any more
    change("n9")  # none of them answers: as if there were none
    assert [read(clients[1], "homely", f"{number}") for number in range(8)]
    body = json.dumps({"homes": ["n1"], "write": "through"}).encode()
    assert mesh["n2"].request("PATCH", "/-/buckets/homely", body).status == 400


def test_a_new_home_is_filled_by_an_old_one_and_the_origin_is_not_asked(
    mesh: DaemonCluster, clients: list[Any], origin: Place
) -> None:
    """Small and large objects; then one that has changed, which only the origin has."""
    keys = {f"{number}": os.urandom(3000) for number in range(8)} | {"large": os.urandom(17 * MIB)}
    for key, data in keys.items():
        put(origin, "moved", key, data)
    bucket(mesh["n1"], origin, "moved", write="off", ttl=0.0, homes=["n1"])

    def load() -> None:
        with sdk(mesh["n3"]) as client:
            begun = jobs.start_job(client.transport, {"kind": "prefetch", "source": "s3://moved/"})
            done = jobs.wait_for_job(client.transport, begun.id)
        assert (done.state, done.failed) == ("done", 0), done

    def change(*homes: str) -> None:
        body = json.dumps({"homes": homes}).encode()
        assert mesh["n1"].request("PATCH", "/-/buckets/moved", body).status == 200

    load()
    before, lent = len(origin.faults.gets("moved/")), mesh.metric("n2", "meshd_peer_cache_bytes_total")
    change("n1", "n2")
    load()
    assert len(origin.faults.gets("moved/")) == before
    assert mesh.metric("n2", "meshd_peer_cache_bytes_total") == lent + 24_000 + 17 * MIB
    change("n2")
    for number, (key, data) in enumerate(keys.items()):
        assert read(clients[number % 3], "moved", key) == data
    assert len(origin.faults.gets("moved/")) == before
    put(origin, "moved", "3", b"newer")
    change("n2", "n3")  # n1 and n2 have what was there before
    load()
    assert len(origin.faults.gets("moved/")) == before + 1  # n2's; n3 has it from n2
    change("n3")
    assert [read(client, "moved", "3") for client in clients] == [b"newer"] * 3


def calls(mesh: DaemonCluster) -> float:
    """Samples that ops worked on, at all nodes."""
    return sum(mesh.metric(node, "meshd_op_calls_total") for node in mesh.nodes)


def until_called(mesh: DaemonCluster, wanted: float) -> None:
    eventually(lambda: calls(mesh) >= wanted)
    assert calls(mesh) == wanted


def test_views_over_all_nodes(mesh: DaemonCluster, clients: list[Any], origin: Place) -> None:
    first = 40 * secrets.randbelow(25)  # of photographs of which nothing is made yet
    seen, lives = (f"{word}-{secrets.token_hex(4)}" for word in ("seen", "lives"))
    fill(mesh["n1"], origin, seen, lives, first=first)
    origin_views.make(mesh["n1"], seen, lives)
    once = 2 * 40  # two counted steps a photograph
    for name in origin_views.VIEWS:
        before = calls(mesh)
        with ThreadPoolExecutor(3) as pool:  # all nodes at once
            found = list(pool.map(origin_views.contents, clients, [f"{seen}--{name}"] * 3))
        if name in {"small", "arrays"}:  # made once, by one node
            until_called(mesh, before + once)
        assert found == [origin_views.contents(clients[0], f"{lives}--{name}")] * 3
    assert len(origin.faults.gets(f"{seen}/train")) <= 44  # each photograph once, and some were looked at


def tensors(files: dict[str, bytes]) -> dict[str, dict[str, bytes]]:
    """What is in frames, without what names their plan."""
    return {
        key: {name: array.tobytes() for name, array in tensor_frame.tensor_views(data).items()}
        for key, data in files.items()
    }


@pytest.mark.parametrize("rows", ["fixed", "ragged"])
def test_views_of_batches_over_all_nodes(
    mesh: DaemonCluster, clients: list[Any], origin: Place, rows: str
) -> None:
    far, here = f"far-{rows}", f"here-{rows}"
    fill(mesh["n1"], origin, far, here)
    with sdk(mesh["n2"]) as client:
        for name in (far, here):
            dataset = opened(client, name)
            if rows == "ragged":  # whose sizes are known once they were built
                dataset = meshsdk.open(f"s3://{name}/train", fields={"image": "jpg"}, client=client)
            with meshsdk.Loader(dataset, 8, seed=5, output="numpy") as loader:
                view = views.batches_view(loader.plan.hash, 8, world=2)
            views.create_view(client.transport, name, "b", view)
    with ThreadPoolExecutor(3) as pool:  # all nodes at once
        found = list(pool.map(origin_views.contents, clients, [f"{far}--b"] * 3))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 10
    assert tensors(found[0]) == tensors(origin_views.contents(clients[0], f"{here}--b"))
    assert len(origin.faults.gets(f"{far}/train")) <= 44  # each photograph once, and some were looked at


def test_write_back_survives_the_death_of_a_node(
    mesh: DaemonCluster, clients: list[Any], origin: Place
) -> None:
    bucket(mesh["n1"], origin, "back", write="back")
    bucket(mesh["n1"], origin, "cached", immutable=True)
    put(origin, "cached", "c", b"c")
    key = mesh.key_with_primary("n2", "back")
    origin.faults.refuse = True
    for number in range(9):
        clients[number % 3].put_object(Bucket="back", Key=f"k{number}", Body=b"v%d" % number)
    clients[0].put_object(Bucket="back", Key=key, Body=b"mine")
    assert not is_at_origin(origin, "back", key)
    mesh.kill("n2")
    for number in range(9):
        assert patiently(clients[0], "back", f"k{number}") == b"v%d" % number
    assert patiently(clients[2], "back", key) == b"mine"
    origin.faults.refuse = False
    for each in (key, *[f"k{number}" for number in range(9)]):
        eventually(lambda each=each: is_at_origin(origin, "back", each))
    assert at_origin(origin, "back", key) == b"mine"
    assert patiently(clients[0], "cached", "c") == b"c"
    mesh.await_state("n2", "away")  # n3 knows it: it decides, or asks who does
    clients[2].put_object(Bucket="back", Key=key, Body=b"again")
    mesh.up("n2")
    mesh.await_state("n2", "returning", "up")
    for client in (clients[0], mesh["n2"].client(), clients[2]):
        assert patiently(client, "back", key) == b"again"
    eventually(lambda: at_origin(origin, "back", key) == b"again")
