"""Counters of what a node stores, after power cuts: they agree with what it lists."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.powercuts.traffic import Traffic, ask

_PER_UPLOAD: Final = 512
"""Bytes that a store may have for what it knows of an upload in parts, besides those of the parts."""

if TYPE_CHECKING:
    import random
    from collections.abc import Hashable, Mapping

    from tests.support.daemons import Daemon


class Usage(Traffic):
    """Writes nothing; others of its scene do, and nothing that makes documents of its own."""

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        time.sleep(0.01)

    def disagreements(self, daemon: Daemon, client: Any, found: Mapping[str, Hashable]) -> list[str]:
        counted, listed = ask(daemon, "GET", "/-/residence/"), _listed(client)
        wrong = []
        if counted["objects"] != listed.objects:
            wrong.append(f"{counted['objects']} objects are counted, {listed.objects} listed")
        if not listed.size <= counted["bytes"] <= listed.size + _PER_UPLOAD * listed.uploads:
            wrong.append(f"{counted['bytes']} bytes are counted, of {listed}")
        for bucket in [each["Name"] for each in client.list_buckets()["Buckets"]]:
            told, current = ask(daemon, "GET", f"/-/residence/{bucket}"), _current(client, bucket)
            if (told["objects"], told["bytes"]) != (len(current), sum(current)):
                wrong.append(f"{bucket}: {told['objects']} of {told['bytes']} bytes, not {current}")
        return wrong


@dataclass
class _Listed:
    """Current objects, bytes of all versions and of parts of uploads in progress, and how many were or are
    uploaded in parts."""

    objects: int = 0
    size: int = 0
    uploads: int = 0


def _listed(client: Any) -> _Listed:
    listed = _Listed()
    for bucket in [each["Name"] for each in client.list_buckets()["Buckets"]]:
        listed.objects += len(_current(client, bucket))
        for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket):
            listed.size += sum(each["Size"] for each in page.get("Versions", ()))
            listed.uploads += sum("-" in each["ETag"] for each in page.get("Versions", ()))
        for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()):
            asked = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            listed.size += sum(part["Size"] for part in client.list_parts(**asked).get("Parts", ()))
            listed.uploads += 1
    return listed


def _current(client: Any, bucket: str) -> list[int]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return [each["Size"] for page in pages for each in page.get("Contents", ())]
