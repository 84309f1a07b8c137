"""Messages between the pool and a transform worker, and the op statistics that replies carry.

Law: one request and one reply per slice, as msgspec arrays in JSON; replies keep the order of the
requests. Pixels never travel here: a request carries the frame's memfd and the connection's progress
file, a reply one scratch memfd when fields are ragged. Each step of a chain is measured once, under the
names of its ops.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import numpy as np

from meshd.rpc.process_rpc import Method
from meshd.telemetry import metrics
from meshd.telemetry.metric_registry import bounded_label
from meshd.telemetry.tracing import Timed  # noqa: TC001  msgspec reads the annotations
from meshd.transform.decoded_cache.messages import (  # noqa: TC001  msgspec reads the annotations
    FieldOrder,
    KeptPlace,
    PrefixReport,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from meshd.transform.source_files import Piece


MAX_PROGRAMS = 64
"""Compiled programs that a worker keeps; the pool resends a program's text after at most half as many."""
MAX_SPANS = 256
"""Spans that a worker reports of a slice."""
MAX_RAGGED_BYTES = 1 << 30
"""Bytes of the ragged fields of one sample; more makes it a bad sample."""
_PROGRESS = struct.Struct("=qq")
FailureKind = Literal["bad", "op", "read", "damaged"]


class FieldPlaces(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where some fields of the rows of a block are: field number and distance in bytes from the row's offset.

    Integers [rows], as `pack_integers` returns them: `files`: indices into the block's `files`; `offsets`: in
    the file; `lengths`: of a single ragged field. `sums`: int64[rows], little-endian, the crc32c of the value
    in each row, -1 where none is known, of a single field; none if none is known.
    """

    files: bytes
    offsets: bytes
    fields: tuple[tuple[int, int], ...]
    lengths: bytes = b""
    sums: bytes = b""


class RowBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` rows of a frame, some of which are copied; the others have to be rendered after it.

    `widths`: bytes of each field of a row in its file, ordered by name; 0 for a ragged field. `rows`: int32,
    the rows to copy, from the block's first row; none if it is all of them. `files`: indices into the
    request's `paths`. `frames`: if the rows are those of several frames in one block of memory, the rows of
    each, and where the tensor of each field begins in that memory.
    """

    count: int
    widths: tuple[int, ...]
    rows: bytes
    files: tuple[int, ...]
    places: tuple[FieldPlaces, ...]
    frames: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row: its number in the frame, its epoch position, and the pieces of the bytes of each field.

    A piece is (index into the request's `paths`, offset, length), in bytes, and the crc32c if it is known;
    a field has several pieces if its extents are split. `partner`: the pieces of the row at position ^ 1, if
    the plan mixes the two. `sample`: the number of its sample in the snapshot, -1 if unknown; `kept`: for
    each field, its entries in the decoded cache (`KeptPlace`); both also for the partner. `block`: copy these
    rows, from `row` on, instead of rendering one.
    """

    row: int
    position: int
    sources: tuple[tuple[tuple[int, ...], ...], ...]
    partner: tuple[tuple[tuple[int, ...], ...], ...] = ()
    sample: int = -1
    partner_sample: int = -1
    kept: tuple[tuple[KeptPlace, ...], ...] = ()
    partner_kept: tuple[tuple[KeptPlace, ...], ...] = ()
    block: RowBlock | None = None


class RenderRequest(msgspec.Struct, frozen=True, array_like=True):
    """A slice to render. `program_text` is empty if this connection has received `program` before.

    `targets`: one per field, ordered by name, then one per column that mixing adds: (offset of its tensor in
    the frame, its number of rows), or None for a ragged field. `assets`: the digest of each asset of the
    program and its pieces. `last`: a process has already died on the row. `prefixes`: for each field, what to
    do with the result of its first steps; empty without a decoded cache. `prefixes_only`: make these results
    for the decoded cache, and no rows. `traced`: report what was done when.
    """

    number: int
    program: str
    program_text: str
    epoch: int
    frame_bytes: int
    targets: tuple[tuple[int, int] | None, ...]
    paths: tuple[str, ...]
    rows: tuple[Row, ...]
    assets: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()
    last: bool = False
    prefixes: tuple[FieldOrder, ...] = ()
    prefixes_only: bool = False
    traced: bool = False

    def places(self, pieces: Iterable[tuple[int, ...]]) -> list[Piece]:
        """Return pieces with their paths, as `SourceFiles` reads them."""
        paths = self.paths
        return [cast("Piece", (paths[path], *place)) for path, *place in pieces]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A row that was not rendered.

    `kind`: `bad`, its data is at fault; `op`, a defect of the op; `read`, its bytes were not found;
    `damaged`, its bytes are not those that were stored. `partner`: whether the row to mix with it failed.
    """

    row: int
    field: int
    kind: FailureKind
    op: str
    message: str
    partner: bool = False


class RaggedColumn(msgspec.Struct, frozen=True, array_like=True):
    """One ragged field in the scratch file: `lengths` in bytes and `shapes`, one per rendered row.

    Of a block instead `run`: the bytes of each of its `count` rows, as `pack_integers` returns them.
    """

    field: int
    lengths: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    run: bytes = b""
    count: int = 0


class OpUse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Statistics of one op, or of several fused ones, for a slice.

    `calls` includes failed ones; `seconds`; bytes of its input and output values.
    """

    op: str
    calls: int
    failures: int
    seconds: float
    bytes_in: int
    bytes_out: int


class RenderReply(msgspec.Struct, frozen=True, array_like=True):
    """The result of a slice.

    `rendered`: the rows that succeeded; `ragged`: their ragged fields, in this order in the scratch file;
    `sums`: for each fixed field, ordered by name, the crc32c of each of those rows, or for each block of
    several frames that of its tensors, frame by frame; `ops`: statistics per
    op; `reading`: the part of `seconds` spent on reading source bytes; `prefixes`: what was done with the
    decoded cache; `verdicts`: instead of `sums`, for each of those rows if only prefixes were made. A slice
    may end early: rows that are neither rendered nor failed must be requested again. `copied`: the number of
    rows in the blocks that were copied, each of which is one row in `rendered`, without checksums. `spans`:
    what was done when, if the request is traced; `cpu`: processor time of the process, in seconds.
    """

    number: int
    rendered: tuple[int, ...]
    failures: tuple[Failure, ...]
    ragged: tuple[RaggedColumn, ...]
    sums: tuple[tuple[int, ...], ...]
    seconds: float
    ops: tuple[OpUse, ...] = ()
    reading: float = 0.0
    prefixes: PrefixReport | None = None
    verdicts: tuple[int, ...] = ()
    copied: int = 0
    spans: tuple[Timed, ...] = ()
    cpu: float = 0.0


def pack_integers(values: npt.NDArray[Any]) -> bytes:
    """Return integers of 0 or more, little-endian, in as few bytes each as the largest one needs: messages
    carry bytes in base64, which costs more than the arithmetic."""
    narrow = np.min_scalar_type(int(values.max())) if values.size else np.dtype(np.uint8)
    return values.astype(narrow.newbyteorder("<")).tobytes()


def unpack_integers(data: bytes, count: int) -> npt.NDArray[Any]:
    """Return the `count` unsigned integers that `pack_integers` packed, in their width."""
    return np.frombuffer(data, f"<u{len(data) // count}") if count else np.zeros(0, np.uint8)


RENDER: Method[RenderRequest, RenderReply] = Method("render", RenderRequest, RenderReply)


def write_progress(fd: int, number: int, row: int) -> None:
    """Record in the file that `row` of request `number` begins: it is blamed if the process dies now."""
    os.pwrite(fd, _PROGRESS.pack(number, row), 0)


def read_progress(fd: int) -> tuple[int, int]:
    """Return the (request number, row) that began last; (-1, -1) if none did."""
    data = os.pread(fd, _PROGRESS.size, 0)
    return _PROGRESS.unpack(data) if len(data) == _PROGRESS.size else (-1, -1)


def value_bytes(value: Any) -> int:
    """Return the number of bytes of a value between two ops."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    return len(value) if isinstance(value, bytes | bytearray | memoryview) else 0


class OpStats:
    """Statistics of ops by name over one slice. `clock`: seconds; `reading`: seconds of reading sources;
    `spans`: what was done when, at most `MAX_SPANS`; None if the slice is not traced."""

    __slots__ = ("_uses", "clock", "reading", "spans")

    def __init__(self, clock: Callable[[], float], *, traced: bool = False) -> None:
        self.clock = clock
        self.reading = 0.0
        self.spans: list[Timed] | None = [] if traced else None
        self._uses: dict[str, list[float]] = {}

    def __repr__(self) -> str:
        return f"<OpStats {self.op_totals()}>"

    def record_read(self, began: float, places: Sequence[Piece] = ()) -> None:
        """Record that sources, at these places as far as they are known, were read since `began`."""
        ended = self.clock()
        self.reading += ended - began
        if self.spans is not None and len(self.spans) < MAX_SPANS:
            fetched = bool(places) and places[0][0].startswith("/proc/")  # shared memory of the coordinator
            size = sum(place[2] for place in places)
            self.spans.append(("memory read" if fetched else "disk read", began, ended, size))

    def record_call(self, op: str, seconds: float, taken: int, made: int, *, failed: bool = False) -> None:
        """Record one call of an op, which ended just now: its time, and the bytes of its value before and
        after."""
        if self.spans is not None and len(self.spans) < MAX_SPANS:
            ended = self.clock()
            self.spans.append((f"op {op}", ended - seconds, ended, 0))
        use = self._uses.get(op)
        if use is None:
            use = self._uses[op] = [0, 0, 0.0, 0, 0]
        use[0] += 1
        use[1] += failed
        use[2] += seconds
        use[3] += taken
        use[4] += made

    def op_totals(self) -> tuple[OpUse, ...]:
        """Return the totals per op."""
        return tuple(
            OpUse(op, int(calls), int(failures), seconds, int(taken), int(made))
            for op, (calls, failures, seconds, taken, made) in self._uses.items()
        )


def record_reply_metrics(reply: RenderReply, *, in_advance: bool = False) -> None:
    """Add a worker's reply to the metrics; `in_advance`: no batch wanted its rows."""
    if not in_advance:
        rows = reply.copied or len(reply.rendered)  # a slice has blocks, or rows
        metrics.transform_samples.labels("row").inc(rows + len(reply.failures))
    metrics.transform_seconds.observe(reply.seconds)
    for failure in reply.failures:
        if failure.kind == "damaged":
            metrics.store_corrupt_reads.inc()
        if not in_advance:
            metrics.transform_failures.labels(bounded_label("op", failure.op)).inc()
    for use in reply.ops:
        name = bounded_label("op", use.op)
        metrics.op_calls.labels(name).inc(use.calls)
        metrics.op_seconds.labels(name).inc(use.seconds)
        metrics.op_bytes.labels(name, "in").inc(use.bytes_in)
        metrics.op_bytes.labels(name, "out").inc(use.bytes_out)
