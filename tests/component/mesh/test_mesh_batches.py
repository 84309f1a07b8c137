"""Snapshots, plans, frames and gathers on a mesh: every node gives what a lone one with everything gives."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import tarfile
from collections import Counter
from contextlib import closing
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from msgspec.structs import replace

from meshd.core.document_store import RESERVED_BUCKET
from meshd.datasets.service import DatasetService
from meshd.datasets.snapshot_build_cache import BuildResults
from meshd.documents.inventory import UsageFile
from meshd.objects.buckets.lifecycle_runner import LifecycleRunner
from meshd.peer_reads.changed_names import ChangedNames
from meshd.peer_reads.listing import ObjectListings
from meshd.process.periodic_tasks import document_collector
from meshwire.formats.token_index import encode_token_index
from meshwire.s3.bucket_settings import LifecycleRule
from tests.support.manual_clock import ManualClock
from tests.support.mds_writer import mds_files
from tests.support.mesh_processes import ROOT, MeshCrew
from tests.support.native_fixtures import CROP, Mesh, error, png
from tests.support.tf_example_writer import BytesList, example, record

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNT = 60
KINDS = ("lines", "tfrecord", "mds", "parquet", "table")


def tar_of(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def parquet(numbers: range) -> bytes:
    from pyarrow import parquet, table

    out = io.BytesIO()
    parquet.write_table(table({"n": [b"%d" % number for number in numbers], "m": list(numbers)}), out)
    return out.getvalue()


@cache
def row_groups() -> bytes:
    """A table of which a filter of `m` leaves out two of three row groups."""
    from pyarrow import parquet, table

    out, count = io.BytesIO(), 300_000
    columns = {"m": np.arange(count), "n": np.random.default_rng(1).integers(0, 1 << 60, count)}
    how: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    parquet.write_table(table(columns), out, row_group_size=count // 3, **how)
    return out.getvalue()


def fill(crew: MeshCrew) -> None:
    wire = Mesh(crew.nodes[0].endpoint, *ROOT)
    assert wire.call("PUT", "/pictures").status == 200
    wire.close()
    for sample in range(COUNT):
        data = png(sample)[:70] if sample == 7 else png(sample)
        crew.put("pictures", f"train/{'cat' if sample % 3 else 'dog'}/{sample:04d}.png", data)
    for shard in range(6):
        members = {}
        for sample in range(shard * 10, shard * 10 + 10):
            members[f"{sample:04d}.png"] = png(sample)
            members[f"{sample:04d}.json"] = json.dumps({"n": sample}).encode()
        crew.put("pictures", f"shards/{shard:03d}.tar", tar_of(members))
    crew.put("pictures", "lines/a.jsonl", b"".join(b'{"n": %d}\n' % n for n in range(50)))
    crew.put("pictures", "lines/b.jsonl", b"".join(b'{"n": %d}\n' % n for n in range(50, 90)))
    for part in range(4):
        rows = [example({"n": BytesList([b"%d" % n])}) for n in range(part * 20, part * 20 + 20)]
        crew.put("pictures", f"tfrecord/part-{part:05}-of-00004", b"".join(map(record, rows)))
        packed = gzip.compress(b"".join(map(record, rows)), mtime=0)
        crew.put("pictures", f"packed/tfrecord/part-{part:05}-of-00004.gz", packed)
        if find_spec("pyarrow") is not None:
            crew.put("pictures", f"parquet/{part}.parquet", parquet(range(part * 20, part * 20 + 20)))
            crew.put("pictures", f"table/{part}.parquet", parquet(range(part * 20, part * 20 + 20)))
        packed = gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(part, 90)), mtime=0)
        crew.put("pictures", f"packed/lines/{part}.jsonl.gz", packed)
    if find_spec("pyarrow") is not None:
        crew.put("pictures", "groups/0.parquet", row_groups())
    for part in range(4):
        lengths = np.arange(25) * 7 + part
        tokens = np.arange(int(lengths.sum()), dtype=np.uint16) + part
        crew.put("pictures", f"tokens/{part}.bin", tokens.tobytes())
        crew.put("pictures", f"tokens/{part}.idx", encode_token_index(lengths, "uint16"))
    values = [{"n": b"%d" % n} for n in range(70)]
    for name, data in mds_files({"n": "str"}, values, shard=20).items():
        crew.put("pictures", f"mds/{name}", data)
    for name, data in mds_files(
        {"n": "str"}, values, shard=20, packing=("gz", partial(gzip.compress, mtime=0))
    ).items():
        crew.put("pictures", f"packed/mds/{name}", data)


@pytest.fixture(scope="module")
def lone() -> Iterator[MeshCrew]:
    with MeshCrew(1) as crew:
        fill(crew)
        yield crew


@pytest.fixture(scope="module")
def crew() -> Iterator[MeshCrew]:
    with MeshCrew(3) as crew:
        fill(crew)
        yield crew


_open: list[Mesh] = []


def wires(*crews: MeshCrew) -> list[Mesh]:
    found = [Mesh(one.endpoint, *ROOT) for crew in crews for one in crew.nodes]
    _open.extend(found)
    return found


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


TAR = {"image": {"ext": ["png"]}, "meta": {"ext": ["json"]}}


@pytest.mark.parametrize(
    ("source", "fields", "ops"),
    [
        ("s3://pictures/train/", None, CROP),
        ("s3://pictures/shards/", TAR, CROP),
        ("s3://pictures/lines/", {"text": {"ext": ["jsonl"]}}, []),
        ("s3://pictures/tfrecord/", {"n": {"feature": "n"}}, []),
        ("s3://pictures/mds/", {"n": {"column": "n"}}, []),
        ("s3://pictures/packed/lines/", {"text": {"ext": ["jsonl"]}}, []),
        ("s3://pictures/packed/tfrecord/", {"n": {"feature": "n"}}, []),
        pytest.param("s3://pictures/parquet/", {"n": {"column": "n"}}, []),
        pytest.param(
            "s3://pictures/table/",
            {"m": {"column": "m"}, "n": {"column": "n"}},
            [{"op": "frombuffer", "field": "m", "args": {"dtype": "int64", "shape": []}}],
        ),
        pytest.param(
            "s3://pictures/groups/",
            {"m": {"column": "m"}, "n": {"column": "n"}},
            [
                {"op": "frombuffer", "field": name, "args": {"dtype": "int64", "shape": []}}
                for name in ("m", "n")
            ],
        ),
        ("s3://pictures/packed/mds/", {"n": {"column": "n"}}, []),
    ],
)
def test_frames_are_the_same_on_every_node(
    lone: MeshCrew, crew: MeshCrew, source: str, fields: Any, ops: Any
) -> None:
    folder = source.split("/")[-2]
    more: dict[str, Any] = {"kind": folder} if folder in KINDS else {}
    if folder == "groups":
        more = {"kind": "table", "filter": [["m", ">=", 150_000], ["m", "<", 150_090]]}
    expected: dict[str, bytes] = {}
    for number, wire in enumerate(wires(lone, crew)):
        snapshot = wire.snapshot(source, fields, **more)
        assert folder != "groups" or snapshot["samples"] == 90
        plan = wire.plan(snapshot["snapshot"], ops, 16, on_bad="mask", max_bad=0.5)
        found = {"snapshot": snapshot["snapshot"].encode(), "plan": plan["plan"].encode()}
        for step in range(4):
            for form in ("tensors", "samples", "tar"):
                answer = wire.raw(plan["plan"], 1, step, batch=16, format=form)
                assert answer.status == 200, answer.body
                found[f"{step} {form}"] = answer.body
        found["large"] = wire.raw(plan["plan"], 1, 0, batch=80).body  # rows of numbers come as arrays
        expected = expected or found
        assert found == expected, number


@pytest.mark.parametrize("longest", [None, 60])
def test_packed_frames_are_the_same_on_every_node(
    lone: MeshCrew, crew: MeshCrew, longest: int | None
) -> None:
    """Of sequences that are read as they are stored, and of those that ops change."""
    steps: list[dict[str, Any]] = [
        {"op": "frombuffer", "field": "tokens", "args": {"dtype": "uint16", "shape": [None]}}
    ]
    if longest is not None:
        steps.append({"op": "truncate", "field": "tokens", "args": {"length": longest}})
    pack = {"fields": ["tokens"], "length": 32}
    expected: list[bytes] = []
    for number, wire in enumerate(wires(lone, crew)):
        fields = {"tokens": {"column": "tokens"}}
        snapshot = wire.snapshot("s3://pictures/tokens/", fields, kind="tokens")["snapshot"]
        plan = wire.plan(snapshot, steps, 16, pack=pack)["plan"]
        answers = [wire.raw(plan, 1, step, batch=16) for step in range(4)]
        assert [answer.status for answer in answers] == [200] * 4, answers[0].body
        expected = expected or [answer.body for answer in answers]
        assert [answer.body for answer in answers] == expected, number


def test_a_plan_is_known_to_nodes_that_never_saw_it(crew: MeshCrew) -> None:
    first, second, third = wires(crew)
    snapshot = first.snapshot("s3://pictures/train/", {"image": {"ext": ["png"]}})["snapshot"]
    plan = first.plan(snapshot, CROP, seed=99, on_bad="mask", max_bad=0.5)["plan"]
    frame = first.raw(plan, 0, 0, batch=8).body
    assert second.raw(plan, 0, 0, batch=8).body == frame
    assert third.raw(plan, 0, 0, batch=8).body == frame
    assert third.call("GET", f"/-/snapshots/{snapshot}").status == 200
    assert third.call("GET", f"/-/plans/{'0' * 64}").status == 404


def test_filters_look_at_content_wherever_it_is(lone: MeshCrew, crew: MeshCrew) -> None:
    found = set()
    for wire in wires(lone, crew):
        base = wire.snapshot("s3://pictures/shards/", TAR)["snapshot"]
        kept = wire.ok(
            wire.post("/-/snapshots", {"from": base, "filter": "number(slice(text(meta), 6, -1)) < 20"})
        )
        assert kept["samples"] == 20
        found.add(kept["snapshot"])
    assert len(found) == 1


def test_bad_samples_of_all_nodes_are_in_one_ledger(crew: MeshCrew) -> None:
    first, second, third = wires(crew)
    snapshot = first.snapshot("s3://pictures/train/", {"image": {"ext": ["png"]}})["snapshot"]
    plan = first.plan(snapshot, CROP, seed=5, on_bad="mask", max_bad=0.9)["plan"]
    for wire in (first, second):
        assert wire.raw(plan, 0, 0, batch=COUNT).status == 200
    for wire in (first, second, third):
        (entry,) = json.loads(wire.call("GET", f"/-/plans/{plan}/bad").body)
        assert (entry["times"], entry["op"]) == (2, "decode+random_resized_crop")


def test_gathers_reach_over_nodes(lone: MeshCrew, crew: MeshCrew) -> None:
    items: list[dict[str, Any]] = [
        {"bucket": "pictures", "key": f"train/{'cat' if n % 3 else 'dog'}/{n:04d}.png"} for n in range(20)
    ]
    items += [
        {"bucket": "pictures", "key": f"shards/{n:03d}.tar", "member": f"{n * 10 + 3:04d}.png"}
        for n in range(6)
    ]
    items += [{"bucket": "pictures", "key": "lines/a.jsonl", "range": [10, 30]}]
    items += [{"bucket": "pictures", "key": "nothing/here"}, {"bucket": "nowhere", "key": "x"}]
    for form in ("samples", "tar"):
        bodies = set()
        for wire in wires(lone, crew):
            answer = wire.post("/-/gather", {"items": items, "format": form})
            assert answer.status == 200, answer.body
            bodies.add(answer.body)
        assert len(bodies) == 1


def test_what_changed_is_said_from_everywhere(crew: MeshCrew) -> None:
    crew.put("pictures", "moving/a/1.png", png(1))
    crew.put("pictures", "moving/b/2.png", png(2))
    all_wires = wires(crew)
    snapshot = all_wires[0].snapshot("s3://pictures/moving/")["snapshot"]
    plan = all_wires[0].plan(snapshot)["plan"]
    crew.put("pictures", "moving/b/2.png", png(3))
    for wire in all_wires:
        answer = wire.raw(plan, 0, 0, batch=2)
        assert (answer.status, error(answer)["code"]) == (409, "SnapshotChanged")
        answer = wire.post("/-/plans", {"snapshot": snapshot, "spec": {"ops": CROP, "seed": 8}})
        assert error(answer)["code"] == "SnapshotChanged"


def test_a_dead_node_is_no_error_while_others_hold_its_objects() -> None:
    with MeshCrew(3) as crew:
        fill(crew)
        first, second, _ = wires(crew)
        snapshot = first.snapshot("s3://pictures/train/", {"image": {"ext": ["png"]}})["snapshot"]
        plan = first.plan(snapshot, CROP, on_bad="mask", max_bad=0.5)["plan"]
        before = [first.raw(plan, 0, step, batch=16).body for step in range(4)]
        crew.kill(2)
        after = [second.raw(plan, 0, step, batch=16) for step in range(4)]
        assert [answer.status for answer in after] == [200] * 4
        assert [answer.body for answer in after] == before
        items = [{"bucket": "pictures", "key": f"shards/{n:03d}.tar"} for n in range(6)]
        assert second.post("/-/gather", {"items": items}).headers["x-mesh-rows"] == "6"
        listing = second.post("/-/snapshots", {"source": "s3://pictures/train/", "fields": TAR})
        assert (listing.status, error(listing)["code"]) == (503, "Busy")  # never a shorter list


def test_each_name_expires_once(crew: MeshCrew) -> None:
    """Every node sweeps what it decides, and all of them have it done."""
    keys = {f"old/{number}" for number in range(40)}
    wire = wires(crew)[0]
    assert wire.call("PUT", "/expiring").status == 200
    for key in keys:  # one record of each, at all of its owners: a later one would not be due
        assert wire.call("PUT", f"/expiring/{key}", b"x").status == 200
    nodes = [one.node for one in crew.nodes]
    rules = (LifecycleRule("a", True, "old/", expire_date=86_400),)

    async def sweep() -> list[Counter[str]]:
        await nodes[0].buckets.update("expiring", lambda bucket: replace(bucket, lifecycle=rules))
        sweeps = [
            LifecycleRunner(n.store, n.replicated_store, n.buckets, n.control, n.clock, 0, n.mesh)
            for n in nodes
        ]
        found = await asyncio.gather(*[each.sweep() for each in sweeps])
        again = await asyncio.gather(*[each.sweep() for each in sweeps])
        assert not any(again)
        return list(found)

    removed = crew.run(sweep())
    assert sum(removed, Counter()) == Counter(expire=len(keys))
    assert all(0 < count["expire"] < len(keys) for count in removed)
    for node in nodes:
        assert node.store.list("expiring").entries == ()


def test_what_no_node_has_used_for_long_goes_from_all(crew: MeshCrew) -> None:
    first, *rest = wires(crew)
    snapshot = first.snapshot("s3://pictures/train/")["snapshot"]
    used, unused = (first.plan(snapshot, CROP, 16, seed=seed, on_bad="mask")["plan"] for seed in (101, 102))
    later = ManualClock()
    later.advance(crew.nodes[0].node.clock.now_ms() / 1000 - later.now_ms() / 1000 + 100 * 86_400)
    last = crew.nodes[2].node.settings.last_used_path
    with closing(UsageFile(last, later)) as uses:  # in a hundred days, at the last node alone
        uses.note(f"plans/{used}")
    keepers = [document_collector(replace(one.node, clock=later)) for one in crew.nodes]
    assert crew.run(keepers[1].sweep()) == 0  # another one says what goes
    assert (
        crew.run(keepers[0].sweep()) == 0
    )  # its clock, a hundred days later than the last use, may be wrong
    later.advance(3601)
    assert crew.run(keepers[0].sweep()) > 0
    for one, keeper in zip(crew.nodes, keepers, strict=True):
        crew.run(keeper.remove_local_copies())
        held = {key for key, _ in one.node.store.list(RESERVED_BUCKET, prefix="plans/", limit=1000).entries}
        assert f"plans/{used}" in held
        assert f"plans/{unused}" not in held
        assert one.node.store.get(RESERVED_BUCKET, f"snapshots/{snapshot}") is not None
    for wire in (first, *rest):
        gone = wire.call("GET", f"/-/plans/{unused}/0/0?batch=16")
        assert (gone.status, error(gone)["code"]) == (410, "Gone")
        assert "after 90 days without use" in error(gone)["message"]
        assert wire.call("GET", f"/-/plans/{used}/0/0?batch=16").status == 200
    assert rest[0].plan(snapshot, CROP, 16, seed=102, on_bad="mask")["plan"] == unused
    assert {wire.call("GET", f"/-/plans/{unused}/0/0?batch=16").status for wire in (first, *rest)} == {200}


@pytest.mark.parametrize("kind", ["lines", "objects"])
def test_opening_again_sees_every_change(
    crew: MeshCrew, lone: MeshCrew, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = list[str]()
    build: Any = DatasetService._build

    def counted(self: Any, listing: Any, source: Any, *rest: Any) -> Any:
        builds.append(str(source))
        return build(self, listing, source, *rest)

    monkeypatch.setattr(DatasetService, "_build", counted)
    for nodes in (wires(crew), wires(lone)):
        first, last, folder = nodes[0], nodes[-1], f"again-{kind}"

        def opened(nodes: list[Mesh] = nodes, folder: str = folder) -> dict[str, Any]:
            """What every node says three times, and says after it has built the snapshot again."""
            builds.clear()
            source, fields = f"s3://pictures/{folder}/", {"text": {"ext": ["txt"]}}
            answers = [node.snapshot(source, fields, kind=kind) for node in nodes for _ in range(3)]
            assert len(builds) <= len(nodes)
            with monkeypatch.context() as patched:
                patched.setattr(BuildResults, "find", lambda self, name: None)
                answers.append(nodes[0].snapshot(source, fields, kind=kind))
            assert all(answer == answers[0] for answer in answers)
            return answers[0]

        for name in "ab":
            assert first.call("PUT", f"/pictures/{folder}/{name}.txt", b"1\n2\n").status == 200
        before = opened()
        assert opened() == before
        assert len(builds) == 1  # the one that was made to compare with
        assert last.call("PUT", f"/pictures/{folder}/c.txt", b"3\n").status == 200
        added = opened()
        assert added["objects"] == 3
        assert last.call("PUT", f"/pictures/{folder}/b.txt", b"9\n8\n").status == 200  # of the same size
        replaced_one = opened()
        assert replaced_one["samples"] == added["samples"]
        assert replaced_one["snapshot"] != added["snapshot"]
        assert last.call("DELETE", f"/pictures/{folder}/b.txt").status == 204
        assert opened()["objects"] == 2
        assert last.call("DELETE", f"/pictures/{folder}/c.txt").status == 204
        assert last.call("PUT", f"/pictures/{folder}/b.txt", b"1\n2\n").status == 200
        builds.clear()
        assert opened() == before  # what it was: no node builds it again
        assert len(builds) == 1


def test_objects_that_changed_are_looked_up_and_not_listed(
    crew: MeshCrew, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, folder, listed = wires(crew), "loose", list[str]()
    first, last = nodes[0], nodes[-1]
    list_columns: Any = ObjectListings.list_columns

    def counted(self: Any, bucket: str, prefix: str, wanted: Any) -> Any:
        listed.append(prefix)
        return list_columns(self, bucket, prefix, wanted)

    monkeypatch.setattr(ObjectListings, "list_columns", counted)

    def opened(listings: int) -> dict[str, Any]:
        """What every node says, with so many listings; it equals what a listing gives."""
        source, fields = f"s3://pictures/{folder}/", {"text": {"ext": ["txt"]}}
        listed.clear()
        answers = [node.snapshot(source, fields, kind="objects") for node in nodes for _ in range(2)]
        assert len(listed) == listings
        with monkeypatch.context() as patched:
            patched.setattr(BuildResults, "find", lambda self, name: None)
            answers.append(first.snapshot(source, fields, kind="objects"))
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    for number in range(120):
        crew.put("pictures", f"{folder}/{number % 3}/{number:03}.txt", b"%d" % number)
    assert opened(len(nodes))["samples"] == 120
    opened(0)
    assert last.call("PUT", f"/pictures/{folder}/1/more.txt", b"new").status == 200
    assert opened(0)["samples"] == 121
    assert first.call("PUT", "/pictures/elsewhere.txt", b"x").status == 200
    assert first.call("DELETE", f"/pictures/{folder}/0/000.txt").status == 204
    assert last.call("PUT", f"/pictures/{folder}/2/002.txt", b"another").status == 200
    assert opened(0)["samples"] == 120
    for number in range(60):  # too many to look up one after the other
        crew.put("pictures", f"{folder}/new/{number:03}.txt", b"%d" % number)
    assert opened(len(nodes))["samples"] == 180
    assert last.call("PUT", f"/pictures/{folder}/1/last.txt", b"new").status == 200
    with monkeypatch.context() as patched:  # a primary of an earlier release does not know the call
        patched.setattr(ChangedNames, "since", AsyncMock(return_value=None))
        assert opened(2 * len(nodes))["samples"] == 181
    opened(0)
