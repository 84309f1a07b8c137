"""A form is read the same however it is cut; urllib3, which writes what `requests` sends, is the oracle."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from urllib3.filepost import encode_multipart_formdata

from meshwire.http_values.multipart_form_data import (
    MAX_FORM_BYTES,
    FormError,
    FormReader,
    FormTooLargeError,
    read_boundary,
)

BOUNDARY = "b0undary"
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=12).filter(
    lambda name: name.lower() != "file"
)
forms = st.dictionaries(names, st.text(max_size=30), max_size=6).filter(
    lambda form: len({name.lower() for name in form}) == len(form)
)
# Contents full of what a delimiter is made of.
files = st.lists(
    st.sampled_from([b"\r", b"\n", b"-", b"--", b"\r\n--", b"b0un", b"x", b"\r\n--b0undar"])
).map(b"".join)
cuts = st.lists(st.integers(0, 10_000), max_size=20)


def encode(form: dict[str, str], file: bytes, filename: str = "f.bin") -> bytes:
    body, _ = encode_multipart_formdata([*form.items(), ("file", (filename, file, "x/y"))], BOUNDARY)
    return bytes(body)


def split(data: bytes, at: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in at), len(data)]
    return [data[a:b] for a, b in pairwise(bounds)]


def read(pieces: list[bytes], boundary: str = BOUNDARY) -> tuple[FormReader, bytes]:
    reader = FormReader(boundary)
    file = b"".join(piece for data in pieces for piece in reader.feed(data))
    reader.finish()
    return reader, file


@given(forms, files, cuts)
def test_any_split_reads_alike(form: dict[str, str], file: bytes, at: list[int]) -> None:
    reader, found = read(split(encode(form, file), at))
    assert found == file
    assert reader.fields == {name.lower(): value for name, value in form.items()}
    assert reader.filename == "f.bin"


@given(forms, files)
def test_byte_by_byte(form: dict[str, str], file: bytes) -> None:
    body = encode(form, file)
    assert read([body[i : i + 1] for i in range(len(body))])[1] == file


@given(forms, files, st.integers(0, 10_000))
def test_any_cut_is_no_form(form: dict[str, str], file: bytes, cut: int) -> None:
    body = encode(form, file)
    end = body.rindex(f"\r\n--{BOUNDARY}".encode()) + len(BOUNDARY) + 4
    reader = FormReader(BOUNDARY)
    reader.feed(body[: cut % end])
    with pytest.raises(FormError):
        reader.finish()


@given(
    st.binary(max_size=400)
    | st.lists(
        st.sampled_from(
            [
                b"--b0undary",
                b"\r\n",
                b"--",
                b"Content-Disposition: form-data; name=",
                b'"key"',
                b"file",
                b'"\\"',
                b";",
                b"\xff",
            ]
        )
    ).map(b"".join),
    cuts,
)
@example(b"--b0undary--", [])
@example(b"--b0undary\r\n\r\n", [])
def test_any_bytes_are_a_form_or_an_error(data: bytes, at: list[int]) -> None:
    """And what comes of them does not depend on the cuts."""
    outcomes = []
    for pieces in ([data], split(data, at), [data[i : i + 1] for i in range(len(data))]):
        try:
            reader, file = read(pieces)
            outcomes.append((reader.fields, reader.filename, file))
        except FormError:
            outcomes.append(({}, "", b"error"))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_what_comes_before_the_file_is_bounded() -> None:
    head = encode({"a": "x" * (MAX_FORM_BYTES - 300)}, b"y" * 100_000)
    assert read([head])[1] == b"y" * 100_000
    for pieces in ([encode({"a": "x" * MAX_FORM_BYTES}, b"y")], [b"x" * 1000] * 30):
        with pytest.raises(FormTooLargeError):
            read(pieces)
    with pytest.raises(FormTooLargeError):
        read([encode({f"n{i}": "" for i in range(201)}, b"")])


def test_what_follows_the_file_is_ignored() -> None:
    body, _ = encode_multipart_formdata([("key", "k"), ("file", ("f", b"data")), ("late", "x")], BOUNDARY)
    reader, file = read([body])
    assert (reader.fields, file) == ({"key": "k"}, b"data")


def test_preamble_padding_and_epilogue() -> None:
    body = (
        b"preamble\r\n--b0undary \t\r\nContent-Disposition: form-data; name=key\r\n\r\nk\r\n--b0undary\r\n"
        b'X: y\r\ncontent-disposition:form-data;filename="C:\\a\\b \\"c\\".txt";name="File"\r\n\r\n\r\n'
        b"--b0undary--\r\nepilogue"
    )
    reader, file = read([body])
    assert (reader.fields, reader.filename, file) == ({"key": "k"}, 'C:\\a\\b "c".txt', b"")


@pytest.mark.parametrize(
    ("text", "boundary"),
    [
        ("multipart/form-data; boundary=abc", "abc"),
        ('Multipart/Form-Data; charset=utf-8; boundary="a b"', "a b"),
        ("multipart/form-data;boundary=----WebKitFormBoundary7MA4", "----WebKitFormBoundary7MA4"),
    ],
)
def test_boundaries(text: str, boundary: str) -> None:
    assert read_boundary(text) == boundary


@pytest.mark.parametrize(
    "text",
    ["", "multipart/form-data", "multipart/mixed; boundary=a", "multipart/form-data; boundary=" + "x" * 71],
)
def test_what_names_no_boundary(text: str) -> None:
    with pytest.raises(FormError):
        read_boundary(text)
