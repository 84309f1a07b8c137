"""Pages of snapshots in a mesh: each is made by one node and sent to the others, which check it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from meshd.control.cluster_map_store import ClusterMapStore
from meshd.core.document_store import RESERVED_BUCKET
from meshd.telemetry import metrics
from meshwire.cluster.transitions import mark_node_away
from meshwire.dataset.paged_snapshot import PagedSnapshot
from meshwire.dataset.snapshot import Snapshot
from meshwire.formats.token_index import encode_token_index
from tests.support.archive_files import tar_of
from tests.support.mesh_processes import ROOT, MeshCrew
from tests.support.native_fixtures import Mesh
from tests.support.tf_example_writer import BytesList, example, record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwire.cluster import ClusterMap
    from tests.support.mesh_processes import Running

SHARDS, ROWS = 12, 5
KINDS = {"lines": ".txt", "tar": ".tar", "tfrecord": ".tfrecord", "tokens": ".bin"}
PARTS = {"tfrecord": {"feature": "x"}, "tokens": {"column": "tokens"}}


@pytest.fixture(scope="module")
def crew() -> Iterator[MeshCrew]:
    with MeshCrew(3) as made:
        for kind in KINDS:
            with_wire(made.nodes[0], lambda wire, kind=kind: wire.call("PUT", f"/{kind}"))
        yield made


def with_wire(node: Running, ask: Any) -> Any:
    wire = Mesh(node.endpoint, *ROOT)
    try:
        return ask(wire)
    finally:
        wire.close()


def fill(crew: MeshCrew, kind: str, folder: str) -> None:
    for number in range(SHARDS):
        rows = [f"{folder} {number} {row} {10**number}".encode() for row in range(ROWS)]
        if kind == "lines":
            data = b"\n".join(rows)
        elif kind == "tar":
            data = tar_of({f"{row}.txt": text for row, text in enumerate(rows)})
        elif kind == "tokens":
            data, index = b"".join(rows), encode_token_index(np.array([*map(len, rows)]), "uint8")
            crew.put(kind, f"{folder}/{number:02}.idx", index)
        else:
            data = b"".join(record(example({"x": BytesList([row])})) for row in rows)
        crew.put(kind, f"{folder}/{number:02}{KINDS[kind]}", data)


def opened(node: Running, kind: str, folder: str) -> str:
    fields = {"text": PARTS.get(kind, {"ext": ["txt"]})}
    found = with_wire(node, lambda wire: wire.snapshot(f"s3://{kind}/{folder}/", fields, kind=kind))
    assert (found["samples"], found["shards"]) == (SHARDS * ROWS, SHARDS)
    return str(found["snapshot"])


def counted() -> tuple[float, float]:
    """Pages made and fetched, by all nodes, which are one process."""
    found = [metrics.snapshot_pages.labels(result)._value.get() for result in ("made", "fetched")]
    return found[0], found[1]


def forget(node: Running, digest: str) -> None:
    """Nothing in this node's memory says that it has the pages of a snapshot."""
    node.data.catalog.forget_snapshot(digest)
    node.data.datasets.pages._open_pages.clear()


def lengths(crew: MeshCrew, node: Running, digest: str) -> Any:
    snapshot: Any = crew.run(node.data.catalog.snapshot(digest))
    assert isinstance(snapshot, PagedSnapshot)
    column: Any = snapshot.fields["text"]
    return column.lengths_at(range(snapshot.samples)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_mesh_makes_each_page_once(crew: MeshCrew, kind: str) -> None:
    fill(crew, kind, "once")
    before = counted()
    with ThreadPoolExecutor(3) as pool:  # all nodes at the same time
        hashes = set(pool.map(lambda node: opened(node, kind, "once"), crew.nodes))
    assert len(hashes) == 1
    digest = hashes.pop()
    found = [lengths(crew, node, digest) for node in crew.nodes]
    assert found == [found[0]] * 3
    made, fetched = counted()
    assert (made - before[0], fetched - before[1]) == (SHARDS, 2 * SHARDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_a_node_sends_is_the_right_one_or_not_used(crew: MeshCrew, kind: str) -> None:
    fill(crew, kind, "wrong")
    digest = opened(crew.nodes[0], kind, "wrong")
    for node in crew.nodes:  # equal pages of other folders are open
        forget(node, digest)
        expected = lengths(crew, node, digest)
    snapshot: Any = crew.run(crew.nodes[0].data.catalog.snapshot(digest))
    pages = crew.nodes[0].data.datasets.pages
    other = pages.page_document(snapshot, 1)
    name, key = pages._page_name(snapshot, 0), snapshot.objects.keys[0]
    owners = [node.node_id for node in crew.nodes[0].node.mesh.route_for(kind, key).read_set]
    first, second = (crew.nodes[int(owner[1:]) - 1] for owner in owners)
    third = next(node for node in crew.nodes if node not in (first, second))

    def asks_for(wrong: bytes, *where: Running) -> tuple[float, float]:
        """How many pages are made and fetched by the node without a copy, which has lost the page."""
        for node in where:
            crew.run(node.data.catalog.write_document(name, wrong))
        crew.run(third.node.store.delete(RESERVED_BUCKET, name))
        forget(third, digest)
        before = counted()
        assert lengths(crew, third, digest) == expected
        made, fetched = counted()
        return made - before[0], fetched - before[1]

    def restart(node: Running) -> None:
        makers: Any = node.data.datasets.pages.makers
        makers[kind]._pages._read.clear()

    assert asks_for(b"") == (0, 1)
    for wrong in (b"damaged", other):  # the page of another shard is a page, but not that of the snapshot
        assert asks_for(wrong, first) == (1, 1)  # the first replica remembers its hash
    restart(first)
    assert asks_for(b"damaged", first) == (1, 1)
    restart(first)
    assert asks_for(other, first) == (0, 1)  # from the second
    forget(first, digest)
    before = counted()
    assert lengths(crew, first, digest) == expected
    assert counted() == (before[0], before[1] + 1)


def test_nodes_that_are_silent_are_not_waited_for() -> None:
    with MeshCrew(3) as crew:
        with_wire(crew.nodes[0], lambda wire: wire.call("PUT", "/tar"))
        fill(crew, "tar", "silent")
        digest = opened(crew.nodes[0], "tar", "silent")
        expected = lengths(crew, crew.nodes[0], digest)
        assert crew.run(crew.control.get("paged/tar")) is not None
        crew.kill(0)
        maps = ClusterMapStore(crew.control)

        def without_first(found: ClusterMap | None) -> ClusterMap:
            assert found is not None
            return mark_node_away(found, "n1")

        crew.run(maps.update_map(without_first))
        before = counted()
        assert opened(crew.nodes[1], "tar", "silent") == digest  # all nodes once read pages
        assert lengths(crew, crew.nodes[1], digest) == expected
        made, fetched = counted()
        assert made > before[0]
        assert fetched > before[1]
        crew.run(crew.control.delete("paged/tar"))  # as if n1 had been away all the time
        other = opened(crew.nodes[2], "tar", "silent")
        assert type(crew.run(crew.nodes[2].data.catalog.snapshot(other))) is Snapshot
