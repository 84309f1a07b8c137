"""What writers do to a daemon before the power fails, by kind: objects, versions and uploads in parts. Other
kinds lie beside it.

Law: each name has one writer. A kind notes each change before it is asked for and after it was acknowledged,
and says later what it finds.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from tests.powercuts.history import Attempt, History
from tests.support.archives import UNPACK, tar_of

if TYPE_CHECKING:
    import random
    from collections.abc import Hashable, Iterator, Mapping

    from tests.support.daemons import Daemon

BUCKET: Final = "power"
_NAMES: Final = 8
_SIZES: Final = (9, 3000, 200_000)
DAMAGED: Final = "damaged: "
"""Begins what is found where a read says that the bytes are not what they were."""


def digest(body: bytes) -> str:
    """What histories keep of bytes."""
    return f"{len(body)} bytes {hashlib.sha256(body).hexdigest()[:12]}"


class Traffic:
    """One kind. `histories` by name; `acknowledged` counts changes; `interrupted`: jobs that ran at a cut."""

    bucket = ""
    compared = False
    """Whether nodes that have compared must show the same, which stays then."""

    def __init__(self) -> None:
        self.histories: dict[str, History] = {}
        self.acknowledged = self.interrupted = 0
        self._counting = threading.Lock()

    def prepare(self, daemon: Daemon, client: Any) -> None:
        """Before the first writers of a life; not judged."""

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        """One change by the writer of this number. Raises ClientError, BotoCoreError, OSError."""
        raise NotImplementedError

    def cut_off(self) -> None:
        """The power fails now."""

    def find(self, daemon: Daemon, client: Any, name: str) -> Hashable:
        """What is there now; None if nothing is."""
        raise NotImplementedError

    def allows(self, name: str, value: Hashable, since: float) -> bool:
        """Whether a mesh may answer this. Where it takes several requests to find out, and a change has had
        no answer, each may show it or not."""
        return value in self.histories[name].allowed(since)

    def after_cut(self, name: str, since: float) -> None:
        """Goes on from what a mesh may have kept."""
        self.histories[name].after_cut(since)

    def settle(self, name: str, value: Hashable) -> None:
        """Goes on from what all nodes show after they have compared: it stays."""
        self.histories[name].settle(value)

    def disagreements(self, daemon: Daemon, client: Any, found: Mapping[str, Hashable]) -> list[str]:
        """What else says something different, after a cut."""
        return []

    @contextmanager
    def changing(self, name: str, value: Hashable) -> Iterator[None]:
        """The block makes the change; without an error it was acknowledged. What a condition refused is no
        part of the history: it must never be seen."""
        attempt = Attempt(value, time.monotonic())
        with self._counting:
            attempts = self.histories.setdefault(name, History()).attempts
            attempts.append(attempt)
        try:
            yield
        except ClientError as error:
            if error_code(error) == "PreconditionFailed":
                attempts.remove(attempt)
            raise
        attempt.acknowledged = time.monotonic()
        with self._counting:
            self.acknowledged += 1

    def _create_bucket(self, client: Any, bucket: str) -> None:
        try:
            client.create_bucket(Bucket=bucket)
        except client.exceptions.BucketAlreadyOwnedByYou:
            return


def error_code(error: ClientError) -> str:
    return str(error.response["Error"]["Code"])


def _read(client: Any, **asked: Any) -> str | None:
    """The digest of an object, None if there is none, or what is said of a damaged one."""
    try:
        return digest(client.get_object(**asked)["Body"].read())
    except ClientError as error:
        return None if error_code(error) == "NoSuchKey" else DAMAGED + str(error)
    except BotoCoreError as error:
        return DAMAGED + str(error)


def ask(daemon: Daemon, method: str, target: str, document: Any = None) -> Any:
    """The answer to a request of the JSON APIs. Raises OSError when it is an error."""
    answer = daemon.request(method, target, b"" if document is None else json.dumps(document).encode())
    if answer.status >= 300:
        raise OSError(f"{method} {target}: {answer.status} {answer.body[:200]!r}")
    return json.loads(answer.body) if answer.body else None


class Objects(Traffic):
    """Objects are put, in parts too, and deleted."""

    bucket = BUCKET
    compared = True

    def prepare(self, daemon: Daemon, client: Any) -> None:
        self._create_bucket(client, self.bucket)

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        if chance.random() < 0.1:
            self._put_together(client, number, chance)
            return
        key = f"client{number}/{chance.randrange(_NAMES)}"
        body = None if chance.random() < 0.2 else chance.randbytes(chance.choice(_SIZES))
        name = {"Bucket": self.bucket, "Key": key}
        with self.changing(key, None if body is None else digest(body)):
            if body is None:
                client.delete_object(**name)
            elif chance.random() < 0.06:
                put_in_parts(client, name, body)
            else:
                client.put_object(**name, Body=body)

    def _put_together(self, client: Any, number: int, chance: random.Random) -> None:
        """Several objects in one request, as members of a tar."""
        bodies = {
            f"client{number}/{key}": chance.randbytes(chance.choice(_SIZES))
            for key in chance.sample(range(_NAMES), 3)
        }
        with ExitStack() as changes:
            for key, body in bodies.items():
                changes.enter_context(self.changing(key, digest(body)))
            client.put_object(
                Bucket=self.bucket, Key=f"client{number}.tar", Body=tar_of(bodies), Metadata=UNPACK
            )

    def find(self, daemon: Daemon, client: Any, name: str) -> Hashable:
        return _read(client, Bucket=self.bucket, Key=name)

    def disagreements(self, daemon: Daemon, client: Any, found: Mapping[str, Hashable]) -> list[str]:
        listed = {
            each["Key"]
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
            for each in page.get("Contents", ())
        }
        there = {key for key, value in found.items() if value is not None}
        return [f"{key}: the listing disagrees" for key in sorted(listed ^ there)]


class Stock(Objects):
    """Many objects that are written once, so that there is something to move."""

    bucket = "stock"

    def prepare(self, daemon: Daemon, client: Any) -> None:
        if self.histories:
            return
        self._create_bucket(client, self.bucket)
        for number in range(150):
            body = hashlib.sha256(b"%d" % number).digest() * 1000
            with self.changing(f"stock/{number}", digest(body)):
                client.put_object(Bucket=self.bucket, Key=f"stock/{number}", Body=body)
        time.sleep(3.0)  # relaxed stores keep what is that old

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        time.sleep(0.01)


def put_in_parts(client: Any, name: Mapping[str, str], body: bytes) -> None:
    """Upload an object in one part."""
    upload = client.create_multipart_upload(**name)["UploadId"]
    tag = client.upload_part(**name, UploadId=upload, PartNumber=1, Body=body)["ETag"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    client.complete_multipart_upload(**name, UploadId=upload, MultipartUpload=parts)


class Conditional(Traffic):
    """Chains of `If-Match`, and names that only one of several writers may create."""

    bucket = "conditional"
    compared = True

    def prepare(self, daemon: Daemon, client: Any) -> None:
        self._create_bucket(client, self.bucket)

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        body = chance.randbytes(chance.choice(_SIZES))
        if chance.random() < 0.3:
            key = f"once/{chance.randrange(40)}"
            with self.changing(key, digest(body)):
                client.put_object(Bucket=self.bucket, Key=key, Body=body, IfNoneMatch="*")
            return
        name = {"Bucket": self.bucket, "Key": f"client{number}/{chance.randrange(3)}"}
        try:
            condition = {"IfMatch": client.head_object(**name)["ETag"]}
        except ClientError as error:
            if error_code(error) != "404":
                raise
            condition = {"IfNoneMatch": "*"}
        with self.changing(name["Key"], digest(body)):
            client.put_object(**name, Body=body, **condition)

    def allows(self, name: str, value: Hashable, since: float) -> bool:
        """Of several that create a name one succeeds; requests without an answer are none of those, then."""
        if name.startswith("once/"):
            created = {
                each.value for each in self.histories[name].attempts if each.value and each.is_settled(since)
            }
            if created:
                return value in created and len(created) == 1
        return super().allows(name, value, since)

    def find(self, daemon: Daemon, client: Any, name: str) -> Hashable:
        return _read(client, Bucket=self.bucket, Key=name)


class Versions(Traffic):
    """Versions and delete markers, with tags; versions are removed by id. The value of a name is all of its
    versions, the newest first."""

    bucket = "versioned"

    def prepare(self, daemon: Daemon, client: Any) -> None:
        self._create_bucket(client, self.bucket)
        client.put_bucket_versioning(Bucket=self.bucket, VersioningConfiguration={"Status": "Enabled"})

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        key = f"client{number}/{chance.randrange(3)}"
        name, found = {"Bucket": self.bucket, "Key": key}, self._versions(client, key)
        state = [self._state(client, key, each) for each in found]
        if found and (len(found) > 5 or chance.random() < 0.25):
            gone = chance.randrange(len(found))
            with self.changing(key, _joined(state[:gone] + state[gone + 1 :])):
                client.delete_object(**name, VersionId=found[gone]["VersionId"])
        elif chance.random() < 0.25:
            with self.changing(key, _joined(["marker", *state])):
                client.delete_object(**name)
        else:
            body, tag = chance.randbytes(chance.choice(_SIZES)), str(chance.randrange(1000))
            with self.changing(key, _joined([f"{digest(body)} t={tag}", *state])):
                client.put_object(**name, Body=body, Tagging=f"t={tag}")

    def find(self, daemon: Daemon, client: Any, name: str) -> Hashable:
        return _joined([self._state(client, name, each) for each in self._versions(client, name)])

    def _versions(self, client: Any, key: str) -> list[dict[str, Any]]:
        page = client.list_object_versions(Bucket=self.bucket, Prefix=key)
        found = [
            *page.get("Versions", ()),
            *({**each, "marker": True} for each in page.get("DeleteMarkers", ())),
        ]
        return sorted(
            (each for each in found if each["Key"] == key), key=lambda each: each["VersionId"], reverse=True
        )

    def _state(self, client: Any, key: str, version: Mapping[str, Any]) -> str:
        if version.get("marker"):
            return "marker"
        name = {"Bucket": self.bucket, "Key": key, "VersionId": version["VersionId"]}
        tags = client.get_object_tagging(**name)["TagSet"]
        return " ".join([str(_read(client, **name)), *(f"{tag['Key']}={tag['Value']}" for tag in tags)])


def _joined(state: list[str]) -> str | None:
    return "; ".join(state) or None


class Uploads(Traffic):
    """Uploads in progress: parts are added and replaced, uploads are ended and begun. The value of a name is
    its object, and the parts of its upload."""

    bucket = "parts"
    compared = True

    def __init__(self) -> None:
        super().__init__()
        self._ids: dict[str, str] = {}
        self._doubted: dict[str, set[str | None]] = {}
        self._unsure = set[str]()  # names of which an upload was begun or ended without an answer

    def prepare(self, daemon: Daemon, client: Any) -> None:
        self._create_bucket(client, self.bucket)

    def change(self, daemon: Daemon, client: Any, number: int, chance: random.Random) -> None:
        key = f"client{number}/{chance.randrange(2)}"
        name, (content, parts) = {"Bucket": self.bucket, "Key": key}, self._state(client, key)
        if parts is None:
            with self._beginning_or_ending(key, _told(content, {})):
                client.create_multipart_upload(**name)
            return
        name["UploadId"] = self._ids[key]
        act = chance.random()
        if parts and act < 0.2:
            with self._beginning_or_ending(key, _told(content, None)):
                client.abort_multipart_upload(**name)
        elif parts and act < 0.45:
            last, (tag, told) = max(parts.items())
            with self._beginning_or_ending(key, _told(told, None)):
                chosen = {"Parts": [{"PartNumber": last, "ETag": tag}]}
                client.complete_multipart_upload(**name, MultipartUpload=chosen)
        else:
            part, body = chance.randrange(1, 4), chance.randbytes(chance.choice(_SIZES))
            tag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
            self._told_of[tag] = digest(body)  # before: a request without an answer may have succeeded
            with self.changing(key, _told(content, parts | {part: (tag, digest(body))})):
                client.upload_part(**name, PartNumber=part, Body=body)

    _told_of: Final[dict[str, str]] = {}

    @contextmanager
    def _beginning_or_ending(self, name: str, value: Hashable) -> Iterator[None]:
        try:
            with self.changing(name, value):
                yield
        except (ClientError, BotoCoreError):
            self._unsure.add(name)
            raise

    def find(self, daemon: Daemon, client: Any, name: str) -> Hashable:
        return _told(*self._state(client, name))

    def allows(self, name: str, value: Hashable, since: float) -> bool:
        parts = [_untold(each)[1] for each in self.histories[name].allowed(since)]
        found = _untold(value)
        # Of two uploads one may be without an answer, and stays in doubt until the nodes have compared.
        doubted = name in self._unsure and "0" in (found[1] or ())
        return found[0] in self._contents(name, since) and (doubted or found[1] in parts)

    def after_cut(self, name: str, since: float) -> None:
        self._doubted[name] = self._contents(name, since)
        super().after_cut(name, since)

    def settle(self, name: str, value: Hashable) -> None:
        self._doubted[name] = {_untold(value)[0]}
        self._unsure.discard(name)
        super().settle(name, value)

    def _contents(self, name: str, since: float) -> set[str | None]:
        """What the object may be. A completion without an answer stays in doubt until the next one is
        acknowledged, whatever happens to parts in the meantime."""
        found = set(self._doubted.get(name, {None}))
        for each in self.histories[name].attempts:
            content = _untold(each.value)[0]
            if content not in found:  # a completion; other changes keep what a node has shown
                found = {content} if each.is_settled(since) and each.begun else found | {content}
        return found

    def _state(self, client: Any, key: str) -> tuple[str | None, dict[int, tuple[str, str]] | None]:
        """The object, and the parts of the only upload; None without one."""
        content = _read(client, Bucket=self.bucket, Key=key)
        found = client.list_multipart_uploads(Bucket=self.bucket, Prefix=key).get("Uploads", [])
        ids = [each["UploadId"] for each in found if each["Key"] == key]
        if not ids:
            return content, None
        self._ids[key] = ids[0]
        page = client.list_parts(Bucket=self.bucket, Key=key, UploadId=ids[0])
        parts = {each["PartNumber"]: each["ETag"] for each in page.get("Parts", ())}
        told = {number: (tag, self._told_of.get(tag, "unknown")) for number, tag in parts.items()}
        return content, told | ({0: ("", f"{len(ids)} uploads")} if len(ids) > 1 else {})


def _untold(value: Hashable) -> tuple[str | None, Any]:
    content, parts = json.loads(str(value)) if value else (None, None)
    return content, parts


def _told(content: str | None, parts: Mapping[int, tuple[str, str]] | None) -> str | None:
    if content is None and parts is None:
        return None
    return json.dumps([content, None if parts is None else {n: parts[n][0] for n in sorted(parts)}])
