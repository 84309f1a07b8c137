"""Jobs over a running daemon: objects into shards, shards into shards."""

from __future__ import annotations

import io
import json
import random
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.archive_files import archive_of
from tests.support.daemons import Daemon
from tests.support.job_fixtures import done, ended, members, objects, start

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB = 1 << 10


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=2, env={"MESHD_SMALL_OBJECT": "256KiB"}) as daemon:
        client = daemon.client()
        client.create_bucket(Bucket="samples")
        client.create_bucket(Bucket="made")
        rng = random.Random(1)
        for number in range(25):
            sizes = {"jpg": (500, 30 * KIB, 200 * KIB, 700 * KIB)[number % 4], "cls": 3}
            for ext, size in sizes.items():
                client.put_object(Bucket="samples", Key=f"train/{number:03d}.{ext}", Body=rng.randbytes(size))
        yield daemon


@pytest.fixture
def s3(daemon: Daemon) -> Any:
    return daemon.client()


def read(s3: Any, prefix: str) -> dict[str, bytes]:
    return {prefix + key: body for key, body in objects(s3, "made", prefix).items()}


def originals(s3: Any) -> dict[str, bytes]:
    return objects(s3, "samples", "train/")


def test_shards_are_byte_for_byte_those_of_a_view(daemon: Daemon, s3: Any) -> None:
    layout = {"count": 4, "shuffle": 5, "split": {"train": 0.7, "val": 0.3}}
    view = {"bucket": "samples", "name": "v", "view": {"kind": "shards", "prefix": "train/", **layout}}
    daemon.request("POST", "/-/views", json.dumps(view).encode())
    job = done(daemon, kind="shard", source="s3://samples/train", target="s3://made/view", **layout)
    shown = s3.list_objects_v2(Bucket="samples--v")["Contents"]
    expected = {
        f"view/{e['Key']}": s3.get_object(Bucket="samples--v", Key=e["Key"])["Body"].read() for e in shown
    }
    assert read(s3, "view/") == expected
    assert job["progress"]["samples"] == job["progress"]["samples_total"] == 25
    assert job["progress"]["written"] == len(expected)


def test_resharding_keeps_every_file(daemon: Daemon, s3: Any) -> None:
    done(daemon, kind="shard", source="s3://samples/train", target="s3://made/first", count=10)
    done(daemon, kind="reshard", source="s3://made/first", target="s3://made/second", count=4, shuffle=1)
    made = read(s3, "second/")
    assert len(made) == 7
    assert members(*made.values()) == originals(s3)


def test_run_again_it_writes_nothing(daemon: Daemon, s3: Any) -> None:
    document = {"kind": "shard", "source": "s3://samples/train", "target": "s3://made/again", "count": 10}
    first = done(daemon, **document)
    before = {
        e["Key"]: e["LastModified"] for e in s3.list_objects_v2(Bucket="made", Prefix="again/")["Contents"]
    }
    second = done(daemon, **document)
    after = {
        e["Key"]: e["LastModified"] for e in s3.list_objects_v2(Bucket="made", Prefix="again/")["Contents"]
    }
    assert (first["id"], first["run"], second["run"]) == (second["id"], 1, 2)
    assert (second["progress"]["written"], second["progress"]["there"]) == (0, 3)
    assert before == after


def test_outputs_that_are_none_any_more_go(daemon: Daemon, s3: Any) -> None:
    for number in range(6):
        s3.put_object(Bucket="samples", Key=f"few/{number}.txt", Body=b"x" * number)
    document = {"kind": "shard", "source": "s3://samples/few", "target": "s3://made/few", "count": 2}
    done(daemon, **document)
    s3.put_object(Bucket="made", Key="few/notes.txt", Body=b"somebody else's")
    for number in range(3):
        s3.delete_object(Bucket="samples", Key=f"few/{number}.txt")
    job = done(daemon, **document)
    assert job["progress"]["removed"] == 1
    made = read(s3, "few/")
    assert made.pop("few/notes.txt") == b"somebody else's"
    assert sorted(members(*made.values())) == ["3.txt", "4.txt", "5.txt"]


def test_a_versioned_target_keeps_what_was_there(daemon: Daemon, s3: Any) -> None:
    s3.create_bucket(Bucket="kept")
    s3.put_bucket_versioning(Bucket="kept", VersioningConfiguration={"Status": "Enabled"})
    s3.put_object(Bucket="kept", Key="v/shard-000000.tar", Body=b"before")
    document = {"kind": "shard", "source": "s3://samples/train", "target": "s3://kept/v", "count": 30}
    done(daemon, **document)
    versions = s3.list_object_versions(Bucket="kept")["Versions"]
    assert [entry["IsLatest"] for entry in versions] == [True, False]
    assert done(daemon, **document)["progress"]["there"] == 1
    assert len(s3.list_object_versions(Bucket="kept")["Versions"]) == 2


@pytest.mark.parametrize("size", [5_000, 3_000_000])
def test_damaged_bytes_do_not_become_sound_shards(daemon: Daemon, s3: Any, size: int) -> None:
    body = random.Random(size).randbytes(size)
    s3.put_object(Bucket="samples", Key=f"hurt{size}/0.bin", Body=b"fine")
    s3.put_object(Bucket="samples", Key=f"hurt{size}/1.bin", Body=body)
    hurt = 0
    for path in daemon.data_dir.rglob("*.tar"):
        at = path.read_bytes().find(body[:64])
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + size // 2)
                file.write(bytes([body[size // 2] ^ 1]))
            hurt += 1
    assert hurt == 1
    document = {"kind": "shard", "source": f"s3://samples/hurt{size}", "target": f"s3://made/hurt{size}"}
    job = ended(daemon, start(daemon, **document))
    assert (job["state"], f"hurt{size}/1.bin is damaged" in job["error"]) == ("failed", True)
    assert objects(s3, "made", f"hurt{size}/") == {}


def test_what_cannot_be_done_is_said(daemon: Daemon, s3: Any) -> None:
    job = ended(daemon, start(daemon, kind="shard", source="s3://samples/nothing", target="s3://made/none"))
    assert (job["state"], "no matching objects under" in job["error"]) == ("failed", True)
    for key in ("twice/a.tar", "twice/b.tar"):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("0001.jpg"))
        s3.put_object(Bucket="samples", Key=key, Body=file.getvalue())
    document = {"kind": "reshard", "source": "s3://samples/twice", "target": "s3://made/twice"}
    job = ended(daemon, start(daemon, **document))
    assert job["state"] == "done"
    assert sorted(members(*read(s3, "twice/").values())) == ["a/0001.jpg", "b/0001.jpg"]


LAYOUTS: list[dict[str, Any]] = [
    {"count": 7, "sort": "-size"},
    {"count": 3, "sort": "cls", "where": "size > 1000"},
    {"size": 500_000, "group": 'part(stem, "/", 0)', "split": {"a": 0.5, "b": 0.5}, "split_by": "cls"},
]


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_sorted_grouped_and_filtered_as_a_view_does(daemon: Daemon, s3: Any, number: int) -> None:
    layout = LAYOUTS[number]
    view = {"kind": "shards", "prefix": "train/", **layout}
    request = {"bucket": "samples", "name": f"by{number}", "view": view}
    assert daemon.request("POST", "/-/views", json.dumps(request).encode()).status == 200
    target = f"s3://made/by{number}"
    done(daemon, kind="shard", source="s3://samples/train", target=target, **layout)
    assert objects(s3, "made", f"by{number}/") == objects(s3, f"samples--by{number}")


@pytest.mark.parametrize("kind", ["tar", "tgz"])
def test_resharded_as_a_view_of_archives_does(daemon: Daemon, s3: Any, kind: str) -> None:
    rng = random.Random(kind)
    for name in "xyz":
        files = {f"{i}.{e}": rng.randbytes(900) for i in range(5) for e in ("jpg", "cls")}
        s3.put_object(Bucket="samples", Key=f"{kind}s/{name}.{kind}", Body=archive_of(kind, files))
    layout = {"count": 4, "sort": "cls", "match": [".jpg", ".cls"]}
    view = {"kind": "shards", "samples": "archives", "prefix": f"{kind}s/", **layout}
    request = {"bucket": "samples", "name": f"re{kind}", "view": view}
    assert daemon.request("POST", "/-/views", json.dumps(request).encode()).status == 200
    done(daemon, kind="reshard", source=f"s3://samples/{kind}s", target=f"s3://made/re{kind}", **layout)
    made = objects(s3, "made", f"re{kind}/")
    assert made == objects(s3, f"samples--re{kind}")
    assert len(members(*made.values())) == 30


def test_zips_hold_their_files_as_they_are(daemon: Daemon, s3: Any) -> None:
    large = random.Random(3).randbytes(9_000_000)  # more than a header waits for
    for name, body in {"ä/1.txt": b"one", "b.bin": large, "c.txt": b"", "d.bin": large[: 3 << 20]}.items():
        s3.put_object(Bucket="samples", Key=f"zipped/{name}", Body=body)
    document = {"kind": "shard", "source": "s3://samples/zipped", "count": 10, "format": "zip"}
    done(daemon, target="s3://made/zip", **document)
    made = s3.get_object(Bucket="made", Key="zip/shard-000000.zip")
    assert made["ContentType"] == "application/zip"
    with zipfile.ZipFile(io.BytesIO(made["Body"].read())) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        found = {name: archive.read(name) for name in archive.namelist()}
    assert found == objects(s3, "samples", "zipped/")
    done(daemon, kind="extract", source="s3://made/zip", target="s3://made/unzipped")
    assert objects(s3, "made", "unzipped/") == found
    again = done(daemon, target="s3://made/zip", **document)
    assert again["progress"]["there"] == 1
