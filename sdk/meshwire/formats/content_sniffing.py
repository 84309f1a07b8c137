"""Content sniffing: guesses a format from the first bytes, and how a dataset would read it.

Law: a hint for messages only; no behaviour depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class ContentHint(NamedTuple):
    """A guess about content. `what`: a noun phrase such as "a JPEG file"; `fix`: advice in the imperative,
    with {field} for the field's name."""

    what: str
    fix: str


_DECODE: Final = "put ops.decode({field!r}) before any other op"
_DECODE_AUDIO: Final = "put ops.decode_audio({field!r}) before any other op"
_DECODE_VIDEO: Final = "put ops.decode_video({field!r}, FRAMES) before any other op"
_NIFTI: Final = "put ops.nifti({field!r}) before any other op"
_BEGINNINGS: Final[Sequence[tuple[bytes, ContentHint]]] = (
    (b"\xff\xd8\xff", ContentHint("a JPEG file", _DECODE)),
    (b"\x89PNG\r\n", ContentHint("a PNG file", _DECODE)),
    (b"GIF8", ContentHint("a GIF file", _DECODE)),
    (b"II*\x00", ContentHint("a TIFF file", _DECODE)),
    (b"MM\x00*", ContentHint("a TIFF file", _DECODE)),
    (b"fLaC", ContentHint("a FLAC file", _DECODE_AUDIO)),
    (b"OggS", ContentHint("an Ogg file", _DECODE_AUDIO)),
    (b"ID3", ContentHint("an MP3 file", _DECODE_AUDIO)),
    (b"\xff\xfb", ContentHint("an MP3 file", _DECODE_AUDIO)),
    (b"\x1a\x45\xdf\xa3", ContentHint("a Matroska or WebM file", _DECODE_VIDEO)),
    (b"\x93NUMPY", ContentHint("a .npy file", "put ops.npy({field!r}) before any other op")),
    (
        b"\x89HDF\r\n",
        ContentHint("an HDF5 file", "write its arrays as Zarr v3 and open them with kind='zarr'"),
    ),
    (b"ARROW1", ContentHint("an Arrow file", "open the source with kind='table': each row is a sample")),
    (b"PAR1", ContentHint("a Parquet file", "open the source with kind='table': each row is a sample")),
    (
        b"\x28\xb5\x2f\xfd",
        ContentHint(
            "compressed with zstd",
            "store it uncompressed, or as a member of a .tar.zst; lines and TFRecords are read as they are: "
            "kind='lines', kind='tfrecord'",
        ),
    ),
    (
        b"\x1f\x8b",
        ContentHint(
            "compressed with gzip",
            "store it uncompressed, or as a member of a .tgz; lines and TFRecords are read as they are: "
            "kind='lines', kind='tfrecord'; volumes (.nii.gz) by ops.nifti({field!r})",
        ),
    ),
    (b"PK\x03\x04", ContentHint("a zip or .npz file", "use ops.npz({field!r}, NAME), or name it .zip")),
)
_PAGE: Final = "fetch it again: a server's error page was probably stored instead"
_CONVERT: Final = "convert it to JPEG or PNG"
_UTF_16: Final = ContentHint("text in UTF-16", "store it as UTF-8: iconv -f UTF-16 -t UTF-8")
_FOREIGN: Final[Sequence[tuple[bytes, ContentHint]]] = (
    (b"<html", ContentHint("an HTML page", _PAGE)),
    (b"<!doctype html", ContentHint("an HTML page", _PAGE)),
    (b"<error>", ContentHint("an XML error of a store", _PAGE)),
    (b'<?xml version="1.0" encoding="utf-8"?>\n<error>', ContentHint("an XML error of a store", _PAGE)),
    (b"<svg", ContentHint("an SVG drawing", _CONVERT)),
    (b"version https://git-lfs", ContentHint("a Git LFS pointer", "store the file itself: git lfs pull")),
    (b"%pdf-", ContentHint("a PDF file", "store its pages as images, or its text")),
    (b"\0\0\0\x0cjxl ", ContentHint("a JPEG XL file", _CONVERT)),
    (b"bzh", ContentHint("compressed with bzip2", "store it uncompressed, or with zstd or gzip")),
    (b"\xfd7zxz\0", ContentHint("compressed with xz", "store it uncompressed, or with zstd or gzip")),
    (
        b"\xef\xbb\xbf",
        ContentHint("text with a byte order mark", r"store it without: sed -i '1s/^\xEF\xBB\xBF//'"),
    ),
    (b"\xff\xfe", _UTF_16),
    (b"\xfe\xff", _UTF_16),
)
"""In lower case."""
_FOREIGN_BRANDS: Final = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"), "a HEIC image"),
    **dict.fromkeys((b"avif", b"avis"), "an AVIF image"),
}
_LONGEST: Final = 64
_TENSORS: Final = ContentHint(
    "a .safetensors file", "put ops.safetensors({field!r}, NAME) before any other op"
)
_LINES: Final = ContentHint("lines of JSON", "open the source with kind='lines': each line is a sample")
_JSON: Final = ContentHint("a JSON document", "extract a value from it with ops.json({field!r}, PATH)")
_NUMBER: Final = ContentHint("a number as text", "put ops.int_label({field!r}) before any other op")


_FEATURES: Final = {
    0x12: ContentHint(
        "a feature of floats", "put ops.feature({field!r}, 'number'), or 'numbers', before any other op"
    ),
    0x1A: ContentHint(
        "a feature of int64", "put ops.feature({field!r}, 'integer'), or 'integers', before any other op"
    ),
}
_COLUMN: Final = ContentHint(
    "not text", "for a column of numbers, put ops.frombuffer({field!r}, DTYPE) before any other op"
)


def identify_numbers(kind: str, data: bytes) -> ContentHint | None:
    """Guess the type of numbers in a field of a source of this kind: a serialised `tf.train.Feature` (the
    tag of its list, then the length, a varint), or raw values as in memory, most of which contain a zero
    byte."""
    if kind == "tfrecord" and len(data) > 1 and (data[1] == len(data) - 2 or data[1] & 0x80):
        return _FEATURES.get(data[0])
    return _COLUMN if kind in ("parquet", "mds") and b"\0" in data else None


def identify_foreign(data: bytes) -> ContentHint | None:
    """Guess what the bytes are, of what no op reads; None for anything else. Its `fix` names no field."""
    if data[4:8] == b"ftyp":
        what = _FOREIGN_BRANDS.get(data[8:12])
        return ContentHint(what, _CONVERT) if what else None
    begins = data[:_LONGEST].lstrip(b" \t\r\n").lower()
    return next((found for beginning, found in _FOREIGN if begins.startswith(beginning)), None)


def identify_content(data: bytes) -> ContentHint | None:
    """Guess what the bytes are; None if no known format matches."""
    if not data:
        return ContentHint("empty", "remove such objects, or exclude them with ds.filter('{field}_size > 0')")
    if (foreign := identify_foreign(data)) is not None:
        return foreign
    for beginning, found in _BEGINNINGS:
        if data.startswith(beginning):
            return found
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return ContentHint("a WebP file", _DECODE)
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return ContentHint("a WAV file", _DECODE_AUDIO)
    if data[128:132] == b"DICM":
        return ContentHint("a DICOM file", "put ops.decode_dicom({field!r}) before any other op")
    if data[344:347] in (b"n+1", b"ni1") or data[4:7] == b"n+2":
        return ContentHint("a NIfTI file", _NIFTI)
    if data[4:8] == b"ftyp":
        return ContentHint("an MP4 or QuickTime file", _DECODE_VIDEO)
    if data[8:10] == b'{"' and not any(data[5:8]):  # the length of a header, below 2**40, then the header
        return _TENSORS
    if data.lstrip()[:1] in (b"{", b"["):
        lines = data.strip().split(b"\n")
        more = len(lines) > 1 and all(line.strip().startswith(b"{") for line in lines[:2])
        return _LINES if more and lines[0].strip().endswith(b"}") else _JSON
    text = data[:32].strip()
    return _NUMBER if len(data) <= 32 and text.lstrip(b"-").isdigit() else None
