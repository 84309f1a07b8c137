"""The XML parser: the text of elements, and documents that it refuses for their size or shape."""

from __future__ import annotations

import pytest

from meshwire.errors import S3Error
from meshwire.s3.xml_io import MAX_DEPTH, MAX_ELEMENTS, parse_xml


def test_text_between_children_belongs_to_the_parent() -> None:
    parsed = parse_xml(b"<r>a<b>x</b>c&amp;<![CDATA[<d>]]><b/>e<b>y<i/>z</b></r>", root="r", max_bytes=1000)
    assert parsed.text == "ac&<d>e"
    assert [child.text for child in parsed.find_all("b")] == ["x", "", "yz"]


def test_prefixes_of_namespaces_are_dropped() -> None:
    parsed = parse_xml(b'<s:r xmlns:s="urn:x"><s:b>1</s:b></s:r>', root="r", max_bytes=1000)
    assert parsed.child_text("b") == "1"


@pytest.mark.parametrize(
    "body",
    [
        b"<r>" + b"<b/>" * MAX_ELEMENTS + b"</r>",
        b"<r>" + b"<b>" * MAX_DEPTH + b"</b>" * MAX_DEPTH + b"</r>",
        b"<!DOCTYPE r [<!ENTITY e 'x'>]><r>&e;</r>",
        b"<r><?php?></r>",
        b"<r>",
        b"<q/>",
    ],
)
def test_refused(body: bytes) -> None:
    with pytest.raises(S3Error) as refused:
        parse_xml(body, root="r", max_bytes=1 << 20)
    assert refused.value.code == "MalformedXML"
