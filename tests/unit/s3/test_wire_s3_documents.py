"""XML from strangers: what is read, and what is refused."""

from __future__ import annotations

import pytest

from meshwire.errors import S3Error
from meshwire.s3.xml_documents import (
    MAX_REQUEST_BYTES,
    CompletedPart,
    parse_complete,
    parse_complete_result,
    parse_copy_result,
    parse_create_bucket,
    parse_delete,
    parse_error,
)

XMLNS = b'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
BOMB = (
    b'<!DOCTYPE Delete [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    b"<Delete><Object><Key>&b;</Key></Object></Delete>"
)
EXTERNAL = b'<!DOCTYPE Delete SYSTEM "file:///etc/passwd"><Delete><Object><Key>k</Key></Object></Delete>'


def objects(count: int) -> bytes:
    return b"<Delete>" + b"<Object><Key>k</Key></Object>" * count + b"</Delete>"


def parts(*numbers: int) -> bytes:
    inner = "".join(
        f"<Part><PartNumber>{n}</PartNumber><ETag>&quot;e{n}&quot;</ETag></Part>" for n in numbers
    )
    return f"<CompleteMultipartUpload>{inner}</CompleteMultipartUpload>".encode()


def test_delete_as_clients_write_it() -> None:
    body = (
        b'<?xml version="1.0" encoding="UTF-8"?>\n<Delete '
        + XMLNS
        + b"><Object><Key>a &amp; \xc3\xa9</Key></Object>\n<Object><VersionId>null</VersionId><Key> b+ </Key>"
        b"<ETag>&quot;x&quot;</ETag></Object><Quiet>true</Quiet></Delete>"
    )
    request = parse_delete(body)
    assert request.keys == (("a & é", None, None), (" b+ ", "null", "x"))
    assert request.quiet


def test_delete_with_prefixed_names() -> None:
    body = b'<s:Delete xmlns:s="urn:x"><s:Object><s:Key>k</s:Key></s:Object></s:Delete>'
    assert parse_delete(body).keys[0].key == "k"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "MalformedXML"),
        (b"<Delete>", "MalformedXML"),
        (b"<Delete></Delete>", "MalformedXML"),
        (b"<Other><Object><Key>k</Key></Object></Other>", "MalformedXML"),
        (b"<Delete><Object></Object></Delete>", "MalformedXML"),
        (b"<Delete><Object><Key>\xff</Key></Object></Delete>", "MalformedXML"),
        (b"<Delete><Object><Key>&#x1;</Key></Object></Delete>", "MalformedXML"),
        (b"<Delete><?php x ?><Object><Key>k</Key></Object></Delete>", "MalformedXML"),
        (BOMB, "MalformedXML"),
        (EXTERNAL, "MalformedXML"),
        (objects(1001), "MalformedXML"),
        (b"<Delete>" * 100 + b"</Delete>" * 100, "MalformedXML"),
        (b"<Delete>" + b"<a/>" * 70_000 + b"</Delete>", "MalformedXML"),
        (b"<Delete>" + b" " * MAX_REQUEST_BYTES + b"</Delete>", "MaxMessageLengthExceeded"),
        (b"<Delete><Object><Key>" + b"k" * 1025 + b"</Key></Object></Delete>", "KeyTooLongError"),
        (b"<Delete><Object><Key>k</Key><Size>7</Size></Object></Delete>", "NotImplemented"),
    ],
)
def test_refused_deletes(body: bytes, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        parse_delete(body)
    assert caught.value.code == code


def test_a_thousand_keys_are_fine() -> None:
    assert len(parse_delete(objects(1000)).keys) == 1000


def test_completion() -> None:
    assert parse_complete(parts(1, 3)) == (CompletedPart(1, "e1"), CompletedPart(3, "e3"))
    assert len(parse_complete(parts(*range(1, 10_001)))) == 10_000


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (parts(), "MalformedXML"),
        (parts(2, 1), "InvalidPartOrder"),
        (parts(1, 1), "InvalidPartOrder"),
        (parts(0), "InvalidArgument"),
        (parts(10_001), "InvalidArgument"),
        (parts(1).replace(b">1<", b">one<"), "MalformedXML"),
        (parts(1).replace(b"&quot;e1&quot;", b""), "MalformedXML"),
        (parts(1).replace(b"</Part>", b"<ChecksumSHA1>AAAA</ChecksumSHA1></Part>"), "InvalidRequest"),
    ],
)
def test_refused_completions(body: bytes, code: str) -> None:
    with pytest.raises(S3Error) as caught:
        parse_complete(body)
    assert caught.value.code == code


def test_location_constraint() -> None:
    inner = b"<LocationConstraint>eu-west-1</LocationConstraint>"
    body = b"<CreateBucketConfiguration %s>" + inner + b"</CreateBucketConfiguration>"
    assert parse_create_bucket(body % XMLNS) == ("eu-west-1", {})
    assert parse_create_bucket(b"") == ("", {})
    with pytest.raises(S3Error, match="InvalidLocationConstraint"):
        parse_create_bucket(body.replace(b"eu-west-1", b"a&lt;b") % XMLNS)


def test_unknown_errors_keep_their_name() -> None:
    error = parse_error(b"<Error><Code>Strange</Code><Message>m</Message><RequestId>r</RequestId></Error>")
    assert (error.code, error.message, error.extra["RequestId"]) == ("InternalError", "Strange: m", "r")


@pytest.mark.parametrize("parse", [parse_complete_result, parse_copy_result])
def test_an_error_in_a_200_is_raised(parse: object) -> None:
    assert callable(parse)
    with pytest.raises(S3Error, match="SlowDown"):
        parse(b'<?xml version="1.0"?>\n<Error><Code>SlowDown</Code><Message>later</Message></Error>')
