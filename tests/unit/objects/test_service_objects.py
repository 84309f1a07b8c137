"""Tags, attributes, copies and what a completion is checked against, over the store in memory."""

from __future__ import annotations

import hashlib
import threading
import zlib
from base64 import b64encode
from typing import TYPE_CHECKING, Any

import pytest

from meshd.control.buckets import Bucket
from meshd.objects.object_metadata import object_attributes
from meshwire.checksums.body_checksums import BodyDigests
from meshwire.s3 import operations as ops
from tests.support.object_fixtures import MIB, NEVER, Desk, refusal, run
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from meshd.store.records import PartPage, Record, Upload
    from meshwire.s3 import result_types as res

PIECES = (b"a" * (5 * MIB), b"b" * (5 * MIB), b"c")


def test_tags_belong_to_a_version() -> None:
    desk = Desk("Enabled")
    first = desk.put("k", b"1", tags={"a": "1"}).version
    second = desk.put("k", b"2").version
    assert (desk.tags("k"), desk.tags("k", first)) == ({}, {"a": "1"})
    assert desk.tag("k", {"b": "2", "c": ""}, first).version == first
    assert desk.tag("k", {"d": "4"}).version == second
    assert (desk.tags("k", first), desk.tags("k")) == ({"b": "2", "c": ""}, {"d": "4"})
    assert (desk.head("k").tag_count, desk.head("k", first).tag_count) == (1, 2)
    run(desk.tagging.delete_tags(ops.DeleteObjectTagging("b", "k", first)))
    assert desk.tags("k", first) == {}
    assert desk.head("k", first).modified_ms <= desk.head("k").modified_ms
    marker = desk.delete("k").version
    for call in (desk.tags, lambda *where: desk.tag(where[0], {}, *where[1:])):
        assert refusal(call, "k").code == "NoSuchKey"
        assert refusal(call, "k", marker).code == "MethodNotAllowed"
        assert refusal(call, "k", NEVER).code == "NoSuchVersion"
        assert refusal(call, "none").code == "NoSuchKey"


def test_copies_take_the_tags_along_unless_told_otherwise() -> None:
    desk = Desk()
    desk.put("s", b"1", tags={"a": "1"})
    desk.copy("s", "k")
    assert desk.tags("k") == {"a": "1"}
    desk.copy("s", "k", replace=True)
    assert desk.tags("k") == {"a": "1"}
    desk.copy("s", "k", tags={"b": "2"})
    assert desk.tags("k") == {"b": "2"}
    desk.copy("s", "k", tags={})
    assert desk.tags("k") == {}


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, False),
        ({"tags": {"a": "1"}}, False),
        ({"checksum_algorithm": "sha256"}, False),
        ({"replace": True}, True),
        ({"reclass": True}, True),
        ({"headers": ops.ObjectHeaders({"x-amz-website-redirect-location": "/x"})}, True),
    ],
)
def test_copies_onto_themselves(options: dict[str, Any], allowed: bool) -> None:
    desk = Desk()
    desk.put("k", b"1")
    if allowed:
        assert desk.copy("k", "k", **options).etag == desk.head("k").etag
        assert desk.read("k") == b"1"
    else:
        assert refusal(desk.copy, "k", "k", **options).code == "InvalidRequest"


def test_a_redirection_is_not_copied() -> None:
    desk = Desk()
    name = "x-amz-website-redirect-location"
    desk.put("s", b"1")
    desk.copy("s", "a", headers=ops.ObjectHeaders({name: "/x"}))
    assert desk.head("a").headers == {name: "/x"}
    desk.copy("a", "b")
    assert desk.head("b").headers == {}


def multipart(desk: Desk, **options: Any) -> res.CompleteResult:
    upload = desk.begin("k", **options)
    parts = [desk.part("k", upload, number, piece) for number, piece in enumerate(PIECES, 1)]
    return desk.complete("k", upload, *parts)


def test_a_copy_of_parts_keeps_them_until_its_bytes_are_read() -> None:
    desk = Desk()
    done = multipart(desk, checksum_algorithm="crc32", checksum_type="COMPOSITE")
    shared = desk.copy("k", "shared")
    assert (shared.etag, shared.checksum_type) == (done.etag, "COMPOSITE")
    assert desk.head("shared", part_number=2).parts_count == 3
    hashed = desk.copy("k", "hashed", checksum_algorithm="crc32")
    whole = b"".join(PIECES)
    assert hashed.etag == hashlib.md5(whole).hexdigest()
    assert hashed.checksums == {"crc32": b64encode(zlib.crc32(whole).to_bytes(4, "big")).decode()}
    assert hashed.checksum_type == "FULL_OBJECT"
    assert refusal(desk.head, "hashed", part_number=2).code == "InvalidPartNumber"
    assert desk.read("hashed") == whole


def told(desk: Desk, key: str, **options: Any) -> res.ObjectAttributes:
    operation = ops.GetObjectAttributes("b", key, frozenset({"ObjectParts"}), **options)
    return object_attributes(desk.versions, operation)


def test_attributes_page_the_parts() -> None:
    desk = Desk()
    multipart(desk, checksum_algorithm="sha256")
    every = told(desk, "k")
    assert (every.parts_count, [p.size for p in every.parts]) == (3, [len(piece) for piece in PIECES])
    assert (every.checksum_type, every.parts_truncated) == ("COMPOSITE", False)
    assert every.parts[2].checksums == {"sha256": b64encode(hashlib.sha256(b"c").digest()).decode()}
    first = told(desk, "k", max_parts=2)
    assert ([p.number for p in first.parts], first.parts_truncated, first.next_part) == ([1, 2], True, 2)
    rest = told(desk, "k", max_parts=2, part_number_marker=first.next_part)
    assert ([p.number for p in rest.parts], rest.parts_truncated) == ([3], False)
    assert not told(desk, "k", part_number_marker=9).parts
    desk.put("plain", b"1")
    assert told(desk, "plain").parts_count == 0
    assert refusal(told, desk, "k", version=NEVER).code == "NoSuchVersion"


def test_a_part_comes_with_its_own_checksum() -> None:
    desk = Desk()
    multipart(desk, checksum_algorithm="sha256")
    head = desk.head("k", part_number=3)
    assert head.checksums == {"sha256": b64encode(hashlib.sha256(b"c").digest()).decode()}


def test_what_the_client_expects_of_the_whole() -> None:
    desk = Desk()
    upload = desk.begin("k", checksum_algorithm="crc32", checksum_type="FULL_OBJECT")
    part = desk.part("k", upload, 1, b"1")
    right = b64encode(zlib.crc32(b"1").to_bytes(4, "big")).decode()
    for code, options in (
        ("InvalidRequest", {"object_size": 2}),
        ("InvalidRequest", {"checksum_type": "COMPOSITE"}),
        ("InvalidRequest", {"digests": BodyDigests(checksums={"sha256": "x"})}),
        ("BadDigest", {"digests": BodyDigests(checksums={"crc32": "AAAAAA=="})}),
    ):
        assert refusal(desk.complete, "k", upload, part, **options).code == code
    digests = BodyDigests(checksums={"crc32": right})
    done = desk.complete("k", upload, part, object_size=1, checksum_type="FULL_OBJECT", digests=digests)
    assert done.checksums == {"crc32": right}


def test_only_what_an_upload_became_answers_for_it() -> None:
    """An equal object that was there before, or an id that never was, is no success."""
    desk = Desk()
    first = desk.begin("k")
    part = desk.part("k", first, 1, b"same")
    done = desk.complete("k", first, part)
    assert desk.complete("k", first, part).etag == done.etag
    later = desk.begin("k")
    assert desk.part("k", later, 1, b"same") == part
    run(desk.uploads.abort_upload(ops.AbortMultipartUpload("b", "k", later)))
    for upload in (later, "made-up", "0" * 32, ""):
        assert refusal(desk.complete, "k", upload, part).code == "NoSuchUpload"
    desk.put("k", b"another")
    assert refusal(desk.complete, "k", first, part).code == "NoSuchUpload"


class _Overtaken(MemoryStore):
    """Before parts are read, somebody else acts, to the end and once: `rival`."""

    rival: threading.Thread | None = None

    def list_parts(self, upload: Upload, after: int = 0, limit: int = 1000) -> PartPage:
        rival, self.rival = self.rival, None
        if rival is not None:
            rival.start()
            rival.join(60)
        return super().list_parts(upload, after, limit)


def test_an_upload_that_another_process_ends_between_two_reads_has_ended() -> None:
    """Its parts go with its end, so whoever reads them a moment later finds none: that is no InvalidPart of
    a completion, and no list without parts."""
    desk = Desk(store=_Overtaken)
    assert isinstance(desk.store, _Overtaken)
    upload = desk.begin("k")
    part = desk.part("k", upload, 1, b"whole")
    desk.store.rival = threading.Thread(target=desk.complete, args=("k", upload, part))
    assert desk.complete("k", upload, part).etag == desk.head("k").etag
    assert desk.read("k") == b"whole"
    later = desk.begin("k")
    abort = desk.uploads.abort_upload(ops.AbortMultipartUpload("b", "k", later))
    desk.store.rival = threading.Thread(target=run, args=(abort,))
    assert refusal(desk.uploads.list_parts, ops.ListParts("b", "k", later)).code == "NoSuchUpload"


class _Read(MemoryStore):
    """While bytes are read, somebody else acts, to the end and once: `rival`."""

    rival: threading.Thread | None = None

    def open_spans(self, record: Record, offset: int, length: int) -> Any:
        rival, self.rival = self.rival, None
        if rival is not None:
            rival.start()
            rival.join(60)
        return super().open_spans(record, offset, length)


def test_nothing_is_copied_into_a_bucket_that_is_anothers_by_now() -> None:
    """Nor does a copy replace what versions are kept of by the time its bytes were read."""
    desk = Desk(store=_Read)
    assert isinstance(desk.store, _Read)
    desk.put("k", b"copied")
    desk.put("there", b"mine")

    def taken() -> None:
        run(desk.buckets.delete("b"))
        run(desk.buckets.create(Bucket("b", "bob", desk.clock.now_ms())))

    desk.store.rival = threading.Thread(target=desk.set, args=("Enabled",))
    assert desk.copy("k", "there", checksum_algorithm="sha256").version
    assert desk.read("there", "null") == b"mine"
    desk.store.rival = threading.Thread(target=taken)
    assert refusal(desk.copy, "k", "there", checksum_algorithm="sha1").code == "NoSuchBucket"
