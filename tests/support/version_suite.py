"""The part of a store's contract that concerns versions. `StoreSuite` includes it.

Law: as for `store_suite`.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from meshd.store.errors import ConditionFailedError, ConditionMissingError, NoSuchVersionError
from meshd.store.records import NULL, Meta, Removed, Upload
from meshwire.http_values.conditional_requests import Conditions
from meshwire.s3.bucket_settings import Acl, Grant
from tests.support.store_calls import LARGE, error_of, fake_etag, put_object, put_part

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from meshd.store.api import ObjectStore
    from meshd.store.records import Record, VersionPage
    from meshwire.s3.bucket_settings import Versioning

ON: Versioning = "Enabled"
OFF: Versioning = "Suspended"


def version_history(store: ObjectStore, key: str) -> list[tuple[str, bytes | None, bool]]:
    """(version, bytes or None for a marker, newest?) of a key, as the listing says; `get` must agree."""
    page = store.list_versions("b", prefix=key)
    found = []
    for (name, record), latest in zip(page.entries, page.latest, strict=True):
        if name == key:
            assert store.get_version("b", key, record.version or NULL) == record
            data = None if record.marker else store.read_range(record, 0, record.size)
            found.append((record.version or NULL, data, latest))
    newest = page.entries[0][1] if found else None
    assert store.newest_version("b", key) == newest
    assert store.get("b", key) == (None if newest is None or newest.marker else newest)
    assert [latest for _, _, latest in found] == [number == 0 for number in range(len(found))]
    return found


def version_bodies(store: ObjectStore, key: str = "k") -> list[bytes | None]:
    """The bytes of a key's versions, the newest first; None for a marker."""
    return [data for _, data, _ in version_history(store, key)]


class VersionSuite:
    """Needs `_run` of StoreSuite."""

    def _run(self, check: Callable[[ObjectStore], Coroutine[Any, Any, None]]) -> None:
        raise NotImplementedError

    def test_versions_are_kept_and_told_apart(self) -> None:
        async def check(store: ObjectStore) -> None:
            contents = (b"one", bytes(LARGE), b"", b"four")
            made = [await put_object(store, "k", data, versioning=ON) for data in contents]
            ids = [record.version for record in made]
            assert len(set(ids)) == len({len(text) for text in ids}) + 3
            assert NULL not in ids
            assert [version for version, _, _ in version_history(store, "k")] == ids[::-1]
            for record in made:
                assert store.get_version("b", "k", record.version) == record
                assert store.get_version("b", "other", record.version) is None
            for text in ("", NULL, "x", ids[0].upper(), f"{ids[0]}0", ids[0][:-1], "é", "\0", "-1", "0" * 16):
                assert text in ids or store.get_version("b", "k", text) is None
            assert [key for key, _ in store.list("b").entries] == ["k"]
            assert store.get("b", "k") == made[-1]

        self._run(check)

    def test_a_marker_hides_and_its_removal_shows_again(self) -> None:
        async def check(store: ObjectStore) -> None:
            record = await put_object(store, "k", b"x", versioning=ON)
            removed = await store.delete("b", "k", versioning=ON)
            marker = removed.marker
            assert marker is not None
            assert removed == Removed(None, marker)
            assert (marker.marker, marker.size, marker.etag) == (True, 0, "")
            assert store.get("b", "k") is None
            assert store.list("b").entries == ()
            assert version_bodies(store) == [None, b"x"]
            again = await store.delete("b", "k", versioning=ON)
            assert version_bodies(store) == [None, None, b"x"]
            assert not store.is_empty("b")
            assert await store.delete_version("b", "k", marker.version) == Removed(marker)
            assert store.get("b", "k") is None
            assert again.marker is not None
            await store.delete_version("b", "k", again.marker.version)
            assert store.get("b", "k") == record
            assert await store.delete_version("b", "k", marker.version) == Removed()
            await store.delete_version("b", "k", record.version)
            assert store.is_empty("b")
            assert store.list_versions("b").entries == ()
            assert (await store.delete("b", "never", versioning=ON)).marker == store.newest_version(
                "b", "never"
            )

        self._run(check)

    def test_the_null_version_is_one(self) -> None:
        async def check(store: ObjectStore) -> None:
            first = await put_object(store, "k", b"before")
            assert first.version == ""
            await put_object(store, "k", b"v1", versioning=ON)
            assert version_bodies(store) == [b"v1", b"before"]
            assert store.get_version("b", "k", NULL) == first
            second = await put_object(store, "k", b"null2", versioning=OFF)
            assert version_bodies(store) == [b"null2", b"v1"]
            await put_object(store, "k", b"v2", versioning=ON)
            third = await put_object(store, "k", b"null3", versioning=OFF)
            assert version_bodies(store) == [b"null3", b"v2", b"v1"]
            assert store.get_version("b", "k", NULL) == third != second
            removed = await store.delete("b", "k", versioning=OFF)
            assert removed.record == third
            assert version_bodies(store) == [None, b"v2", b"v1"]
            assert store.get_version("b", "k", NULL) == removed.marker
            again = await store.delete("b", "k", versioning=OFF)
            assert again.record == removed.marker
            assert version_bodies(store) == [None, b"v2", b"v1"]
            await put_object(store, "k", b"null4", versioning=OFF)
            assert version_bodies(store) == [b"null4", b"v2", b"v1"]
            assert (await store.delete_version("b", "k", NULL)).record is not None
            assert version_bodies(store) == [b"v2", b"v1"]
            assert await store.delete_version("b", "k", NULL) == Removed()

        self._run(check)

    def test_a_stale_setting_never_costs_a_version(self) -> None:
        async def check(store: ObjectStore) -> None:
            await put_object(store, "k", b"v1", versioning=ON)
            await put_object(store, "k", b"plain")
            assert version_bodies(store) == [b"plain", b"v1"]
            await store.delete("b", "k")
            assert version_bodies(store) == [b"v1"]
            assert (await store.delete("b", "k")).marker is not None
            assert version_bodies(store) == [None, b"v1"]
            assert await store.delete("b", "k") == Removed()

        self._run(check)

    def test_versions_go_in_any_order(self) -> None:
        async def check(store: ObjectStore) -> None:
            made = [await put_object(store, "k", b"%d" % number, versioning=ON) for number in range(5)]
            for number, left in ((2, [4, 3, 1, 0]), (4, [3, 1, 0]), (0, [3, 1]), (3, [1]), (1, [])):
                removed = await store.delete_version("b", "k", made[number].version)
                assert removed.record == made[number]
                assert version_bodies(store) == [b"%d" % one for one in left]

        self._run(check)

    def test_conditions_look_at_the_current_version(self) -> None:
        async def check(store: ObjectStore) -> None:
            fresh, same = Conditions(if_none_match=("*",)), Conditions(if_match=(fake_etag(b"x"),))
            await put_object(store, "k", b"x", versioning=ON, conditions=fresh)
            await error_of(
                ConditionFailedError, put_object(store, "k", b"y", versioning=ON, conditions=fresh)
            )
            await put_object(store, "k", b"z", versioning=ON, conditions=same)
            await error_of(ConditionFailedError, store.delete("b", "k", versioning=ON, conditions=same))
            await store.delete("b", "k", versioning=ON)
            await error_of(
                ConditionMissingError, put_object(store, "k", b"y", versioning=ON, conditions=same)
            )
            await put_object(store, "k", b"y", versioning=ON, conditions=fresh)
            old = version_history(store, "k")[-1][0]
            await error_of(ConditionFailedError, _remove_if(store, old, "other"))
            await _remove_if(store, old, fake_etag(b"x"))
            await error_of(ConditionMissingError, _remove_if(store, old, fake_etag(b"x")))
            assert version_bodies(store) == [b"y", None, b"z"]

        self._run(check)

    def test_of_many_conditional_versions_one_wins(self) -> None:
        async def check(store: ObjectStore) -> None:
            for wanted in (Conditions(if_none_match=("*",)), Conditions(if_match=(fake_etag(b"x"),))):
                contents = [b"x" if wanted.if_none_match else b"%d" % number for number in range(20)]
                doing = [put_object(store, "k", data, versioning=ON, conditions=wanted) for data in contents]
                results = await asyncio.gather(*doing, return_exceptions=True)
                winners = [result for result in results if not isinstance(result, ConditionFailedError)]
                assert winners == [store.get("b", "k")]
            assert len(version_history(store, "k")) == 2

        self._run(check)

    def test_many_are_deleted_at_once(self) -> None:
        async def check(store: ObjectStore) -> None:
            await put_object(store, "a", b"a", versioning=ON)
            removed = await store.delete_many("b", ["a", "b", "a"], versioning=ON)
            assert set(removed) == {"a", "b"}
            assert all(one.marker is not None and one.record is None for one in removed.values())
            assert (version_bodies(store, "a"), version_bodies(store, "b")) == ([None, b"a"], [None])
            record = await put_object(store, "c", b"c")
            assert await store.delete_many("b", ["c", "d"]) == {"c": Removed(record), "d": Removed()}

        self._run(check)

    def test_copies_and_uploads_make_versions(self) -> None:
        async def check(store: ObjectStore) -> None:
            for data in (b"small", os.urandom(LARGE)):
                old = await put_object(store, "k", data, versioning=ON)
                await put_object(store, "k", b"new", versioning=ON)
                copy = await store.link("b", "k", old, Meta("copied"), versioning=ON)  # an old one on top
                assert copy.version
                upload = await store.create_upload(
                    Upload("", "b", "k", tags={"t": "1"}, acl=Acl("public-read"))
                )
                assert store.get_upload("b", "k", upload.upload_id) == upload
                assert (upload.tags, upload.acl) == ({"t": "1"}, Acl("public-read"))
                await put_part(store, upload, 1, data)
                await store.complete_upload(upload, [1], Meta("e-1", tags=upload.tags), versioning=ON)
                assert version_bodies(store) == [data, data, b"new", data]
                current = store.get("b", "k")
                assert current is not None
                assert (current.tags, current.acl) == ({"t": "1"}, None)
                for version, _, _ in version_history(store, "k")[1:]:
                    await store.delete_version("b", "k", version)
                assert version_bodies(store) == [data]
                await store.delete_version("b", "k", current.version)

        self._run(check)

    def test_amendments_change_nothing_else(self) -> None:
        async def check(store: ObjectStore) -> None:
            acl = Acl("", (Grant("user-1", "READ"), Grant("user-2", "FULL_CONTROL")))
            for data in (b"small", os.urandom(LARGE)):
                first = await put_object(
                    store, "k", data, versioning=ON, tags={"a": "1"}, metadata={"m": "x"}
                )
                second = await put_object(store, "k", b"2", versioning=ON)
                amended = await store.amend("b", "k", None, tags={"ä": "ö", "": ""})
                assert amended == store.get("b", "k")
                assert (amended.tags, amended.acl) == ({"ä": "ö", "": ""}, None)
                assert _essence(amended) == _essence(second)
                older = await store.amend("b", "k", first.version, acl=acl)
                assert (older.tags, older.acl) == ({"a": "1"}, acl)
                cleared = await store.amend("b", "k", first.version, tags={})
                assert (cleared.tags, cleared.acl) == ({}, acl)
                assert _essence(cleared) == _essence(first)
                assert version_bodies(store)[:2] == [b"2", data]
                await store.delete_version("b", "k", second.version)
                assert store.get("b", "k") == cleared

        self._run(check)

    def test_a_version_with_another_stamp_is_not_removed(self) -> None:
        """Its ETag is the same: it has the same bytes, with other metadata."""

        async def check(store: ObjectStore) -> None:
            first = await put_object(store, "k", b"same", metadata={"n": "1"})
            second = await put_object(store, "k", b"same", metadata={"n": "2"})
            assert first.etag == second.etag
            same = Conditions(if_match=(first.etag,))
            stale = store.delete_version("b", "k", NULL, conditions=same, stamp=first.stamp)
            await error_of(ConditionFailedError, stale)
            assert store.get("b", "k") == second
            removed = await store.delete_version("b", "k", NULL, stamp=second.stamp)
            assert removed.record == second
            assert await store.delete_version("b", "k", NULL, stamp=second.stamp) == Removed()

        self._run(check)

    def test_what_is_gone_is_not_amended(self) -> None:
        async def check(store: ObjectStore) -> None:
            await error_of(NoSuchVersionError, store.amend("b", "k", None, tags={}))
            record = await put_object(store, "k", b"x", versioning=ON)
            await error_of(NoSuchVersionError, store.amend("b", "k", NULL, tags={}))
            marker = (await store.delete("b", "k", versioning=ON)).marker
            assert marker is not None
            await error_of(NoSuchVersionError, store.amend("b", "k", None, tags={}))
            await error_of(NoSuchVersionError, store.amend("b", "k", marker.version, tags={}))
            await store.delete_version("b", "k", record.version)
            await error_of(NoSuchVersionError, store.amend("b", "k", record.version, tags={}))

        self._run(check)

    def test_versions_are_listed_in_order_and_pages(self) -> None:
        async def check(store: ObjectStore) -> None:
            keys = ["a", "a/1", "a/2", "a0", "b", "é", "x" * 1000, "x" * 439, "x" * 440]
            for number in range(3):
                for key in keys:
                    await put_object(store, key, b"%d" % number, versioning=ON)
            for key in keys[::2]:
                await store.delete("b", key, versioning=ON)
            await put_object(store, "elsewhere", bucket="b2", versioning=ON)
            whole = store.list_versions("b")
            names = [key for key, _ in whole.entries]
            assert names == sorted(names, key=str.encode)
            assert {name: names.count(name) for name in keys} == {key: 3 + (key in keys[::2]) for key in keys}
            assert sum(whole.latest) == len(keys)
            for limit in (1, 2, 3, 5, 1000):
                for prefix, delimiter in (("", ""), ("", "/"), ("a", "/"), ("a/", ""), ("x" * 439, "x")):
                    pages = _pages(store, prefix, delimiter, limit)
                    full = store.list_versions("b", prefix=prefix, delimiter=delimiter)
                    assert [entry for page in pages for entry in page.entries] == list(full.entries)
                    assert [one for page in pages for one in page.latest] == list(full.latest)
                    assert [one for page in pages for one in page.prefixes] == list(full.prefixes)
            rolled = store.list_versions("b", delimiter="/")
            assert rolled.prefixes == ("a/",)
            assert store.list_versions("b", limit=0) == store.list_versions("b", prefix="nothing")
            rest = store.list_versions("b", key_marker="a0").entries
            assert [key for key, _ in rest] == names[names.index("b") :]

        self._run(check)

    def test_a_listing_goes_on_where_its_marker_was(self) -> None:
        async def check(store: ObjectStore) -> None:
            made = [await put_object(store, "k", b"%d" % n, versioning=ON) for n in range(3)]
            await put_object(store, "k", b"null", versioning=OFF)
            made.append(await put_object(store, "k", b"3", versioning=ON))
            assert version_bodies(store) == [b"3", b"null", b"2", b"1", b"0"]

            def after(version: str) -> list[bytes]:
                page = store.list_versions("b", key_marker="k", version_marker=version)
                return [store.read_range(record, 0, 9) for _, record in page.entries]

            assert after(NULL) == [b"2", b"1", b"0"]
            await store.delete_version("b", "k", made[2].version)
            await store.delete_version("b", "k", made[3].version)
            assert after(made[3].version) == [b"null", b"1", b"0"]
            assert after(made[2].version) == [b"1", b"0"]
            page = store.list_versions("b", key_marker="k", version_marker=made[3].version)
            assert page.latest == (True, False, False)
            await store.delete_version("b", "k", NULL)
            assert after(NULL) == [b"1", b"0"]
            assert after("nonsense") == [b"1", b"0"]

        self._run(check)


async def _remove_if(store: ObjectStore, version: str, etag: str) -> Removed:
    return await store.delete_version("b", "k", version, conditions=Conditions(if_match=(etag,)))


def _essence(record: Record) -> Any:
    names = ("size", "etag", "stamp", "modified", "version", "extents", "headers", "metadata", "parts")
    return [getattr(record, name) for name in names]


def _pages(store: ObjectStore, prefix: str, delimiter: str, limit: int) -> list[VersionPage]:
    pages, key, version = [], "", ""
    while True:
        page = store.list_versions(
            "b", prefix=prefix, delimiter=delimiter, key_marker=key, version_marker=version, limit=limit
        )
        assert len(page.entries) + len(page.prefixes) <= limit
        pages.append(page)
        if not page.truncated:
            return pages
        key, version = page.next_key, page.next_version
