"""Versions, delete markers and null versions, over the store in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshd.store.errors import ExtentGoneError
from meshwire.http_values.conditional_requests import Conditions
from meshwire.s3.operations import ListObjectVersions
from meshwire.s3.xml_documents import DeleteKey
from tests.support.object_fixtures import NEVER, Desk, refusal, run
from tests.support.reference_store import MemoryStore

if TYPE_CHECKING:
    from meshd.store.records import Record, Removed
    from meshwire.s3 import result_types as res


def test_every_write_is_a_version() -> None:
    desk = Desk("Enabled")
    first, second = desk.put("k", b"1"), desk.put("k", b"22")
    assert first.version != second.version != ""
    assert (desk.read("k"), desk.read("k", first.version), desk.read("k", second.version)) == (
        b"22",
        b"1",
        b"22",
    )
    assert desk.head("k").version == second.version
    assert desk.head("k", first.version).version == first.version
    assert desk.listed() == [("k", second.version, True, False), ("k", first.version, False, False)]


def test_without_versioning_nobody_hears_of_versions() -> None:
    desk = Desk()
    assert desk.put("k", b"1").version == ""
    assert desk.head("k").version == ""
    assert desk.read("k", "null") == b"1"
    assert refusal(desk.read, "k", "made-up").code == "InvalidArgument"
    assert refusal(desk.read, "k", NEVER).code == "NoSuchVersion"
    assert desk.listed() == [("k", "null", True, False)]
    assert desk.delete("k").version == ""
    error = refusal(desk.read, "k")
    assert (error.code, dict(error.headers)) == ("NoSuchKey", {})


def test_a_delete_marker_hides_and_its_removal_reveals() -> None:
    desk = Desk("Enabled")
    version = desk.put("k", b"1").version
    gone = desk.delete("k")
    assert gone.marker
    error = refusal(desk.read, "k")
    headers = {"x-amz-delete-marker": "true", "x-amz-version-id": gone.version}
    assert (error.code, dict(error.headers)) == ("NoSuchKey", headers)
    error = refusal(desk.head, "k", gone.version)
    assert (error.code, error.status, error.headers["allow"]) == ("MethodNotAllowed", 405, "DELETE")
    assert error.headers["x-amz-delete-marker"] == "true"
    assert desk.read("k", version) == b"1"
    assert desk.listed()[0] == ("k", gone.version, True, True)
    again = desk.delete("k", gone.version)
    assert (again.version, again.marker) == (gone.version, True)
    assert desk.read("k") == b"1"
    last = desk.delete("k", version)
    assert (last.version, last.marker) == (version, False)
    assert refusal(desk.read, "k").code == "NoSuchKey"
    assert desk.listed() == []
    assert not desk.delete("k", version).marker


def test_deleting_what_is_not_there_makes_a_marker() -> None:
    desk = Desk("Enabled")
    assert desk.delete("none").marker
    assert [(key, marker) for key, _, _, marker in desk.listed()] == [("none", True)]


def test_null_versions_while_suspended() -> None:
    desk = Desk()
    desk.put("k", b"before")
    desk.set("Enabled")
    assert desk.head("k").version == "null"
    version = desk.put("k", b"enabled").version
    assert desk.read("k", "null") == b"before"
    desk.set("Suspended")
    assert desk.put("k", b"suspended").version == ""
    assert desk.head("k").version == "null"
    assert (desk.read("k", "null"), desk.read("k", version)) == (b"suspended", b"enabled")
    gone = desk.delete("k")
    assert (gone.version, gone.marker) == ("null", True)
    assert desk.listed() == [("k", "null", True, True), ("k", version, False, False)]
    assert refusal(desk.read, "k", "null").code == "MethodNotAllowed"
    assert desk.delete("k", "null").marker
    assert desk.read("k") == b"enabled"


def test_conditions_look_at_the_current_object() -> None:
    desk = Desk("Enabled")
    fresh = Conditions(if_none_match=("*",))
    first = desk.put("k", b"1", conditions=fresh)
    assert refusal(desk.put, "k", b"2", conditions=fresh).code == "PreconditionFailed"
    same = Conditions(if_match=(first.etag,))
    desk.put("k", b"2", conditions=same)
    assert refusal(desk.delete, "k", conditions=same).code == "PreconditionFailed"
    assert desk.delete("k", first.version, conditions=same).version == first.version
    desk.delete("k")
    assert refusal(desk.put, "k", b"3", conditions=Conditions(if_match=("*",))).code == "NoSuchKey"
    desk.put("k", b"3", conditions=fresh)


def test_pages_of_versions() -> None:
    desk = Desk("Enabled")
    for key in ("a/1", "a/2", "b", "b", "b", "c"):
        desk.put(key, b"")
    desk.delete("c")
    whole = desk.listed()
    assert [key for key, *_ in whole] == ["a/1", "a/2", "b", "b", "b", "c", "c"]
    found, marker, version = [], "", ""
    while True:
        page = run(
            desk.listings.list_versions(_listing(key_marker=marker, version_marker=version, max_keys=2))
        )
        found += [(e.key, e.version, e.latest, e.marker) for e in page.entries]
        if not page.truncated:
            break
        marker, version = page.next_key, page.next_version
    assert found == whole
    rolled = run(desk.listings.list_versions(_listing(delimiter="/", max_keys=2)))
    assert (rolled.common_prefixes, [e.key for e in rolled.entries]) == (("a/",), ["b"])
    following = _listing(delimiter="/", key_marker=rolled.next_key, version_marker=rolled.next_version)
    assert [e.key for e in run(desk.listings.list_versions(following)).entries] == ["b", "b", "c", "c"]
    assert not run(desk.listings.list_versions(_listing(max_keys=0))).entries
    assert {e.owner.id for e in run(desk.listings.list_versions(_listing())).entries} == {"alice"}


def _listing(**options: Any) -> ListObjectVersions:
    return ListObjectVersions("b", **options)


def test_many_deletions_are_answered_one_by_one() -> None:
    desk = Desk("Enabled")
    first, second = desk.put("a", b"1"), desk.put("a", b"2")
    desk.put("b", b"")
    marker = desk.delete("c").version
    result = desk.delete_many(
        DeleteKey("b"),
        DeleteKey("a", first.version),
        DeleteKey("c", marker),
        DeleteKey("none"),
        DeleteKey("a", second.version, "another"),
        DeleteKey("a", NEVER),
        DeleteKey("a", "made-up"),
    )
    assert [d.key for d in result.deleted] == ["b", "a", "c", "none", "a"]
    made = {d.key: d for d in result.deleted}
    assert made["b"].marker_version != "" == made["b"].version
    assert made["none"].marker_version
    assert (made["c"].version, made["c"].marker_version) == (marker, marker)
    assert (result.deleted[1].version, result.deleted[1].marker_version) == (first.version, "")
    assert [(f.key, f.code, f.version) for f in result.failures] == [
        ("a", "PreconditionFailed", second.version),
        ("a", "NoSuchVersion", "made-up"),
    ]
    assert desk.read("a") == b"2"
    quiet = desk.delete_many(DeleteKey("a"), DeleteKey("a", second.version, "another"), quiet=True)
    assert (quiet.deleted, len(quiet.failures)) == ((), 1)


def test_many_deletions_without_versioning() -> None:
    desk = Desk()
    desk.put("a", b"1")
    result = desk.delete_many(DeleteKey("a"), DeleteKey("none"), DeleteKey("a", "null"))
    assert [(d.key, d.version, d.marker_version) for d in result.deleted] == [
        ("a", "", ""),
        ("none", "", ""),
        ("a", "null", ""),
    ]
    assert desk.listed() == []


class Vanishing(MemoryStore):
    """Its bucket is deleted while an object in it is being deleted or written."""

    desk: Desk

    async def delete(self, bucket: str, key: str, **options: Any) -> Removed:
        removed = await super().delete(bucket, key, **options)
        await self.desk.buckets.delete(bucket)
        return removed

    async def link(self, *arguments: Any, **options: Any) -> Record:
        record = await super().link(*arguments, **options)
        await self.desk.buckets.delete("b")
        return record


def test_a_bucket_deleted_meanwhile_keeps_nothing() -> None:
    desk = Desk("Enabled", Vanishing)
    desk.store.desk = desk  # type: ignore[attr-defined]  # what Vanishing needs
    assert refusal(desk.delete, "k").code == "NoSuchBucket"
    assert desk.store.is_empty("b")
    desk = Desk("Enabled", Vanishing)
    desk.store.desk = desk  # type: ignore[attr-defined]
    version = desk.put("s", b"1").version
    assert refusal(desk.copy, "s", "k").code == "NoSuchBucket"
    assert [(name, r.version) for name, r in desk.store.list_versions("b").entries] == [("s", version)]


class Restless(MemoryStore):
    """The source of a copy goes away as often as `left` says."""

    left = 2

    async def link(self, *arguments: Any, **options: Any) -> Record:
        if self.left:
            self.left -= 1
            raise ExtentGoneError("replaced meanwhile")
        return await super().link(*arguments, **options)


def test_a_source_replaced_meanwhile_is_looked_up_again() -> None:
    desk = Desk("", Restless)
    desk.put("s", b"1")
    desk.copy("s", "k")
    assert desk.read("k") == b"1"
    desk.store.left = 100  # type: ignore[attr-defined]  # of Restless
    assert refusal(desk.copy, "s", "k").code == "SlowDown"


def test_copies_of_versions() -> None:
    desk = Desk("Enabled")
    old, new = desk.put("s", b"old"), desk.put("s", b"new")
    copied: res.CopyResult = desk.copy("s", "k", old.version)
    assert copied.source_version == old.version
    assert copied.version == desk.head("k").version
    assert desk.read("k") == b"old"
    assert desk.copy("s", "k").source_version == new.version
    assert refusal(desk.copy, "s", "s").code == "InvalidRequest"
    desk.copy("s", "s", old.version)
    assert desk.read("s") == b"old"
    marker = desk.delete("s").version
    assert refusal(desk.copy, "s", "k").code == "NoSuchKey"
    assert refusal(desk.copy, "s", "k", marker).code == "InvalidRequest"
    assert refusal(desk.copy, "s", "k", NEVER).code == "NoSuchVersion"
    desk.set("Suspended")
    assert desk.copy("s", "k", old.version).version == ""
    assert desk.head("k").version == "null"


def test_completions_are_versions_and_may_be_repeated() -> None:
    desk = Desk("Enabled")
    upload = desk.begin("k", tags={"t": "1"})
    part = desk.part("k", upload, 1, b"1")
    done = desk.complete("k", upload, part)
    assert done.version == desk.head("k").version != ""
    assert desk.head("k").tag_count == 1
    desk.put("k", b"later")
    assert desk.complete("k", upload, part).version == done.version
    assert refusal(desk.complete, "k", upload, part._replace(etag="0" * 32)).code == "NoSuchUpload"
    run(desk.buckets.delete("b"))
