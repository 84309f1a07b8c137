"""Lifecycle configurations and what they do, through boto3."""

from __future__ import annotations

from typing import Any

from tests.component.test_s3_settings import refusal

RULES: list[dict[str, Any]] = [
    {"ID": "old", "Prefix": "tmp/", "Status": "Enabled", "Expiration": {"Days": 1}},
    {"ID": "new", "Filter": {"Prefix": "logs/"}, "Status": "Disabled", "Expiration": {"Days": 30}},
    {
        "ID": "both",
        "Filter": {
            "And": {
                "Prefix": "p",
                "Tags": [{"Key": "keep", "Value": "no"}],
                "ObjectSizeGreaterThan": 1,
                "ObjectSizeLessThan": 1000,
            }
        },
        "Status": "Enabled",
        "NoncurrentVersionExpiration": {"NoncurrentDays": 3, "NewerNoncurrentVersions": 2},
    },
    {
        "ID": "uploads",
        "Filter": {},
        "Status": "Enabled",
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
        "Expiration": {"ExpiredObjectDeleteMarker": True},
    },
]


def test_a_configuration_reads_back(s3: Any, bucket: str) -> None:
    missing = (404, "NoSuchLifecycleConfiguration")
    assert refusal(lambda: s3.get_bucket_lifecycle_configuration(Bucket=bucket)) == missing
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": RULES})
    assert s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == RULES
    s3.delete_bucket_lifecycle(Bucket=bucket)
    assert refusal(lambda: s3.get_bucket_lifecycle_configuration(Bucket=bucket)) == missing


def test_a_bad_configuration_changes_nothing(s3: Any, bucket: str) -> None:
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": RULES})
    moves = {
        "ID": "m",
        "Filter": {},
        "Status": "Enabled",
        "Transitions": [{"Days": 1, "StorageClass": "GLACIER"}],
    }
    bad = {"Rules": [moves]}
    put = refusal(lambda: s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=bad))
    assert put == (501, "NotImplemented")
    assert s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == RULES
