"""One endpoint of S3, asked by plain HTTP/1.1 requests that the SDK's code signs: next to no work a request.

Law: an answer becomes an Operation; None when the request cannot have left, because no connection was made.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree

from meshd.util.clock import SystemClock
from meshwire.s3.parse_request import RequestHead
from meshwire.sigv4 import Credential, sign
from tests.linearizability.model import MARKER, Version
from tests.support.archives import UNPACK_HEADERS, tar_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.linearizability.model import Operation

_ID: Final = re.compile(rb"<UploadId>([^<]+)</UploadId>")
_SPACE: Final = "{http://s3.amazonaws.com/doc/2006-03-01/}"
_clock = SystemClock()

Answer = tuple[int, dict[str, str], bytes]


class UnsentError(Exception):
    """No connection was made: nobody has heard of the request."""


class Endpoint:
    """One client's connection to one node. Not for several threads at once."""

    def __init__(self, url: str, keys: tuple[str, str], patience: float, now: Callable[[], float]) -> None:
        where = urlsplit(url)
        self._host, self._credential, self._now = where.netloc, Credential(*keys), now
        self._connection = HTTPConnection(str(where.hostname), where.port, timeout=patience)

    def __repr__(self) -> str:
        return f"<Endpoint {self._host}>"

    def close(self) -> None:
        """The next request opens it again."""
        self._connection.close()

    # operations

    def put(self, asked: Operation, bucket: str, key: str, body: bytes) -> Operation | None:
        """PUT, with the conditions of what is asked."""
        return self._write(asked, "PUT", f"/{bucket}/{key}", body)

    def put_packed(
        self, asked: Operation, bucket: str, key: str, body: bytes, others: Sequence[str]
    ) -> Operation | None:
        """PUT of a tar that is unpacked, with `others` in it."""
        packed = tar_of({**dict.fromkeys(others, body), key: body})
        return self._write(asked, "PUT", f"/{bucket}/{key}", packed, UNPACK_HEADERS)

    def delete(self, asked: Operation, bucket: str, key: str) -> Operation | None:
        """DELETE, of a version if one is named."""
        return self._write(asked, "DELETE", f"/{bucket}/{key}{_version_query(asked)}")

    def complete(self, asked: Operation, bucket: str, key: str, body: bytes) -> Operation | None:
        """An upload of one part; the operation is its completion. None if it did not come so far."""
        path = f"/{bucket}/{key}"
        try:
            begun = self._send("POST", f"{path}?uploads=")
            found = _ID.search(begun[2])
            if begun[0] != 200 or found is None:
                return None
            upload = quote(found[1].decode(), safe="")
            part = self._send("PUT", f"{path}?partNumber=1&uploadId={upload}", body)
        except (OSError, HTTPException, UnsentError):
            return None
        if part[0] != 200:
            return None
        document = (
            "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
            f"<ETag>{part[1]['etag']}</ETag></Part></CompleteMultipartUpload>"
        )
        asked = replace(asked, begin=self._now())
        return self._write(asked, "POST", f"{path}?uploadId={upload}", document.encode())

    def get(self, asked: Operation, bucket: str, key: str) -> Operation | None:
        """GET or HEAD, of a version if one is named."""
        answer = self._ask(asked, asked.action.upper(), f"/{bucket}/{key}{_version_query(asked)}")
        if answer is None:
            return None
        if answer[0] != 200:
            return self._ended(asked, answer[0])
        value = answer[1].get("etag", "no ETag")
        if asked.action == "get" and etag_of(answer[2], parts=value.endswith('-1"')) != value:
            value = f"bytes that are not those of {value}"
        seen = Version(answer[1].get("x-amz-version-id", ""), value)
        return replace(self._ended(asked, 200), seen=(seen,))

    def list(self, asked: Operation, bucket: str, key: str) -> Operation | None:
        """The listing of this name alone."""
        answer = self._ask(asked, "GET", f"/{bucket}?list-type=2&prefix={key}")
        if answer is None:
            return None
        if answer[0] != 200:
            return self._ended(asked, 0)  # also 404: it speaks of the bucket, and not of the name
        found = ElementTree.fromstring(answer[2]).iter(f"{_SPACE}Contents")
        seen = tuple(Version("", _text(one, "ETag")) for one in found)
        return replace(self._ended(asked, 200), seen=seen)

    def versions(self, asked: Operation, bucket: str, key: str) -> Operation | None:
        """All versions of this name, newest first."""
        answer = self._ask(asked, "GET", f"/{bucket}?prefix={key}&versions=")
        if answer is None:
            return None
        if answer[0] != 200:
            return self._ended(asked, 0)  # also 404: it speaks of the bucket, and not of the name
        found = [one for one in ElementTree.fromstring(answer[2]) if one.tag in _KINDS]
        seen = [Version(_text(one, "VersionId"), _value(one)) for one in found]
        return replace(self._ended(asked, 200), seen=tuple(seen))

    # requests

    def _write(
        self,
        asked: Operation,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Operation | None:
        answer = self._ask(asked, method, target, body, headers)
        if answer is None:
            return None
        operation = self._ended(asked, answer[0])
        if b"<Error>" in answer[2] and answer[0] == 200:  # a completion has begun to answer before it knew
            return replace(operation, status=500)
        if asked.version or answer[0] not in (200, 204):
            return operation
        return replace(operation, made=answer[1].get("x-amz-version-id", ""))

    def _ended(self, asked: Operation, status: int) -> Operation:
        return replace(asked, end=self._now(), status=status)

    def _ask(
        self,
        asked: Operation,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Answer | None:
        """The answer; status 0 where none came. None: it was not sent."""
        conditions = {"if-match": asked.if_match, "if-none-match": asked.if_none_match}
        try:
            return self._send(method, target, body, {**headers, **{n: v for n, v in conditions.items() if v}})
        except UnsentError:
            return None
        except (OSError, HTTPException):
            return 0, {}, b""

    def _send(
        self, method: str, target: str, body: bytes = b"", more: dict[str, str] | None = None
    ) -> Answer:
        if self._connection.sock is None:
            try:
                self._connection.connect()
            except OSError as error:
                self.close()
                raise UnsentError(str(error)) from error
        try:
            self._connection.request(method, target, body, self._headers(method, target, body, more or {}))
            answer = self._connection.getresponse()
            return answer.status, {n.lower(): v for n, v in answer.getheaders()}, answer.read()
        except (OSError, HTTPException):
            self.close()
            raise

    def _headers(self, method: str, target: str, body: bytes, more: dict[str, str]) -> dict[str, str]:
        path, _, query = target.partition("?")
        headers = {"host": self._host, **more}
        head = RequestHead(method, path, query, headers)
        seconds, digest = _clock.now_ms() // 1000, hashlib.sha256(body).hexdigest()
        return headers | sign(
            head, self._credential, region="us-east-1", timestamp=seconds, payload_hash=digest
        )


_KINDS: Final = (f"{_SPACE}Version", f"{_SPACE}DeleteMarker")


def etag_of(body: bytes, parts: int = 0) -> str:
    """What S3 calls these bytes, put whole or uploaded as one part."""
    digest = hashlib.md5(body, usedforsecurity=False)
    if parts:
        digest = hashlib.md5(digest.digest(), usedforsecurity=False)
    return f'"{digest.hexdigest()}-1"' if parts else f'"{digest.hexdigest()}"'


def _version_query(asked: Operation) -> str:
    return f"?versionId={quote(asked.version, safe='')}" if asked.version else ""


def _value(element: ElementTree.Element) -> str:
    return MARKER if element.tag.endswith("DeleteMarker") else _text(element, "ETag")


def _text(element: ElementTree.Element, name: str) -> str:
    return element.findtext(f"{_SPACE}{name}") or ""
