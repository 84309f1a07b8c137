"""The S3 client, and `connect`, which creates one from arguments and the environment.

Law: each method sends one request; `transfers` builds large transfers from several. Writes carry a
crc64nvme checksum; a read must have the length that the server announced and, if it is of a whole object,
the checksum. Thread-safe; pickles without its sockets.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from meshsdk.client import gather
from meshsdk.client.conditional_put import put_if
from meshsdk.client.error_responses import explained, explained_range, missing, parsed
from meshsdk.client.object_info import ObjectInfo, read_copied, read_etag, read_head
from meshsdk.client.request import (
    Request,
    crc64,
    get_request,
    object_headers,
    object_path,
    query_string,
    write_conditions,
)
from meshsdk.client.settings import load_settings
from meshsdk.client.transport import Transport
from meshsdk.client.verified_reads import VERIFIED_BYTES, declared, with_checksum
from meshsdk.errors import ConfigurationError, NotFoundError, ServerError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from meshsdk.client.gather import Gathered, Item
    from meshsdk.client.http_connection import Buffer, Response
    from meshsdk.client.settings import Settings
    from meshsdk.client.verified_reads import ObjectChecksum
    from meshwire.s3.result_types import (
        BucketEntry,
        DeleteFailure,
        MemberEntry,
        MemberListing,
        ObjectEntry,
        ObjectListing,
    )

__all__ = ["Client", "ObjectInfo", "connect"]

_PAGE = 1000


class Client:
    """S3 operations on a store; create one with `mesh.connect`. Keys and bucket names are plain text.

    Each call is one request (a list: one per page). While the server is unavailable it is retried with
    jittered waits for `deadline` seconds; then the call raises DeadlineError. Every call may raise
    AccessError (403), NotFoundError (404), ServerError, and ConfigurationError for an invalid bucket name or
    key. Thread-safe; pickles without its sockets; a forked child opens its own connections.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.transport = Transport(settings)

    # --- buckets ----------------------------------------------------------------------------------

    def buckets(self) -> tuple[BucketEntry, ...]:
        """Return all buckets of the caller, each with its name and creation time."""
        from meshwire.s3 import xml_documents  # the XML parsers load with the first response that needs them

        found: tuple[BucketEntry, ...] = ()
        token: str | None = ""
        while token is not None:
            query = query_string(continuation_token=token) if token else ""
            page = parsed(xml_documents.parse_list_buckets, self.transport.text(Request("GET", "/", query)))
            found += page.buckets
            token = page.next_after
        return found

    def create_bucket(self, bucket: str) -> None:
        """Create a bucket; succeeds if the caller already owns it.

        Raises ServerError (BucketAlreadyExists) if another user owns a bucket of this name.
        """
        self.transport.text(Request("PUT", object_path(bucket)))

    def delete_bucket(self, bucket: str) -> None:
        """Delete an empty bucket. Raises ServerError (BucketNotEmpty) if it has objects."""
        self.transport.text(Request("DELETE", object_path(bucket)))

    def has_bucket(self, bucket: str) -> bool:
        """Return whether the bucket exists. Raises AccessError if it exists but belongs to another user."""
        try:
            self.transport.text(Request("HEAD", object_path(bucket)))
        except NotFoundError:
            return False
        return True

    # --- listing ----------------------------------------------------------------------------------

    def pages(
        self, bucket: str, prefix: str = "", *, delimiter: str = "", start_after: str = "", page: int = _PAGE
    ) -> Iterator[ObjectListing]:
        """Iterate over pages of at most `page` keys that begin with `prefix`, in order of their UTF-8 bytes.

        A page is requested when the iterator reaches it. With a `delimiter`, keys that share the text up to
        the first delimiter after `prefix` are grouped as one common prefix. `start_after` skips the keys up
        to and including it.
        """
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
        """Iterate over the objects whose key begins with `prefix` and sorts after `start_after`.

        Each entry has key, size, ETag and modification time. One request per page of 1000.

        Example:
            total = sum(entry.size for entry in client.list("photos", "train/"))
        """
        for listing in self.pages(bucket, prefix, start_after=start_after):
            yield from listing.entries

    def members(
        self, bucket: str, key: str, prefix: str = "", *, start_after: str = ""
    ) -> Iterator[MemberEntry]:
        """Iterate over the files of an archive (tar, tgz, tar.zst, zip) in order of their names.

        Each entry has name, size and ETag, and the offset in the object if the member is stored uncompressed.
        Pages are requested as the iterator reaches them. Raises NotFoundError, and ServerError
        (UnprocessableSource) for an archive that cannot be read.
        """
        while True:
            page = self.member_page(bucket, key, prefix, start_after=start_after)
            yield from page.entries
            if page.next_after is None:
                return
            start_after = page.next_after

    def member_page(
        self, bucket: str, key: str, prefix: str = "", *, start_after: str = "", page: int = 10_000
    ) -> MemberListing:
        """Return one page of an archive's members, with the archive's kind and its number of files.

        Raises the errors of `members`.
        """
        from meshwire.s3 import listings

        query = query_string(members="", max_keys=page, prefix=prefix, start_after=start_after)
        request = Request("GET", object_path(bucket, key), query)
        try:
            return parsed(listings.parse_list_members, self.transport.text(request))
        except NotFoundError as error:
            raise missing(bucket, key) from error

    # --- objects ----------------------------------------------------------------------------------

    def head(self, bucket: str, key: str) -> ObjectInfo:
        """Return size, ETag, type and metadata of an object, without its bytes. Raises NotFoundError."""
        request = Request("HEAD", object_path(bucket, key))
        try:
            return self.transport.call(request, read_head)
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
        """Return the bytes of an object, or of a `member` of an archive.

        `offset` and `length` (in bytes; None: to the end) select a range. Raises NotFoundError, and with
        `etag` PreconditionError if the object has another ETag; and ServerError if the bytes of a whole
        object do not match its checksum. For objects that do not fit in memory, use `transfers.download` or
        `transfers.stream`.
        """
        if length == 0:
            return b""
        request = get_request(bucket, key, offset, length, etag)
        if member is not None:
            request = replace(request, query=query_string(member=member))
        elif offset == 0 and length is None:
            request = with_checksum(request)

        def read(response: Response) -> tuple[bytes, ObjectChecksum | None]:
            return response.read(1 << 40), declared(response.headers, bucket, key)

        try:
            data, checksum = self.transport.call(request, read)
        except NotFoundError as error:
            raise explained(error, bucket, key) from error
        except ServerError as error:
            raise explained_range(error, bucket, key, offset) from None
        if checksum is not None and len(data) > VERIFIED_BYTES:
            hasher = checksum.hasher()
            hasher.update(data)
            checksum.compare(hasher.base64())
        return data

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
        """Store `data` under a key and return the ETag; the object is durable when the call returns.

        The store verifies a crc64nvme of the bytes. Raises PreconditionError with `if_absent` if the object
        exists, and with `etag` if it no longer has that ETag; an object that this call has stored, although
        the answer was lost, is told by a token in its metadata (`mesh-write`). For large files, use
        `transfers.upload`.
        """
        _check_bytes(data)
        headers = object_headers(metadata, content_type) | {"x-amz-checksum-crc64nvme": crc64(data)}
        conditions = write_conditions(etag, if_absent=if_absent)
        request = Request("PUT", object_path(bucket, key), "", headers | conditions, data, None)
        return put_if(self.transport, request) if conditions else self.transport.call(request, read_etag)

    def put_many(self, bucket: str, objects: Iterable[tuple[str, Buffer]] | Mapping[str, Buffer]) -> int:
        """Store many objects, given as pairs of key and bytes or as a mapping, and return how many.

        Small ones travel together, up to 4,000 or 8 MiB in a request, which is many times faster than one
        request for each. They are durable when the call returns. The objects of a request are stored together
        or not at all, by each node that is the primary of some; after an error, objects of earlier requests
        are stored. Media types follow from the ends of the keys.
        """
        from meshsdk.client.put_many import put_many

        def put_one(key: str, data: Buffer, kind: str | None) -> None:
            self.put(bucket, key, data, content_type=kind)

        return put_many(self.transport, put_one, bucket, objects)

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
        """Copy an object within the store and return the ETag of the copy.

        The copy has the source's metadata unless `metadata` is given. Raises NotFoundError, and with `etag`
        PreconditionError if the source no longer has that ETag.
        """
        headers = {"x-amz-copy-source": object_path(bucket, key)}
        if metadata is not None:
            headers |= object_headers(metadata, content_type) | {"x-amz-metadata-directive": "REPLACE"}
        if etag is not None:
            headers["x-amz-copy-source-if-match"] = f'"{etag}"'
        request = Request("PUT", object_path(to_bucket, to_key), "", headers)
        try:
            return self.transport.call(request, read_copied).etag
        except NotFoundError as error:
            raise explained(error, bucket, key) from error

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object; succeeds if there is none, as S3 does."""
        self.transport.text(Request("DELETE", object_path(bucket, key)))

    def delete_many(self, bucket: str, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """Delete objects in requests of 1000 keys.

        Returns the objects that could not be deleted, each with key, error code and message.
        """
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
        """Fetch many objects, archive members or byte ranges of either, from any buckets, in few requests.

        Yields one answer per item, in the order of the items. An item that fails has an `error`; the others
        are not affected.

        A frame has at most `credit` bytes of items, and one frame is in memory at a time (in a mesh: one per
        node, and the nodes share the credit). An item larger than the credit fails with TooLarge. With
        `verify`, each item's crc32c is checked. `items` is consumed one frame ahead of the answers.

        Example:
            for got in client.gather(mesh.Item("photos", key) for key in keys):
                print(got.item.key, len(got.data))
        """
        return gather.gather(self.transport, items, credit, verify=verify)

    # --- the rest ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Close idle connections; the client stays usable."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        identity = self.settings.web_identity
        who = self.settings.access_key if identity is None else identity.role_arn
        return f"Client({self.settings.endpoint}, {who})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.settings,)


def _check_bytes(data: Any) -> None:
    try:
        memoryview(data)
    except TypeError as error:
        raise ConfigurationError(
            f"put stores bytes, not {type(data).__name__}: encode text with text.encode(), and upload a file "
            "with meshsdk.transfers.upload(client, path, bucket, key)"
        ) from error


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
    """Create a client of a store; no request is sent yet.

    Arguments:
        endpoint: "http://HOST:PORT", or several endpoints of one mesh separated by commas. Default:
            MESH_ENDPOINT, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.
        access_key, secret_key, session_token: the credentials. Default: those in the file that
            MESH_CREDENTIALS_FILE names (re-read when it changes), else AWS_ACCESS_KEY_ID,
            AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, else those of the role AWS_ROLE_ARN, exchanged for
            the token in AWS_WEB_IDENTITY_TOKEN_FILE and renewed.
        region: the region to sign for. Default: AWS_REGION, AWS_DEFAULT_REGION, else "us-east-1".
        timeout: seconds of silence after which an attempt fails.
        deadline: seconds for which an unavailable server is retried.
        ca_cert: path of a PEM file with the certificate authorities to trust over https. Default:
            MESH_CA_BUNDLE, AWS_CA_BUNDLE, else those of the system.

    Raises:
        ConfigurationError: the endpoint or the keys are missing, or an argument is invalid.

    Example:
        client = mesh.connect("http://localhost:9000", access_key="…", secret_key="…")
        client.put("photos", "train/cat/1.jpg", data)
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
