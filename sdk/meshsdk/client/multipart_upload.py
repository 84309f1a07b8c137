"""Multipart uploads: the requests that begin one, store or copy its parts, complete it, or abort it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshsdk.client.error_responses import parsed
from meshsdk.client.object_info import read_copied, read_etag
from meshsdk.client.request import Request, crc64, object_path, query_string
from meshwire.http_values import conditional_requests
from meshwire.s3 import xml_documents

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from meshsdk.client.transport import Transport

Part = tuple[int, str, str]
"""A stored part: its number, ETag and CRC64NVME."""


def create_upload(transport: Transport, bucket: str, key: str, headers: Mapping[str, str]) -> str:
    """Begin an upload whose parts and object have CRC64NVME checksums, and return its id."""
    checked = {**headers, "x-amz-checksum-algorithm": "CRC64NVME", "x-amz-checksum-type": "FULL_OBJECT"}
    request = Request("POST", object_path(bucket, key), "uploads=", checked)
    return parsed(xml_documents.parse_create_upload_result, transport.text(request)).upload_id


def send_part(transport: Transport, bucket: str, key: str, upload_id: str, number: int, data: bytes) -> Part:
    """Store a part."""
    checksum = crc64(data)
    query = query_string(partNumber=number, uploadId=upload_id)
    sums = {"x-amz-checksum-crc64nvme": checksum}
    request = Request("PUT", object_path(bucket, key), query, sums, data, None)
    return number, transport.call(request, read_etag), checksum


def copy_part(
    transport: Transport, bucket: str, key: str, upload_id: str, number: int, headers: Mapping[str, str]
) -> Part:
    """Copy a part from the range of an object that the `headers` name."""
    query = query_string(partNumber=number, uploadId=upload_id)
    made = transport.call(Request("PUT", object_path(bucket, key), query, headers), read_copied)
    return number, made.etag, made.checksums["crc64nvme"]


def complete_upload(
    transport: Transport,
    bucket: str,
    key: str,
    upload_id: str,
    stored: Iterable[Part],
    conditions: Mapping[str, str],
) -> str:
    """Make the object of all parts, if the present one meets the `conditions`, and return its ETag."""
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{conditional_requests.quote_etag(etag)}</ETag>"
        f"<ChecksumCRC64NVME>{checksum}</ChecksumCRC64NVME></Part>"
        for number, etag, checksum in sorted(stored)
    )
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    query, kind = query_string(uploadId=upload_id), {"content-type": "application/xml"}
    request = Request("POST", object_path(bucket, key), query, {**kind, **conditions}, body, None)
    return transport.call(
        request, lambda response: parsed(xml_documents.parse_complete_result, response.read()).etag
    )


def abort_upload(transport: Transport, bucket: str, key: str, upload_id: str) -> None:
    """Abort an upload and free its parts."""
    transport.text(Request("DELETE", object_path(bucket, key), query_string(uploadId=upload_id)))
