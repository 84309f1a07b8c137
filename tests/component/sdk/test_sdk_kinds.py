"""Files that hold many samples, opened without a kind: a file is one sample then, and that is told."""

from __future__ import annotations

import gzip
import io
import logging
from typing import TYPE_CHECKING

import pytest

import meshsdk as mesh
from meshsdk.errors import BadSampleError, ConfigurationError, InvalidPlanError, NotFoundError
from tests.support.archive_files import tar_of
from tests.support.required import required_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshsdk.open_dataset import Kind
    from tests.support.daemons import Daemon

pa = required_module("pyarrow")
pq = required_module("pyarrow.parquet")

LINES = b"1\n2\n"


@pytest.fixture(scope="module", name="client")
def opened(daemon: Daemon) -> Iterator[mesh.Client]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        yield client


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rows.jsonl", "lines"),
        ("rows.csv", "lines"),
        ("x.tfrecord-00000-of-00008", "tfrecord"),
        ("rows.parquet", "table"),
    ],
)
def test_files_of_many_samples_that_are_one_each_are_told(
    client: mesh.Client, bucket: str, caplog: pytest.LogCaptureFixture, name: str, kind: str
) -> None:
    caplog.set_level(logging.WARNING, "meshsdk")
    client.put(bucket, f"v1/{name}", LINES)
    source = f"s3://{bucket}/v1/"
    assert len(mesh.open(source, client=client)) == 1
    [told] = [said for said in caplog.messages if said.startswith(source)]
    assert f"each sample is a whole file; kind={kind!r} makes a sample of every " in told
    caplog.clear()
    assert len(mesh.open(source, {"x": name.partition(".")[2]}, kind="objects", client=client)) == 1
    assert source not in caplog.text


def test_lines_and_members_of_archives_are_samples_without_a_word(
    client: mesh.Client, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "meshsdk")
    client.put(bucket, "v1/rows.jsonl", LINES)
    assert len(mesh.open(f"s3://{bucket}/v1", {"x": "jsonl"}, kind="lines", client=client)) == 2
    client.put(bucket, "packed/0.tar", tar_of({f"{number}.jsonl": LINES for number in range(3)}))
    assert len(mesh.open(f"s3://{bucket}/packed", client=client)) == 3
    client.put(bucket, "single/0.tar", tar_of({"0.jsonl": LINES}))
    assert len(mesh.open(f"s3://{bucket}/single", {"x": "jsonl"}, client=client)) == 1
    assert "a whole file" not in caplog.text


def test_shards_whose_names_make_no_sample_have_a_kind(client: mesh.Client, bucket: str) -> None:
    for name in ("index.json", "shard.00000.mds", "shard.00001.mds"):
        client.put(bucket, f"v1/{name}", b"{}")
    with pytest.raises(NotFoundError, match=r"kind='mds' makes a sample of every row of \.00000\.mds files"):
        mesh.open(f"s3://{bucket}/v1", client=client)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ("reviews.csv", "chats.jsonl"),
            r"kind='lines' makes a sample of every line of \.csv and \.jsonl files\.",
        ),
        (("00000.bin", "00000.idx", "tokens.json"), "kind='tokens' makes a sample of every text"),
        (
            ("rows.parquet", "notes.jsonl"),
            r"kind='lines' makes .* of \.jsonl files; kind='table' makes .* of \.parquet files\.",
        ),
    ],
)
def test_names_of_which_no_stem_has_all_have_the_kinds(
    client: mesh.Client, bucket: str, names: tuple[str, ...], told: str
) -> None:
    for name in names:
        client.put(bucket, f"v1/{name}", b"{}")
    with pytest.raises(NotFoundError, match=told):
        mesh.open(f"s3://{bucket}/v1", client=client)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (
            ("zarr.json", "heat/zarr.json", "heat/c/0"),
            r"contains Zarr arrays.*'x': 'heat'.*kind='chunks'.*'zarr'",
        ),
        (("zarr.json", "c/0"), r"fields=\{'x': ''\}"),
        ((".zgroup", "heat/.zarray", "heat/0.0"), r"contains Zarr arrays of version 2: mesh\.open_zarr"),
        (("0.tar.xz", "1.tar.xz"), r"0\.tar\.xz: this kind of archive is not supported; repack it as \.tar"),
        (("train-00000-of-00002", "train-00001-of-00002"), "kind='tfrecord' makes a sample of every record"),
    ],
)
def test_names_that_are_no_samples_have_a_kind(
    client: mesh.Client, bucket: str, names: tuple[str, ...], told: str
) -> None:
    for name in names:
        client.put(bucket, f"v1/{name}", b"{}")
    with pytest.raises(ConfigurationError, match=told):
        mesh.open(f"s3://{bucket}/v1", client=client)


def test_one_class_that_holds_the_folders_of_the_classes_is_told(
    client: mesh.Client, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The URL of a bucket whose folder `train` has the classes: every label would be 0."""
    caplog.set_level(logging.WARNING, "meshsdk")
    for name in ("train/cat/1.jpg", "train/dog/1.jpg", "train/.DS_Store"):
        client.put(bucket, name, b"x")
    assert mesh.open(f"s3://{bucket}", client=client).classes == ("train",)
    assert "'label' is 'train' for all samples, which are in that folder; if" in caplog.text
    assert f"are the classes, open s3://{bucket}/train/" in caplog.text
    caplog.clear()
    assert mesh.open(f"s3://{bucket}/train", client=client).classes == ("cat", "dog")
    client.put(bucket, "one/cat/1.jpg", b"x")
    assert mesh.open(f"s3://{bucket}/one", client=client).classes == ("cat",)
    assert not caplog.text


def test_an_array_of_zarrs_second_version_is_told(client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "v1/heat/.zarray", b"{}")
    with pytest.raises(InvalidPlanError, match=r"no v1/heat/zarr\.json; arrays of Zarr version 2"):
        mesh.open(f"s3://{bucket}/v1", {"x": "heat"}, kind="zarr", client=client)


def test_archives_are_guessed_as_they_are_opened(client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "v1/0.tar", tar_of({"1.jpg": b"1", "2.jpg": b"2"}))
    assert mesh.open(f"s3://{bucket}/v1", client=client).fields == ("image",)
    assert mesh.open(f"s3://{bucket}/v1", kind="objects", client=client).fields == ("tar",)
    client.put(bucket, "others/0.tar.xz", b"as it is")
    assert mesh.open(f"s3://{bucket}/others", kind="objects", client=client).fields == ("tar_xz",)
    client.put(bucket, "broken/0.tar", b"<html>no such page</html>" * 100)
    for fields in (None, {"image": "jpg"}):  # as it is met while fields are guessed, and by the node
        with pytest.raises(
            BadSampleError, match=r"broken/0\.tar cannot be read as an archive.*upload it again"
        ) as met:
            mesh.open(f"s3://{bucket}/broken", fields, client=client)
        assert (met.value.code, met.value.detail["url"]) == ("BadSample", f"s3://{bucket}/broken/0.tar")
    client.put(bucket, "empty/0.jpg", b"")
    with pytest.raises(NotFoundError, match="only empty files are under"):
        mesh.open(f"s3://{bucket}/empty", client=client)


def test_a_field_of_lines_is_an_extension(client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "v1/rows.jsonl", b'{"text": "a"}\n')
    with pytest.raises(NotFoundError, match=r"end in \.text .*a file extension such as \"jsonl\"; ops\.json"):
        mesh.open(f"s3://{bucket}/v1", {"x": "text"}, kind="lines", client=client)


def test_what_lies_beside_samples_is_none(client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "lines/README.md", b"# Lines\n\nof numbers\n")
    client.put(bucket, "lines/a.jsonl", LINES)
    client.put(bucket, "lines/b.jsonl.gz", gzip.compress(b"3\n"))
    lines = mesh.open(f"s3://{bucket}/lines", kind="lines", client=client)
    assert lines.fields == ("jsonl",)
    assert [bytes(row["jsonl"]) for row in lines] == [b"1", b"2", b"3"]
    for name in ("README.md", "LICENSE", "cat/1.jpg", "dog/2.jpg"):
        client.put(bucket, f"photos/{name}", b"x")
    photos = mesh.open(f"s3://{bucket}/photos", client=client)
    assert (photos.fields, photos.classes, len(photos)) == (("image", "label"), ("cat", "dog"), 2)


def test_what_is_left_out_is_told(client: mesh.Client, bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "meshsdk")
    for name in ("1.jpg", "1.txt", "2.jpg", "3.txt", "README.md"):
        client.put(bucket, f"v1/{name}", b"x")
    pinned = mesh.open(f"s3://{bucket}/v1", {"image": "jpg", "text": "txt"}, client=client)
    assert (len(pinned), pinned.snapshot.skipped, len(pinned.snapshot.examples)) == (1, 2, 2)
    [told] = caplog.messages
    assert told.startswith(f"s3://{bucket}/v1/: left out 2 of 3: 'v1/2' lacks text, 'v1/3' lacks image; ")
    assert '"jpg;jpeg"' in told
    caplog.clear()
    assert len(mesh.open(f"s3://{bucket}/v1", {"image": "jpg"}, client=client)) == 2
    assert not caplog.messages


def test_files_of_a_format_under_its_other_extension_are_told(
    client: mesh.Client, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "meshsdk")
    source = f"s3://{bucket}/v1/"
    client.put(bucket, "v1/1.jpg", b"x")
    client.put(bucket, "v1/2.jpg", b"x")
    assert len(mesh.open(source, {"image": "jpg"}, client=client)) == 2
    assert not caplog.messages
    for number in range(2):  # to what was opened before
        client.put(bucket, f"v1/more-{number}.JPEG", b"x")
        caplog.clear()
        assert len(mesh.open(source, {"image": "jpg"}, client=client)) == 2
        [told] = caplog.messages
        names = "1 name" if number == 0 else "2 names"
        assert told == (
            f"{source}: left out {names} in .jpeg, which is the extension of no field; "
            'a field may have several extensions, such as "jpg;jpeg"'
        )
    caplog.clear()
    assert len(mesh.open(source, {"image": "jpg;jpeg"}, client=client)) == 4
    for number in range(2):
        client.delete(bucket, f"v1/more-{number}.JPEG")
    assert len(mesh.open(source, {"image": "jpg"}, client=client)) == 2
    assert not caplog.messages


def test_archives_and_tables_without_a_byte_are_told(
    client: mesh.Client, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a copy that failed leaves them."""
    caplog.set_level(logging.WARNING, "meshsdk")
    out = io.BytesIO()
    pq.write_table(pa.table({"x": [1, 2, None]}), out)
    sources: tuple[tuple[str, str, bytes, Kind], ...] = (
        ("packed", "0.tar", tar_of({f"{number}.txt": b"x" for number in range(2)}), "auto"),
        ("rows", "0.parquet", out.getvalue(), "table"),
        ("rows", "0.parquet", out.getvalue(), "parquet"),
    )
    for folder, name, body, kind in sources:
        ending, fields = name[1:], {"x": "txt" if kind == "auto" else "x"}
        client.put(bucket, f"none/{kind}/a{ending}", b"")
        client.put(bucket, f"none/{kind}/b{ending}", b"")
        with pytest.raises(NotFoundError, match=rf"a\{ending}', like the other 1, has no bytes: write"):
            mesh.open(f"s3://{bucket}/none/{kind}", fields, kind=kind, client=client)
        client.put(bucket, f"{folder}/{name}", body)
        client.put(bucket, f"{folder}/1{ending}", b"")
        caplog.clear()
        assert len(mesh.open(f"s3://{bucket}/{folder}", fields, kind=kind, client=client)) == 2
        [told] = caplog.messages
        assert f"'{folder}/1{ending}' has no bytes: write and upload it again" in told
        assert ("nulls='mask'" in told) == (kind == "table")


def test_lines_without_an_extension_want_one(client: mesh.Client, bucket: str) -> None:
    client.put(bucket, "v1/lines", LINES)
    with pytest.raises(ConfigurationError, match="have no extension"):
        mesh.open(f"s3://{bucket}/v1", kind="lines", client=client)
