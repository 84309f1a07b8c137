"""Index of TFRecord files: where each record's features are; one sample per record, one shard per file.

Law: every length and message is checked against its CRC-32C before use. A file that cannot be followed from
record to record is an error; a record that is damaged or lacks a feature is left out and counted.
"""

from __future__ import annotations

import re
import struct
from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

from meshwire.checksums.crc import crc32c
from meshwire.dataset.archive_paths import uncompressed_name
from meshwire.formats.record_index import RecordIndex
from meshwire.formats.shard_encoding import masked_crc
from meshwire.formats.tf_example import ExampleError, Feature, parse_features
from meshwire.strict_json import shown_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from meshwire.frame.tensor_frame import Buffer

MAX_RECORD_BYTES: Final = 128 << 20
HEAD_BYTES: Final = 12
MAX_CELLS: Final = 1 << 26
"""Maximum numbers in the index of a file; a record takes one, and two more for each feature."""
_EXAMPLES, _TOLD = 5, 64
_NAME = re.compile(r"\.tf_?rec(ords?)?\b|-\d+-of-\d+$", re.IGNORECASE)
_OTHER = re.compile(r"\.(gz|zz|json|pbtxt|txt|md|csv|index|idx)$", re.IGNORECASE)
_GZIP = b"\x1f\x8b"
_WHOLE = b""


class TfrecordError(ValueError):
    """The file cannot be followed from record to record."""


def is_tfrecord(key: str) -> bool:
    """Whether an object's name is that of a TFRecord file: `x.tfrecord`, `x.tfrecord-00000-of-00008`,
    `train-00000-of-01024`, each also with `.gz` or `.zst`."""
    name = uncompressed_name(key[key.rfind("/") + 1 :])
    return _NAME.search(name) is not None and _OTHER.search(name) is None


def head_size(head: bytes) -> int:
    """Return the message size of a record, given its head. Raises TfrecordError."""
    size: int = struct.unpack_from("<Q", head)[0]
    if masked_crc(crc32c(head[:8])) != head[8:HEAD_BYTES]:
        reason = "is compressed with gzip: give it a name that ends in .gz" if head.startswith(_GZIP) else ""
        raise TfrecordError(
            reason or "does not begin with a length and its crc32c: it is not a TFRecord, or is damaged"
        )
    if size > MAX_RECORD_BYTES:
        raise TfrecordError(f"has {size} bytes; a record may have at most {MAX_RECORD_BYTES}")
    return size


def read_records(pieces: Iterable[Buffer]) -> Iterator[tuple[int, bytes | None]]:
    """Yield (offset in the file, message) of each record of a file given in pieces of any sizes; the
    message is None if its crc32c does not match. Raises TfrecordError."""
    held, at, base, number = bytearray(), 0, 0, 0
    needed = HEAD_BYTES
    for piece in pieces:
        held += piece
        while len(held) - at >= needed:
            if needed == HEAD_BYTES:
                needed += _record_size(held[at : at + HEAD_BYTES], number, base + at) + 4
                continue
            message = bytes(held[at + HEAD_BYTES : at + needed - 4])
            sound = masked_crc(crc32c(message)) == held[at + needed - 4 : at + needed]
            yield base + at + HEAD_BYTES, message if sound else None
            at, number, needed = at + needed, number + 1, HEAD_BYTES
        del held[:at]
        base, at = base + at, 0
    if held:
        raise TfrecordError(f"record {number}, at byte {base}, is truncated: the file ends inside it")


def _record_size(head: bytes | bytearray, number: int, at: int) -> int:
    try:
        return head_size(bytes(head))
    except TfrecordError as error:
        raise TfrecordError(f"record {number}, at byte {at}, {error}") from error


def index_records(pieces: Iterable[Buffer], wanted: Sequence[str]) -> RecordIndex:
    """Index the records of a file that have all `wanted` features ("" is the whole message), each of one
    kind throughout the file. Raises TfrecordError."""
    indexing = _Indexing(wanted)
    most = MAX_CELLS // indexing.width
    for number, (offset, message) in enumerate(read_records(pieces)):
        if number == most:  # skipped records count as well, because each takes time
            raise TfrecordError(f"has more than {most} records, too many to index in one file; split it")
        if message is None:
            indexing.skip(number, "does not match its crc32c")
        else:
            indexing.add(number, offset, message)
    return indexing.index()


class _Indexing:
    """Collects records."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self.names = {name.encode(): name for name in wanted}
        self.asked = frozenset(name for name in self.names if name != _WHOLE)
        self.kinds = dict.fromkeys(wanted, "")
        self.width = 1 + 2 * len(self.names)
        self.cells = array("q")  # per record its number, and offset and length of each feature
        self.skipped = 0
        self.examples: list[str] = []
        self.told: dict[str, str] | None = None

    def skip(self, number: int, reason: str) -> None:
        self.skipped += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"record {number} {reason}")

    def add(self, number: int, offset: int, message: bytes) -> None:
        try:
            found = (
                parse_features(message, self.asked if self.told is not None else None) if self.asked else {}
            )
        except ExampleError as error:
            self.skip(number, f"is not a tf.Example: {error}")
            return
        if self.told is None and found:
            # Names and kinds of the first features, for messages and guesses.
            self.told = {
                name.decode(errors="replace")[:200]: found[name].kind for name in sorted(found)[:_TOLD]
            }
        row = [number]
        for encoded, name in self.names.items():
            feature = found.get(encoded) if encoded else Feature("bytes", 0, len(message))
            reason = self._reason(name, feature)
            if reason or feature is None:
                self.skip(number, reason)
                return
            row += (offset + feature.begin, feature.end - feature.begin)
        self.cells.extend(row)
        for encoded, name in self.names.items():
            self.kinds[name] = self.kinds[name] or (found[encoded].kind if encoded else "bytes")

    def _reason(self, name: str, feature: Feature | None) -> str:
        """Return why a record is not a sample, or "" if it is."""
        if feature is None or not feature.kind:
            return f"lacks {shown_value(name)}"
        if feature.values != 1:
            how = "several values" if feature.values else "no value"
            return f"has {how} of bytes in {shown_value(name)}; a field needs exactly one"
        if self.kinds[name] and feature.kind != self.kinds[name]:
            return f"has {feature.kind} in {shown_value(name)}; earlier records have {self.kinds[name]}"
        return ""

    def index(self) -> RecordIndex:
        table = np.frombuffer(self.cells, np.int64).reshape(-1, self.width)
        places = {
            name: (table[:, 1 + 2 * place].copy(), table[:, 2 + 2 * place].copy())
            for place, name in enumerate(self.names.values())
        }
        return RecordIndex(
            table[:, 0].copy(), places, self.kinds, self.skipped, tuple(self.examples), self.told or {}
        )
