"""The S3 client, and `connect`, which makes one from arguments and the environment.

Law: one method sends one request; `transfers` composes large transfers of them. Writes carry a
crc64nvme, and reads must have the length the server announced. Thread-safe; pickles without its sockets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from meshsdk.client import gather
from meshsdk.client.settings import load_settings
from meshsdk.client.transport import Request, Transport, parsed
from meshsdk.errors import ConfigurationError, NotFoundError
from meshwire.checksums.body_checksums import new_hasher as new_checksum
from meshwire.http_values import conditional_requests, dates, percent_encoding
from meshwire.names import check_bucket_name, check_key

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from meshsdk.client.gather import Gathered, Item
    from meshsdk.client.http_connection import Buffer, Response
    from meshsdk.client.settings import Settings
    from meshwire.s3.results import (
        BucketEntry,
        DeleteFailure,
        MemberEntry,
        MemberListing,
        ObjectEntry,
        ObjectListing,
    )


_PAGE = 1000


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a HEAD tells of an object.

    Attributes:
        size: in bytes.
        etag: without quotes.
        modified_ms: milliseconds since 1970, UTC.
        metadata: its own, names in lower case without `x-amz-meta-`.
        headers: as they came, names in lower case.
    """

    size: int
    etag: str
    modified_ms: int
    content_type: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


def object_path(bucket: str, key: str = "") -> str:
    """The encoded path of an object or bucket; raises ConfigurationError for names S3 does not have."""
    try:
        check_bucket_name(bucket)
        if key:
            check_key(key)
    except ValueError as error:
        hint = "; give the bucket's name alone, and the key beside it" if "://" in bucket else ""
        place = bucket[:80] if hint else f"s3://{bucket[:80]}/{key[:80]}"
        raise ConfigurationError(f"{place}: {error}{hint}") from error
    return f"/{bucket}/{percent_encoding.encode(key, safe='/')}" if key else f"/{bucket}"


def query_string(**parameters: str | int) -> str:
    """An encoded query; underscores in names become hyphens, and a parameter without a value is `name=`."""
    return "&".join(
        f"{name.replace('_', '-')}={percent_encoding.encode(str(value))}"
        for name, value in sorted(parameters.items())
    )


def crc64(data: Buffer) -> str:
    """Base64 of the crc64nvme, the checksum S3 recommends and the store keeps."""
    hasher = new_checksum("crc64nvme")
    hasher.update(data)
    return hasher.base64()


class Client:
    """S3 operations on a store; made by `mesh.connect`. Keys and bucket names are plain text.

    A call is one request (lists: one a page), asked again with jittered waits while the server is
    unavailable, for `deadline` seconds; then it raises DeadlineError. Every call may raise AccessError
    (403), NotFoundError (404), ServerError, and ConfigurationError for names that S3 does not have.
    Thread-safe; pickles without its sockets; a forked child connects anew.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.transport = Transport(settings)

    # --- buckets ----------------------------------------------------------------------------------

    def buckets(self) -> tuple[BucketEntry, ...]:
        """All buckets of the caller: name, and when it was made."""
        from meshwire.s3 import xml_documents  # the readers of XML load with the first answer that has some

        found: tuple[BucketEntry, ...] = ()
        token: str | None = ""
        while token is not None:
            query = query_string(continuation_token=token) if token else ""
            page = parsed(xml_documents.parse_list_buckets, self.transport.text(Request("GET", "/", query)))
            found += page.buckets
            token = page.next_after
        return found

    def create_bucket(self, bucket: str) -> None:
        """Raises ServerError BucketAlreadyExists; one's own bucket is as good as made."""
        self.transport.text(Request("PUT", object_path(bucket)))

    def delete_bucket(self, bucket: str) -> None:
        """The bucket must be empty, else ServerError BucketNotEmpty."""
        self.transport.text(Request("DELETE", object_path(bucket)))

    def has_bucket(self, bucket: str) -> bool:
        """Whether there is one of this name; raises AccessError where it is another's."""
        try:
            self.transport.text(Request("HEAD", object_path(bucket)))
        except NotFoundError:
            return False
        return True

    # --- listing ----------------------------------------------------------------------------------

    def pages(
        self, bucket: str, prefix: str = "", *, delimiter: str = "", start_after: str = "", page: int = _PAGE
    ) -> Iterator[ObjectListing]:
        """Pages of at most `page` keys that begin with `prefix`, in the order of their UTF-8 bytes, asked
        for as they are taken. With a `delimiter`, what goes on behind it is one common prefix."""
        from meshwire.s3 import xml_documents

        fixed: dict[str, str | int] = {
            "list-type": 2,
            "encoding-type": "url",
            "max-keys": page,
            "prefix": prefix,
        }
        if delimiter:
            fixed["delimiter"] = delimiter
        token = ""
        while True:
            more = (
                {"continuation-token": token}
                if token
                else {"start-after": start_after}
                if start_after
                else {}
            )
            body = self.transport.text(Request("GET", object_path(bucket), query_string(**fixed, **more)))
            listing = parsed(xml_documents.parse_list_result, body)
            yield listing
            if not listing.truncated:
                return
            token = listing.next_after

    def list(self, bucket: str, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectEntry]:
        """Every object whose key begins with `prefix` and comes after `start_after`: key, size, ETag and
        time, a page a request."""
        for listing in self.pages(bucket, prefix, start_after=start_after):
            yield from listing.entries

    def members(
        self, bucket: str, key: str, prefix: str = "", *, start_after: str = ""
    ) -> Iterator[MemberEntry]:
        """The files of an archive (tar, tgz, tar.zst, zip) in order of their names, asked for as they are
        taken: name, size, ETag, and where it lies plain in the object, its offset there. Raises
        NotFoundError, ServerError UnprocessableSource for an archive that cannot be read."""
        while True:
            page = self.member_page(bucket, key, prefix, start_after=start_after)
            yield from page.entries
            if page.next_after is None:
                return
            start_after = page.next_after

    def member_page(
        self, bucket: str, key: str, prefix: str = "", *, start_after: str = "", page: int = 10_000
    ) -> MemberListing:
        """One page of them, with the archive's kind and its number of files."""
        from meshwire.s3 import listings

        query = query_string(members="", max_keys=page, prefix=prefix, start_after=start_after)
        request = Request("GET", object_path(bucket, key), query)
        try:
            return parsed(listings.parse_list_members, self.transport.text(request))
        except NotFoundError as error:
            raise missing(bucket, key) from error

    # --- objects ----------------------------------------------------------------------------------

    def head(self, bucket: str, key: str) -> ObjectInfo:
        """Size, ETag, type and metadata of an object, without its bytes; raises NotFoundError."""
        request = Request("HEAD", object_path(bucket, key))
        try:
            return self.transport.call(request, lambda response: read_info(response, response_size(response)))
        except NotFoundError as error:
            raise missing(bucket, key) from error

    def get(
        self,
        bucket: str,
        key: str,
        *,
        offset: int = 0,
        length: int | None = None,
        etag: str | None = None,
        member: str | None = None,
    ) -> bytes:
        """The bytes from `offset`, `length` of them or to the end; of an archive's `member`, if given. With
        `etag`, PreconditionError if it changed. Raises NotFoundError. For what does not fit in memory there
        are `transfers.download` and `stream`.
        """
        if length == 0:
            return b""
        request = get_request(bucket, key, offset, length, etag)
        if member is not None:
            request = replace(request, query=query_string(member=member))
        try:
            return self.transport.call(request, lambda response: response.read(1 << 40))
        except NotFoundError as error:
            raise explained(error, bucket, key) from error

    def put(
        self,
        bucket: str,
        key: str,
        data: Buffer,
        *,
        metadata: Mapping[str, str] | None = None,
        content_type: str | None = None,
        if_absent: bool = False,
        etag: str | None = None,
    ) -> str:
        """Stores `data`; durable when it returns. Gives the ETag. With `if_absent`, PreconditionError if it
        exists; with `etag`, unless it still has that. The store verifies a crc64nvme of the bytes. For large
        files there is `transfers.upload`.
        """
        _check_bytes(data)
        headers = object_headers(metadata, content_type) | {"x-amz-checksum-crc64nvme": crc64(data)}
        headers |= write_conditions(etag, if_absent=if_absent)
        request = Request("PUT", object_path(bucket, key), "", headers, data, None)
        return self.transport.call(request, read_etag)

    def copy(
        self,
        bucket: str,
        key: str,
        to_bucket: str,
        to_key: str,
        *,
        metadata: Mapping[str, str] | None = None,
        content_type: str | None = None,
        etag: str | None = None,
    ) -> str:
        """Copies within the store; gives the ETag of the copy. Metadata is the source's, unless `metadata` is
        given. With `etag`, PreconditionError unless the source still has it.
        """
        headers = {"x-amz-copy-source": object_path(bucket, key)}
        if metadata is not None:
            headers |= object_headers(metadata, content_type) | {"x-amz-metadata-directive": "REPLACE"}
        if etag is not None:
            headers["x-amz-copy-source-if-match"] = f'"{etag}"'
        request = Request("PUT", object_path(to_bucket, to_key), "", headers)
        try:
            return self.transport.call(request, _read_copied)
        except NotFoundError as error:
            raise explained(error, bucket, key) from error

    def delete(self, bucket: str, key: str) -> None:
        """Succeeds whether or not the key was there, as S3 does."""
        self.transport.text(Request("DELETE", object_path(bucket, key)))

    def delete_many(self, bucket: str, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """Deletes in requests of 1000 keys; gives what could not be deleted, with key, code and message."""
        remaining = iter(keys)
        failures: tuple[DeleteFailure, ...] = ()
        while batch := tuple(islice(remaining, _PAGE)):
            failures += self._delete_batch(bucket, batch)
        return failures

    def _delete_batch(self, bucket: str, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        from meshwire.s3 import xml_documents
        from meshwire.s3.xml_io import escape_xml

        entries = "".join(f"<Object><Key>{escape_xml(key)}</Key></Object>" for key in keys)
        body = f"<Delete><Quiet>true</Quiet>{entries}</Delete>".encode()
        headers = {"x-amz-checksum-crc64nvme": crc64(body), "content-type": "application/xml"}
        request = Request(
            "POST", object_path(bucket), "delete=", headers, body, hashlib.sha256(body).hexdigest()
        )
        return parsed(xml_documents.parse_delete_result, self.transport.text(request)).failures

    # --- many at once -----------------------------------------------------------------------------

    def gather(
        self, items: Iterable[Item], *, credit: int = gather.CREDIT, verify: bool = True
    ) -> Generator[Gathered, None, None]:
        """Objects, members of archives and byte ranges of either, from any buckets: one answer an item, in
        their order, over a few requests. An item that fails has its `error`; the others still come.

        At most `credit` bytes of items come in one frame, and one frame is held here at a time (of a mesh:
        one a node, and the credit is theirs together); an item that is larger is an error (TooLarge). With
        `verify` each item's crc32c is checked. `items` is taken as answers are, a frame ahead.
        """
        return gather.gather(self.transport, items, credit, verify=verify)

    # --- the rest ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes idle connections; the client stays usable."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.settings.endpoint}, {self.settings.access_key})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.settings,)


# --- pieces shared with transfers -----------------------------------------------------------------


def get_request(bucket: str, key: str, offset: int, length: int | None, etag: str | None) -> Request:
    """A GET of `length` bytes from `offset` (None: to the end), of the version `etag` if given."""
    headers = {}
    if offset or length is not None:
        last = "" if length is None else str(offset + length - 1)
        headers["range"] = f"bytes={offset}-{last}"
    if etag is not None:
        headers["if-match"] = conditional_requests.quote_etag(etag)
    return Request("GET", object_path(bucket, key), "", headers)


def _check_bytes(data: Any) -> None:
    try:
        memoryview(data)
    except TypeError as error:
        raise ConfigurationError(
            f"put stores bytes; got {type(data).__name__}: a text as text.encode(), a file with "
            "meshsdk.transfers.upload(client, path, bucket, key)"
        ) from error


def object_headers(metadata: Mapping[str, str] | None, content_type: str | None) -> dict[str, str]:
    """Headers that describe an object to be stored; raises ConfigurationError for text they cannot carry."""
    headers = {f"x-amz-meta-{name.lower()}": value for name, value in (metadata or {}).items()}
    if content_type is not None:
        headers["content-type"] = content_type
    for name, value in headers.items():
        if not (name + value).isprintable():
            raise ConfigurationError(f"{name!r}: metadata is one line of printable text")
    return headers


def write_conditions(etag: str | None, *, if_absent: bool) -> dict[str, str]:
    """Headers of a write that is to be the first, or to replace the version of an ETag."""
    found = {"if-none-match": "*"} if if_absent else {}
    return found if etag is None else found | {"if-match": f'"{etag}"'}


def read_etag(response: Response) -> str:
    """The ETag of a stored object or part."""
    response.read()
    return conditional_requests.unquote_etag(response.headers.get("etag", ""))


def _read_copied(response: Response) -> str:
    """The ETag of a copy; the answer may tell of a failure after a good status."""
    from meshwire.s3 import xml_documents

    return parsed(xml_documents.parse_copy_result, response.read()).etag


def response_size(response: Response) -> int:
    """The size a HEAD declares."""
    text = response.headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdigit() else 0


def read_info(response: Response, size: int) -> ObjectInfo:
    """What the headers of a HEAD or GET say of an object."""
    headers = response.headers
    modified = dates.parse_http(headers.get("last-modified", "")) or 0
    metadata = {
        name.removeprefix("x-amz-meta-"): value
        for name, value in headers.items()
        if name.startswith("x-amz-meta-")
    }
    etag = conditional_requests.unquote_etag(headers.get("etag", ""))
    return ObjectInfo(size, etag, modified * 1000, headers.get("content-type", ""), metadata, headers)


def missing(bucket: str, key: str) -> NotFoundError:
    """The error for an object that is not there."""
    folder = key[: key.rfind("/") + 1]
    return NotFoundError(
        f"no object s3://{bucket}/{key}; see what is there with `mesh ls s3://{bucket}/{folder}`",
        status=404,
        code="NoSuchKey",
    )


def explained(error: NotFoundError, bucket: str, key: str) -> NotFoundError:
    """The 404 of a GET, with the key and what to do."""
    return error if error.code == "NoSuchBucket" else missing(bucket, key)


def connect(
    endpoint: str | None = None,
    *,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    region: str | None = None,
    timeout: float = 60.0,
    deadline: float = 60.0,
    ca_cert: str | None = None,
) -> Client:
    """A client of a store. No request is made here. Raises ConfigurationError naming what is missing.

    Arguments:
        endpoint: "http://HOST:PORT", several of one mesh with commas; MESH_ENDPOINT (or AWS_ENDPOINT_URL_S3,
            AWS_ENDPOINT_URL) if left out.
        access_key, secret_key, session_token: those of MESH_CREDENTIALS_FILE (read again when it changes) if
            left out, else AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN.
        region: AWS_REGION if left out.
        timeout: seconds of silence that end one attempt.
        deadline: seconds for which an unavailable server is asked again.
        ca_cert: a PEM file of the authorities to believe over https; MESH_CA_BUNDLE or AWS_CA_BUNDLE if left
            out, else the system's.
    """
    settings = load_settings(
        endpoint=endpoint,
        access_key=access_key,
        secret_key=secret_key,
        session_token=session_token,
        region=region,
        timeout=timeout,
        deadline=deadline,
        ca_cert=ca_cert,
    )
    return Client(settings)
