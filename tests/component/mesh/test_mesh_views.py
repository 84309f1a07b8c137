"""Views on a mesh: every node lists and gives what a lone node that has everything lists and gives."""

from __future__ import annotations

import errno
import io
import itertools
import os
import tarfile
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from meshd.core.document_store import RESERVED_BUCKET
from meshd.store.integrity.verification import drain_damage_reports
from meshd.util import failpoints
from meshsdk.admin.views import batches_view, shards_view, transform_view, zarr_view
from tests.component.mesh.test_mesh_batches import fill
from tests.support.mesh_processes import ROOT, MeshCrew
from tests.support.native_fixtures import CROP, Mesh, png

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshd.store.records import Record

DECODED = [{"op": "decode", "args": {}}, {"op": "resize", "args": {"size": 8}}, {"op": "to_npy", "args": {}}]
ROWS = [
    {"op": "decode", "field": "image", "args": {}},
    {"op": "center_crop", "field": "image", "args": {"size": 12}},
]
FIELDS = {"image": {"ext": ["png"]}}
VIEWS: dict[str, dict[str, Any]] = {
    "small": transform_view(DECODED, match=[".png"], suffix=".npy", prefix="train/"),
    "tars": shards_view(count=7, prefix="train/", match=[".png"]),
    "again": shards_view(count=9, prefix="shards/", samples="archives", where="number(stem) < 40"),
    "records": shards_view(count=10, prefix="train/", match=[".png"], format="tfrecord"),
    "arrays": zarr_view(FIELDS, ROWS, prefix="train/", chunk=8, on_bad="mask"),
    "now": zarr_view(FIELDS, ROWS, prefix="train/", chunk=8, on_bad="mask", follow=True),
}


@pytest.fixture(scope="module")
def crews() -> Iterator[list[MeshCrew]]:
    with ExitStack() as stack:
        crews = [stack.enter_context(MeshCrew(number)) for number in (1, 3)]
        for crew in crews:
            fill(crew)
        yield crews


@pytest.fixture
def wires(crews: list[MeshCrew]) -> Iterator[list[Mesh]]:
    found = [Mesh(one.endpoint, *ROOT) for crew in crews for one in crew.nodes]
    yield found
    for wire in found:
        wire.close()


def listed(wire: Mesh, bucket: str) -> list[tuple[str, ...]]:
    """(key, size, ETag) of everything, over pages."""
    found: list[tuple[str, ...]] = []
    query = "list-type=2&max-keys=5"
    while True:
        answer = wire.call("GET", f"/{bucket}?{query}")
        assert answer.status == 200, answer.body
        page = ElementTree.fromstring(answer.body)
        space = page.tag.removesuffix("ListBucketResult")
        for entry in page.iter(f"{space}Contents"):
            found.append(tuple(entry.findtext(space + name, "") for name in ("Key", "Size", "ETag")))
        token = page.findtext(f"{space}NextContinuationToken")
        if token is None:
            return found
        query = f"continuation-token={token}&list-type=2&max-keys=5"


def first_of(wire: Mesh, bucket: str) -> bytes:
    answer = wire.call("GET", f"/{bucket}/{listed(wire, bucket)[0][0]}")
    assert answer.status == 200
    return answer.body


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_the_same_on_every_node(wires: list[Mesh], name: str) -> None:
    document = {"bucket": "pictures", "name": name, "view": VIEWS[name]}
    lone, *others = wires
    for wire in (lone, others[0]):
        made = wire.post("/-/views", document)
        assert made.status == 200, made.body
    bucket = f"pictures--{name}"
    expected = listed(lone, bucket)
    assert len(expected) >= 4
    bodies = {key: lone.call("GET", f"/{bucket}/{key}").body for key, *_ in expected}
    for wire in others:
        assert listed(wire, bucket) == expected
        for key, size, *_ in expected:
            answer = wire.call("GET", f"/{bucket}/{key}")
            assert (answer.status, answer.body) == (200, bodies[key]), (key, answer.body[:200])
            assert len(answer.body) == int(size)


def test_views_of_batches_are_the_same_on_every_node(wires: list[Mesh]) -> None:
    lone, *others = wires
    for wire in (lone, others[0]):
        snapshot = wire.snapshot("s3://pictures/train/", FIELDS)["snapshot"]
        plan = wire.plan(snapshot, CROP, on_bad="mask", max_bad=0.5)["plan"]
        view = batches_view(plan, 16)
        assert wire.post("/-/views", {"bucket": "pictures", "name": "b", "view": view}).status == 200
    expected = listed(lone, "pictures--b")
    for wire in others:
        assert listed(wire, "pictures--b") == expected
        for key, *_ in expected:
            one, other = (each.call("GET", f"/pictures--b/{key}").body for each in (lone, wire))
            assert one == other


def test_a_view_follows_what_other_nodes_write(crews: list[MeshCrew]) -> None:
    crew = crews[1]
    wires = [Mesh(one.endpoint, *ROOT) for one in crew.nodes]
    crew.put("pictures", "late/a.png", png(1))
    view = shards_view(count=2, prefix="late/", match=[".png"])
    assert wires[0].post("/-/views", {"bucket": "pictures", "name": "late", "view": view}).status == 200
    before = {
        wire.call("GET", f"/pictures--late/{listed(wire, 'pictures--late')[0][0]}").body for wire in wires
    }
    assert len(before) == 1
    crew.put("pictures", "late/a.png", png(2))
    after = {
        wire.call("GET", f"/pictures--late/{listed(wire, 'pictures--late')[0][0]}").body for wire in wires
    }
    assert len(after) == 1
    assert before != after
    for wire in wires:
        wire.close()


@pytest.mark.parametrize("how", ["ends", "errors", "small"])
def test_a_shard_goes_on_from_another_owner(crews: list[MeshCrew], how: str) -> None:
    """Of a member that cannot be read here, in the middle of an answer."""
    crew, folder, large = crews[1], f"torn-{how}", os.urandom(3_000_000)
    files = {"a": large[:40_000], "b": large, "c": large[::-1], "d": b"d"}
    if how == "small":
        files["b"] = large[:50_000]
    for name, data in files.items():
        crew.put("pictures", f"{folder}/{name}", data)
    owners = crew.nodes[0].node.mesh.route_for("pictures", f"{folder}/b").read_set
    first = next(one for one in crew.nodes if one.node.mesh.node_id == owners[0].node_id)
    wire = Mesh(first.endpoint, *ROOT)
    view = shards_view(count=10, prefix=f"{folder}/")
    assert wire.post("/-/views", {"bucket": "pictures", "name": folder, "view": view}).status == 200
    target = f"/pictures--{folder}/shard-000000.tar"
    answer = wire.call("GET", target)
    assert answer.status == 200, answer.body
    whole = answer.body
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        assert {entry.name: tar.extractfile(entry).read() for entry in tar} == files  # type: ignore[union-attr]  # files all
    record = first.node.store.get("pictures", f"{folder}/b")
    assert record is not None
    (extent,) = record.extents
    if how == "errors":
        hits = itertools.count()

        def fail() -> None:
            if next(hits) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        failpoints.set_callback("web.send.before", fail)
    else:
        at = extent.offset + (1_500_077 if how == "ends" else 7)
        os.truncate(first.node.store._disks.path(extent.disk, extent.file), at)
    assert wire.call("GET", target).body == whole
    failpoints.configure("")
    assert extent in drain_damage_reports(lambda extent: True)
    if how != "errors":
        ranged = wire.call("GET", target, headers={"range": "bytes=41000-5000000"})
        assert (ranged.status, ranged.body) == (206, whole[41_000:5_000_001])
    wire.close()


def _kept(crew: MeshCrew, size: int) -> Record:
    """The one result of at least so many bytes that the first node keeps."""
    page = crew.nodes[0].node.store.list(RESERVED_BUCKET, prefix="views/", limit=1000)
    (found,) = [record for _, record in page.entries if record.size > size]
    return found


_TORN = [("transform", "small"), *itertools.product(["transform", "zarr"], ["ends", "errors", "first"])]


@pytest.mark.parametrize(("kind", "how"), _TORN)
@pytest.mark.parametrize("nodes", [0, 1])
def test_what_is_made_goes_on_from_one_that_is_made_again(
    crews: list[MeshCrew], nodes: int, kind: str, how: str
) -> None:
    """Of an object that cannot be read where it is kept, in the middle or from its beginning on."""
    crew, name, side = crews[nodes], f"anew-{kind}-{how}", 120 if how == "small" else 640
    first = crew.nodes[0]
    crew.put("pictures", f"{name}/a.png", png(5))
    resized = {"op": "resize", "args": {"size": [side, side]}}
    decoded = [{"op": "decode", "args": {}}, resized]
    if kind == "transform":
        view = transform_view([*decoded, {"op": "to_npy", "args": {}}], prefix=f"{name}/")
    else:
        rows = [op | {"field": "image"} for op in decoded]
        view = zarr_view(FIELDS, rows, prefix=f"{name}/", chunk=1)
    wire = Mesh(first.endpoint, *ROOT)
    assert wire.post("/-/views", {"bucket": "pictures", "name": name, "view": view}).status == 200
    key = next(key for key, *_ in listed(wire, f"pictures--{name}") if not key.endswith("json"))
    key = "image/c/0/0/0/0" if kind == "zarr" else key
    target = f"/pictures--{name}/{key}"
    answer = wire.call("GET", target)
    assert answer.status == 200, answer.body
    whole = answer.body
    record = _kept(crew, side * side)
    (extent,) = record.extents
    path = first.node.store._disks.path(extent.disk, extent.file)
    if how == "errors":
        hits = itertools.count()

        def fail() -> None:
            if next(hits) == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        failpoints.set_callback("web.send.before", fail)
    elif how == "small":  # which lies beside others
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), b"?!", extent.offset + 7)
    else:
        os.truncate(path, extent.offset + (7 if how == "first" else extent.length // 2))
    took = wire.call("GET", target)
    failpoints.configure("")
    assert (took.status, took.body == whole) == (200, True)
    if how == "small":
        crew.run(
            first.node.store.quarantine.process_damage_reports()
        )  # it goes to quarantine, and is made again for whoever comes
        assert wire.call("GET", target).body == whole
        assert not _kept(crew, side * side).broken
    else:
        assert extent in drain_damage_reports(lambda extent: True)
    if how in ("ends", "first"):
        ranged = wire.call("GET", target, headers={"range": "bytes=3-"})
        assert (ranged.status, ranged.body == whole[3:]) == (206, True)
        drain_damage_reports(lambda extent: True)
    wire.close()
    crew.run(first.node.store.delete_many(RESERVED_BUCKET, [_name(crew, record)]))


def _name(crew: MeshCrew, record: Record) -> str:
    page = crew.nodes[0].node.store.list(RESERVED_BUCKET, prefix="views/", limit=1000)
    return next(name for name, found in page.entries if found.etag == record.etag)
