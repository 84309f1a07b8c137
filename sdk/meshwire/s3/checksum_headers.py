"""Headers of an S3 request that declare checksums of its body, or choose those of the object.

Law: digests are checked only for form here; `BodyVerifier` compares them with the body.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from meshwire.checksums.body_checksums import ALGORITHMS, BodyDigests, decode_checksum
from meshwire.errors import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping


_PREFIX = "x-amz-checksum-"
_NOT_VALUES = frozenset({"mode", "type", "algorithm"})
_PARTS_SUFFIX = re.compile(r"-\d{1,5}\Z", re.A)
# Types for multipart uploads; an object put at once always has the type FULL_OBJECT.
_TYPES = dict.fromkeys(ALGORITHMS, ("COMPOSITE",)) | {
    "crc32": ("COMPOSITE", "FULL_OBJECT"),
    "crc32c": ("COMPOSITE", "FULL_OBJECT"),
    "crc64nvme": ("FULL_OBJECT",),
}


def read_digests(headers: Mapping[str, str], *, composite: bool = False) -> BodyDigests:
    """Parse the declared digests. `composite` allows the `-N` suffix of a multipart checksum.

    Raises S3Error: InvalidDigest, InvalidRequest, NotImplemented (an unsupported algorithm of S3).
    """
    checksums = {
        name[len(_PREFIX) :]: value.strip()
        for name, value in headers.items()
        if name.startswith(_PREFIX) and is_checksum_value_header(name)
    }
    trailer = _trailer(headers.get("x-amz-trailer"))
    if len(checksums) + len(trailer) > 1:
        raise S3Error(
            "InvalidRequest",
            "Expecting a single x-amz-checksum- header. Multiple checksum Types are not allowed.",
        )
    for algorithm, value in checksums.items():
        _check_value(algorithm, value, composite=composite)
    return BodyDigests(
        _content_md5(headers), checksums, trailer, _wanted_algorithms(headers, (*checksums, *trailer))
    )


def is_checksum_value_header(name: str) -> bool:
    """Whether a header (lower-case) carries a checksum value, such as `x-amz-checksum-crc32`."""
    return name.startswith(_PREFIX) and name[len(_PREFIX) :] not in _NOT_VALUES


def _check_value(algorithm: str, value: str, *, composite: bool) -> None:
    if algorithm not in ALGORITHMS:
        raise S3Error("NotImplemented", f"The checksum algorithm {algorithm[:32]!r} is not implemented.")
    if decode_checksum(algorithm, _PARTS_SUFFIX.sub("", value) if composite else value) is None:
        raise S3Error("InvalidRequest", f"Value for {_PREFIX}{algorithm} header is invalid.")


def _content_md5(headers: Mapping[str, str]) -> str | None:
    value = headers.get("content-md5")
    if value is not None and decode_checksum("md5", value.strip()) is None:
        raise S3Error("InvalidDigest", "The Content-MD5 you specified is not valid.")
    return None if value is None else value.strip()


def _trailer(header: str | None) -> tuple[str, ...]:
    if header is None:
        return ()
    names = tuple(name.strip().lower() for name in header.split(",") if name.strip())
    for name in names:
        if not name.startswith(_PREFIX) or name[len(_PREFIX) :] not in ALGORITHMS:
            raise S3Error(
                "InvalidRequest", "The value specified in the x-amz-trailer header is not supported"
            )
    return tuple(name[len(_PREFIX) :] for name in names)


def _wanted_algorithms(headers: Mapping[str, str], given: tuple[str, ...]) -> tuple[str, ...]:
    value = headers.get("x-amz-sdk-checksum-algorithm")
    if value is None:
        return ()
    algorithm = _known(value)
    if given and algorithm not in given:
        raise S3Error("InvalidRequest", "Value for x-amz-sdk-checksum-algorithm header is invalid.")
    return () if given else (algorithm,)


def read_checksum_algorithm(headers: Mapping[str, str]) -> str | None:
    """Return the lower-case algorithm of x-amz-checksum-algorithm."""
    value = headers.get("x-amz-checksum-algorithm")
    return None if value is None else _known(value)


def read_checksum_type(headers: Mapping[str, str], algorithm: str | None) -> str | None:
    """Return x-amz-checksum-type in upper case, checked against the algorithm if one is given."""
    given = headers.get("x-amz-checksum-type")
    if given is None:
        return None
    value = given.strip().upper()
    if value not in {"COMPOSITE", "FULL_OBJECT"}:
        raise S3Error("InvalidRequest", "Value for x-amz-checksum-type header is invalid.")
    if algorithm is not None and value not in _TYPES[algorithm]:
        raise S3Error(
            "InvalidRequest",
            f"The {value} checksum type cannot be used with the {algorithm} checksum algorithm.",
        )
    return value


def _known(value: str) -> str:
    algorithm = value.strip().lower()
    if algorithm not in ALGORITHMS:
        raise S3Error(
            "InvalidRequest",
            "Checksum algorithm provided is unsupported. Please try again with any of the valid types: "
            f"[{', '.join(name.upper() for name in ALGORITHMS)}]",
        )
    return algorithm
