"""Jobs over archives of every kind: taken apart, put together otherwise; damaged ones named."""

from __future__ import annotations

import gzip
import hashlib
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.archive_files import archive_of
from tests.support.daemons import Daemon
from tests.support.job_fixtures import done, ended, members, objects, start

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("tar", "tgz", "tar.zst", "zip")
rng = random.Random(3)
FILES = {
    f"{number:03d}.{ext}": rng.randbytes(size)
    for number in range(20)
    for ext, size in (("jpg", (200, 40_000, 5_000_000 if number == 7 else 9)[number % 3]), ("cls", 2))
}
FILES["000.txt"] = b""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon.start(workers=2, env={"MESHD_SMALL_OBJECT": "256KiB"}) as daemon:
        s3 = daemon.client()
        s3.create_bucket(Bucket="packed")
        s3.create_bucket(Bucket="made")
        for kind in KINDS:
            s3.put_object(Bucket="packed", Key=f"{kind}/all.{kind}", Body=archive_of(kind, FILES))
        stored = archive_of("stored.zip", FILES)
        s3.put_object(Bucket="packed", Key="stored/all.zip", Body=stored)
        yield daemon


@pytest.fixture
def s3(daemon: Daemon) -> Any:
    return daemon.client()


@pytest.mark.parametrize("kind", [*KINDS, "stored"])
def test_extracting(daemon: Daemon, s3: Any, kind: str) -> None:
    job = done(daemon, kind="extract", source=f"s3://packed/{kind}", target=f"s3://made/out-{kind}")
    assert objects(s3, "made", f"out-{kind}/") == FILES
    assert job["progress"]["outputs"] == job["progress"]["outputs_total"] == len(FILES)
    head = s3.head_object(Bucket="made", Key=f"out-{kind}/007.jpg")
    assert head["ETag"].strip('"') == hashlib.md5(FILES["007.jpg"]).hexdigest()
    assert head["ContentType"] == "image/jpeg"
    again = done(daemon, kind="extract", source=f"s3://packed/{kind}", target=f"s3://made/out-{kind}")
    assert (again["progress"]["written"], again["progress"]["there"]) == (0, len(FILES))


@pytest.mark.parametrize("kind", [*KINDS, "stored"])
def test_resharding(daemon: Daemon, s3: Any, kind: str) -> None:
    done(
        daemon,
        kind="reshard",
        source=f"s3://packed/{kind}/",
        target=f"s3://made/re-{kind}",
        count=3,
        shuffle=2,
        match=[".jpg"],
    )
    found = members(*objects(s3, "made", f"re-{kind}/").values())
    assert found == {name: data for name, data in FILES.items() if name.endswith(".jpg")}


def test_every_kind_gives_the_same_shards(daemon: Daemon, s3: Any) -> None:
    made = []
    for kind in KINDS:
        done(
            daemon, kind="reshard", source=f"s3://packed/{kind}", target=f"s3://made/same-{kind}", size=70_000
        )
        made.append(objects(s3, "made", f"same-{kind}/"))
    assert all(found == made[0] for found in made)
    assert len(made[0]) > 2


@pytest.mark.parametrize("kind", ["tgz", "tar.zst"])
def test_compressed_shards(daemon: Daemon, s3: Any, kind: str) -> None:
    document = {"kind": "reshard", "source": "s3://packed/zip", "count": 6}
    done(daemon, **document, target=f"s3://made/to-{kind}", format=kind)
    made = objects(s3, "made", f"to-{kind}/")
    assert all(name.endswith(f".{kind}") for name in made)
    inflate = gzip.decompress if kind == "tgz" else zstd.decompress
    assert members(*map(inflate, made.values())) == FILES
    s3.delete_object(Bucket="made", Key=f"to-{kind}/shard-000001.{kind}")
    again = done(daemon, **document, target=f"s3://made/to-{kind}", format=kind)
    assert again["progress"]["written"] == 1
    assert objects(s3, "made", f"to-{kind}/") == made
    done(daemon, kind="extract", source=f"s3://made/to-{kind}", target=f"s3://made/from-{kind}")
    assert objects(s3, "made", f"from-{kind}/") == FILES


def test_one_archive_is_a_source_too(daemon: Daemon, s3: Any) -> None:
    source = "s3://packed/zip/all.zip"
    done(daemon, kind="extract", source=source, target="s3://made/one", names="archive", match=[".cls"])
    assert objects(s3, "made", "one/") == {f"all/{n}": d for n, d in FILES.items() if n.endswith(".cls")}


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_archives(daemon: Daemon, s3: Any, kind: str) -> None:
    whole = archive_of(kind, {name: FILES[name] for name in list(FILES)[:6]})
    s3.put_object(Bucket="packed", Key=f"bad-{kind}/a.{kind}", Body=whole)
    s3.put_object(Bucket="packed", Key=f"bad-{kind}/b.{kind}", Body=whole[: len(whole) // 2])
    document = {"kind": "extract", "source": f"s3://packed/bad-{kind}", "target": f"s3://made/bad-{kind}"}
    job = ended(daemon, start(daemon, **document))
    assert job["state"] == "failed"
    assert f"bad-{kind}/b.{kind}" in job["error"]
    assert objects(s3, "made", f"bad-{kind}/") == {}
    job = done(daemon, **document, on_bad="skip")
    assert [item["name"] for item in job["failures"]] == [f"s3://packed/bad-{kind}/b.{kind}"]
    assert job["failed"] == 1
    assert objects(s3, "made", f"bad-{kind}/") == {name: FILES[name] for name in list(FILES)[:6]}


def test_hostile_names_stay_below_the_target(daemon: Daemon, s3: Any) -> None:
    hostile = {"../../up.txt": b"1", "/abs.txt": b"2", "a/./b.txt": b"3", "x/../y.txt": b"4"}
    s3.put_object(Bucket="packed", Key="hostile/h.tar", Body=archive_of("tar", hostile))
    done(daemon, kind="extract", source="s3://packed/hostile", target="s3://made/hostile")
    assert objects(s3, "made", "hostile/") == {
        "up.txt": b"1",
        "abs.txt": b"2",
        "a/b.txt": b"3",
        "x/y.txt": b"4",
    }
    s3.put_object(Bucket="packed", Key="long/l.tar", Body=archive_of("tar", {"n" * 1100: b"1"}))
    job = ended(daemon, start(daemon, kind="extract", source="s3://packed/long", target="s3://made/long"))
    assert (job["state"], "at most 1024 are allowed" in job["error"]) == ("failed", True)
