"""Lifecycle configurations as S3 checks them."""

from __future__ import annotations

import pytest

from meshwire.errors import S3Error
from meshwire.s3.bucket_settings import LifecycleRule
from meshwire.s3.lifecycle_xml import lifecycle_document, parse_lifecycle

EXPIRE = "<Expiration><Days>3</Days></Expiration>"


def rule(
    inside: str = EXPIRE, *, where: str = "<Filter><Prefix>logs/</Prefix></Filter>", status: str = "Enabled"
) -> str:
    return f"<Rule>{where}<Status>{status}</Status>{inside}</Rule>"


def parse(*rules: str) -> tuple[LifecycleRule, ...]:
    return parse_lifecycle(f"<LifecycleConfiguration>{''.join(rules)}</LifecycleConfiguration>".encode())


def test_the_old_form_and_the_new() -> None:
    old, new, everything = parse(
        rule(where="<ID>a</ID><Prefix>logs/</Prefix>"),
        rule(where="<ID>b</ID><Filter><Prefix>logs/</Prefix></Filter>"),
        rule(where="<ID>c</ID><Filter/>", status="Disabled"),
    )
    assert (old.prefix, new.prefix, everything.prefix) == ("logs/", "logs/", "")
    assert (old.enabled, everything.enabled) == (True, False)
    text = lifecycle_document((old, new, everything)).decode()
    assert "<ID>a</ID><Prefix>logs/</Prefix>" in text
    assert "<ID>b</ID><Filter><Prefix>logs/</Prefix></Filter>" in text
    assert "<ID>c</ID><Filter></Filter>" in text


def test_every_condition_and_action() -> None:
    (found,) = parse(
        rule(
            EXPIRE + "<NoncurrentVersionExpiration><NoncurrentDays>5</NoncurrentDays>"
            "<NewerNoncurrentVersions>2</NewerNoncurrentVersions></NoncurrentVersionExpiration>",
            where="<ID>all</ID><Filter><And><Prefix>p</Prefix><Tag><Key>k</Key><Value>v</Value></Tag>"
            "<ObjectSizeGreaterThan>10</ObjectSizeGreaterThan><ObjectSizeLessThan>20</ObjectSizeLessThan>"
            "</And></Filter>",
        )
    )
    assert found == LifecycleRule(
        "all", True, "p", {"k": "v"}, 10, 20, 3, noncurrent_days=5, noncurrent_keep=2
    )


def test_uploads_markers_and_dates() -> None:
    uploads, markers, date = parse(
        rule(
            "<AbortIncompleteMultipartUpload><DaysAfterInitiation>7</DaysAfterInitiation>"
            "</AbortIncompleteMultipartUpload>"
        ),
        rule("<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>"),
        rule("<Expiration><Date>2030-01-01T00:00:00.000Z</Date></Expiration>"),
    )
    assert (uploads.abort_uploads_days, markers.expire_markers, date.expire_date) == (7, True, 1893456000)


def test_ids_are_made_up_the_same_each_time() -> None:
    first, second = parse(rule(), rule())
    assert first.id
    assert first.id != second.id
    assert parse(rule(), rule()) == (first, second)


MARKER = "<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>"
ABORT = (
    "<AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation>"
    "</AbortIncompleteMultipartUpload>"
)
TAG = "<Tag><Key>k</Key><Value>v</Value></Tag>"


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ([], "MalformedXML"),
        ([rule(where=f"<ID>{n}</ID><Prefix/>") for n in range(1001)], "MalformedXML"),
        ([rule(status="enabled")], "MalformedXML"),
        ([rule(where="")], "MalformedXML"),
        ([rule(where="<Prefix/><Filter/>")], "MalformedXML"),
        ([rule(where=f"<Filter><Prefix/>{TAG}</Filter>")], "MalformedXML"),
        ([rule(where=f"<Filter><And>{TAG}</And></Filter>")], "MalformedXML"),
        ([rule(where=f"<Filter><And>{TAG}{TAG}</And></Filter>")], "InvalidRequest"),
        ([rule(where="<Filter><Tag><Key>k</Key></Tag></Filter>")], "MalformedXML"),
        ([rule(where=f"<Filter>{TAG.replace('</Tag>', '<Scope>a</Scope></Tag>')}</Filter>")], "MalformedXML"),
        ([rule(where=f"<Filter><Prefix>{'p' * 1025}</Prefix></Filter>")], "InvalidRequest"),
        ([rule(where="<ID>a</ID><Prefix/>")] * 2, "InvalidArgument"),
        ([rule(where=f"<ID>{'a' * 256}</ID><Prefix/>")], "InvalidArgument"),
        ([rule(where="<Filter><prefix>a</prefix></Filter>")], "MalformedXML"),
        ([rule(where="<Filter><And><Prefix>a</Prefix><Suffix>b</Suffix></And></Filter>")], "MalformedXML"),
        ([rule(where="<Filter><And><Prefix>a</Prefix><Prefix>b</Prefix></And></Filter>")], "MalformedXML"),
        ([rule(EXPIRE + "<Only>on Sundays</Only>")], "MalformedXML"),
        ([rule(EXPIRE + EXPIRE)], "MalformedXML"),
        ([rule("")], "InvalidRequest"),
        ([rule("<Expiration/>")], "MalformedXML"),
        ([rule("<Expiration><Days>0</Days></Expiration>")], "InvalidArgument"),
        ([rule("<Expiration><Days>-3</Days></Expiration>")], "InvalidArgument"),
        ([rule("<Expiration><Days>three</Days></Expiration>")], "MalformedXML"),
        ([rule("<Expiration><Days>1</Days><Date>2030-01-01T00:00:00Z</Date></Expiration>")], "MalformedXML"),
        ([rule("<Expiration><Date>2030-01-01T00:00:01Z</Date></Expiration>")], "InvalidArgument"),
        ([rule("<Expiration><Date>tomorrow</Date></Expiration>")], "MalformedXML"),
        ([rule(MARKER, where=f"<Filter>{TAG}</Filter>")], "InvalidRequest"),
        ([rule(ABORT, where=f"<Filter>{TAG}</Filter>")], "InvalidRequest"),
        (
            [rule(ABORT, where="<Filter><ObjectSizeLessThan>5</ObjectSizeLessThan></Filter>")],
            "InvalidRequest",
        ),
        (
            [
                rule(
                    where="<Filter><And><ObjectSizeGreaterThan>5</ObjectSizeGreaterThan>"
                    "<ObjectSizeLessThan>5</ObjectSizeLessThan></And></Filter>"
                )
            ],
            "InvalidRequest",
        ),
        ([rule("<NoncurrentVersionExpiration/>")], "MalformedXML"),
        (
            [
                rule(
                    "<NoncurrentVersionExpiration><NoncurrentDays>1</NoncurrentDays>"
                    "<NewerNoncurrentVersions>101</NewerNoncurrentVersions></NoncurrentVersionExpiration>"
                )
            ],
            "InvalidArgument",
        ),
        ([rule(EXPIRE + "<Transition><Days>1</Days></Transition>")], "NotImplemented"),
        ([rule("<NoncurrentVersionTransition/>")], "NotImplemented"),
    ],
)
def test_refusals(rules: list[str], code: str) -> None:
    with pytest.raises(S3Error) as excinfo:
        parse(*rules)
    assert excinfo.value.code == code
