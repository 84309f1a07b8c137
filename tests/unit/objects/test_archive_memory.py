"""Archives that are unpacked while others wait for their commit: only so many of them are in memory."""

from __future__ import annotations

import asyncio
import gzip
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from meshd.auth.identity import ANONYMOUS_IDENTITY
from meshd.objects import archive_upload
from meshd.objects.archive_upload import ArchiveUploads, UnpackOptions
from meshwire.s3.operations import PutObject
from meshwire.s3.request_headers import object_headers
from tests.support.archives import tar_of
from tests.support.bounded_wait import WAIT_TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable

REQUESTS = 30


@pytest.mark.parametrize(
    ("packed", "at_once"), [(gzip.compress, 8), (bytes, REQUESTS)], ids=["gzip", "plain"]
)
def test_few_archives_that_may_become_large_are_unpacked_at_once(
    packed: Callable[[bytes], bytes], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, unpacked, read_members = (
        packed(tar_of({"a": bytes(100_000)})),
        list[int](),
        archive_upload.read_members,
    )

    begun = threading.Semaphore(0)

    def read(body: bytes, options: UnpackOptions) -> list[archive_upload.Member]:
        unpacked.append(len(body))
        begun.release()
        return read_members(body, options)

    monkeypatch.setattr(archive_upload, "read_members", read)

    async def scenario() -> None:
        committed = asyncio.Event()

        async def put_many(*_: Any, **__: Any) -> list[None]:
            await committed.wait()
            return [None]

        async def finish_write(*_: Any, **__: Any) -> None:
            return None

        uploads = ArchiveUploads(
            cast("Any", SimpleNamespace(put_many=put_many)),
            cast(
                "Any",
                SimpleNamespace(
                    owner_for_write=lambda *_: "o",
                    require_same_bucket=lambda *_: None,
                    versioning_of=lambda _: "",
                ),
            ),
            cast("Any", SimpleNamespace(finish_write=finish_write)),
        )
        operation = PutObject("b", "k", object_headers({}), cast("Any", None))
        options = UnpackOptions("", ignore_folders=False, ignore_errors=False)
        calls = [
            asyncio.create_task(
                uploads.put_archive(operation, options, ANONYMOUS_IDENTITY, data, lambda _: None, born=0)
            )
            for _ in range(REQUESTS)
        ]
        async with asyncio.timeout(WAIT_TIMEOUT):
            await asyncio.to_thread(lambda: [begun.acquire() for _ in range(at_once)])
        _, waiting = await asyncio.wait(calls, timeout=0.2)
        assert (len(waiting), len(unpacked)) == (REQUESTS, at_once)
        committed.set()
        assert await asyncio.gather(*calls) == [("a",)] * REQUESTS

    asyncio.run(scenario())
