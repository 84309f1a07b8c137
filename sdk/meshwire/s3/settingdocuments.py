"""The documents of a bucket's settings, both ways: versioning, and what is never set here.

Law: bytes and values only; what a document may leave out stays left out. Invariant: any bytes give a value or
an S3Error, and what is written reads back the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from meshwire.s3 import listings
from meshwire.s3.elements import optional, read, tag
from meshwire.s3.errors import S3Error

if TYPE_CHECKING:
    from meshwire.s3.elements import Element
    from meshwire.s3.settings import BucketSetting, Versioning

MAX_SETTING_BYTES = 1 << 20


def read_setting(body: bytes, root: str) -> Element:
    """The root of a setting's document. Raises S3Error: MissingRequestBodyError, MalformedXML."""
    if not body.strip():
        raise S3Error("MissingRequestBodyError")
    return read(body, root=root, max_bytes=MAX_SETTING_BYTES)


# --- versioning -----------------------------------------------------------------------------------------


def parse_versioning(body: bytes) -> Versioning:
    """Raises S3Error: MalformedXML, IllegalVersioningConfigurationException, NotImplemented (MFA delete)."""
    root = read_setting(body, "VersioningConfiguration")
    if root.get("MfaDelete", "Disabled").strip() != "Disabled":
        raise S3Error("NotImplemented", "MFA delete is not implemented.")
    status = root.get("Status").strip()
    if not status:
        raise S3Error("IllegalVersioningConfigurationException")
    if status not in {"Enabled", "Suspended"}:
        raise S3Error("MalformedXML", "The Status of a VersioningConfiguration is Enabled or Suspended.")
    return cast("Versioning", status)


def versioning(status: Versioning) -> bytes:
    """Without a status while versioning was never enabled."""
    return listings.root("VersioningConfiguration", optional("Status", status)).encode()


# --- what this server never sets ----------------------------------------------------------------------------

_EMPTY: dict[str, bytes] = {
    "accelerate": listings.root("AccelerateConfiguration").encode(),
    "logging": listings.root("BucketLoggingStatus").encode(),
    "notification": listings.root("NotificationConfiguration").encode(),
    "requestPayment": listings.root("RequestPaymentConfiguration", tag("Payer", "BucketOwner")).encode(),
}
_ABSENT = {
    "encryption": "ServerSideEncryptionConfigurationNotFoundError",
    "object-lock": "ObjectLockConfigurationNotFoundError",
    "replication": "ReplicationConfigurationNotFoundError",
    "website": "NoSuchWebsiteConfiguration",
}


def never_set(setting: BucketSetting) -> bytes:
    """What S3 says of a bucket on which this was never set: an empty document, or the error raised here."""
    if setting in _ABSENT:
        raise S3Error(_ABSENT[setting])
    return _EMPTY[setting]
