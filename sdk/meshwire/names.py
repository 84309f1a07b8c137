"""Names of buckets and keys.

Law: this module is the only place that checks names; a name that passes may be stored, sorted and written
into XML.
Invariant: keys are ordered and measured by their UTF-8 bytes.
"""

from __future__ import annotations

import re
from functools import lru_cache

MAX_KEY_BYTES = 1024

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_IP_ADDRESS = re.compile(r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\Z")
_RESERVED_PREFIXES = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_SUFFIXES = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")


class NameProblemError(ValueError):
    """A name that cannot be used; the message says why."""


class BucketNameError(NameProblemError):
    """An invalid bucket name."""


class KeyNameError(NameProblemError):
    """An invalid object key."""


class KeyTooLongError(KeyNameError):
    """A key of more than 1,024 bytes of UTF-8. `size` is in bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(f"the key has {size} bytes of UTF-8; at most {MAX_KEY_BYTES} are allowed")
        self.size = size


@lru_cache(maxsize=4096)
def check_bucket_name(name: str) -> None:
    """Raise BucketNameError unless `name` follows S3's rules: 3–63 of a–z, 0–9, hyphen and dot."""
    if _BUCKET.match(name) is None:
        raise BucketNameError(
            "a bucket name has 3 to 63 characters of a-z, 0-9, '-' and '.', and begins and ends "
            "with a letter or digit"
        )
    if ".." in name or ".-" in name or "-." in name:
        raise BucketNameError("a bucket name cannot have a dot next to another dot or a hyphen")
    if _IP_ADDRESS.match(name):
        raise BucketNameError("a bucket name cannot have the form of an IP address")
    if name.startswith(_RESERVED_PREFIXES) or name.endswith(_RESERVED_SUFFIXES):
        raise BucketNameError("this prefix or suffix is reserved by S3")


def check_key(key: str) -> None:
    """Raise KeyNameError unless `key` is 1–1,024 bytes of valid UTF-8 without NUL.

    S3 accepts any other character. NUL is rejected because neither an XML document nor a tar member can
    name such an object.
    """
    if not key:
        raise KeyNameError("the key is empty; a key needs at least one character")
    try:
        size = len(key) if key.isascii() else len(key.encode())
    except UnicodeEncodeError:
        raise KeyNameError("a key must be valid UTF-8") from None
    if size > MAX_KEY_BYTES:
        raise KeyTooLongError(size)
    if "\0" in key:
        raise KeyNameError("a key cannot contain a NUL character")
