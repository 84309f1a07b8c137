"""Transform worker: accepts the pool's connection, renders slices of rows into frames, and replies.

Law: a worker has no state except caches and may die at any moment; the pool retries its rows elsewhere.
A row that exceeds its limits ends the process, so no input can hold a core or memory indefinitely. All
fields of a row are rendered before any of them is written; otherwise the row is reported as failed.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from awscrt.checksums import crc32c

from meshd.rpc.process_server import serve_blocking
from meshd.rpc.unix_messages import MessageError
from meshd.transform.assets import LoadedAssets
from meshd.transform.compiler import load_program
from meshd.transform.decoded_cache.prefix_builder import PrefixBuilder
from meshd.transform.decoded_cache.row_prefixes import RowPrefixes
from meshd.transform.decoded_cache.segment_files import SegmentFiles
from meshd.transform.decoded_cache.slice_recorder import SliceRecorder
from meshd.transform.errors import ROW_ERRORS, BadSampleError, OutOfMemoryError, row_failure
from meshd.transform.messages import (
    MAX_PROGRAMS,
    MAX_RAGGED_BYTES,
    RENDER,
    Failure,
    OpStats,
    RaggedColumn,
    RenderReply,
    pack_integers,
    value_bytes,
    write_progress,
)
from meshd.transform.mixup_pairs import PairRenderer
from meshd.transform.multi_field_ops import RowInputs
from meshd.transform.resource_limits import RowLimits, RowWatchdog, keep_heap
from meshd.transform.row_blocks import BlockCopier, write_frames
from meshd.transform.source_files import SourceFiles, SourceGoneError
from meshd.util import failpoints
from meshd.util.clock import SystemClock, ThreadWorkClock, cpu_seconds

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from meshd.transform.compiler import Program
    from meshd.transform.messages import FailureKind, RenderRequest, Row, RowBlock
    from meshd.transform.mixup_pairs import PairedRow
    from meshd.transform.op_chain import Draw
    from meshd.transform.op_types import FieldType
    from meshd.transform.source_files import Piece
    from meshd.util.clock import WorkClock

_log = logging.getLogger(__name__)
_USUAL = RowLimits()
SLICE_RAGGED_BYTES = 128 << 20  # ragged bytes above which a slice ends
SLICE_SECONDS = 0.1  # time after which a slice ends, so that other jobs get a turn


class WornOutError(Exception):
    """The process retains too much memory to judge another row and must be replaced."""


def main(listener: socket.socket, limits: RowLimits = _USUAL) -> None:
    """Serve the pool on `listener` (a Unix socket), one connection at a time.

    Returns when the process must be replaced.
    """
    keep_heap(limits.memory)
    watch = RowWatchdog(limits)
    while True:
        sock, _ = listener.accept()
        try:
            _PoolConnection(watch).serve(sock)
        except MessageError:
            pass
        except WornOutError as error:
            _log.info("%s", error)
            return
        except (MemoryError, OutOfMemoryError):
            _log.warning("a row needs more memory than this process has left; it is retried in a new process")
            return


def _broken_reply(request: RenderRequest, error: Exception) -> RenderReply:
    """Return the reply if the renderer itself failed rather than a row.

    That is a defect, which no bad-sample policy covers, or an asset that has moved.
    """
    reason = f"{type(error).__name__}: {error}"[:300]
    kind: FailureKind = "read" if isinstance(error, SourceGoneError) else "op"
    failures = tuple(Failure(row.row, 0, kind, "renderer", reason) for row in request.rows)
    return RenderReply(request.number, (), failures, (), (), 0.0)


class _PoolConnection:
    def __init__(self, watch: RowWatchdog) -> None:
        self._watch = watch
        self._files, self._segments = SourceFiles(), SegmentFiles()
        self._assets, self._copier = LoadedAssets(self._files), BlockCopier()
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._programs: OrderedDict[str, Program] = OrderedDict()
        self._clock = SystemClock()

    def serve(self, sock: socket.socket) -> None:
        """Answer until the pool disconnects. Raises WornOutError, OutOfMemoryError, MessageError."""
        try:
            serve_blocking(sock, RENDER, self._answer)
        finally:
            self._watch.end_row()
            self._files.close()
            self._segments.close()
            self._copier.close()

    def _answer(self, request: RenderRequest, fds: Sequence[int]) -> tuple[RenderReply, Sequence[int]]:
        frame_fd, progress_fd = fds
        clock = self._clock.monotonic
        began, cpu = clock(), cpu_seconds()
        self._check_room(request)
        begin = self._watch.begin_row

        def before_row(row: int) -> None:
            write_progress(progress_fd, request.number, row)
            begin()

        try:
            program = self._program(request)
            if request.prefixes_only:
                recorder = SliceRecorder(self._segments, request, OpStats(clock), ThreadWorkClock())
                builder = PrefixBuilder(self._files, program, request, recorder)
                reply, scratch = builder.run(before_row, self._watch.is_worn), None
            else:
                renderer = SliceRenderer(
                    self._files, program, request, frame_fd, clock, self._segments, copier=self._copier
                )
                reply, scratch = renderer.render(before_row, self._watch.is_worn)
        except OutOfMemoryError:
            raise
        except Exception as error:
            _log.exception("the renderer failed on a slice of rows")
            reply, scratch = _broken_reply(request, error), None
        self._watch.end_row()
        reply = msgspec.structs.replace(reply, seconds=clock() - began, cpu=cpu_seconds() - cpu)
        return reply, () if scratch is None else (scratch,)

    def _check_room(self, request: RenderRequest) -> None:
        """Exit before a row begins with too little memory; the pool gives the slice to another process."""
        if self._watch.is_worn() or (request.last and not self._watch.is_fresh()):
            raise WornOutError(f"{self._watch.used_bytes()} bytes are retained; restarting to free them")

    def _program(self, request: RenderRequest) -> Program:
        known: Any = self._programs.get(request.program)
        if known is None:
            known = self._programs[request.program] = self._compile(request)
            if len(self._programs) > MAX_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(request.program)
        return known  # type: ignore[no-any-return]  # OrderedDict.get of a known key

    def _compile(self, request: RenderRequest) -> Program:
        """Compile a program and keep its text: the text is not resent if an asset cannot be read at once."""
        text = self._texts[request.program] = request.program_text or self._texts[request.program]
        self._texts.move_to_end(request.program)
        if len(self._texts) > MAX_PROGRAMS:
            self._texts.popitem(last=False)
        places = {digest: request.places(pieces) for digest, pieces in request.assets}
        return load_program(text, self._assets.loader(places))


class _Ragged(msgspec.Struct):
    """The rendered rows of one ragged field."""

    pieces: list[bytes | npt.NDArray[Any]] = msgspec.field(default_factory=list)
    lengths: list[int] = msgspec.field(default_factory=list)
    shapes: list[tuple[int, ...]] = msgspec.field(default_factory=list)

    def add(self, value: bytes | npt.NDArray[Any]) -> None:
        if isinstance(value, bytes):
            self.pieces.append(value)
            self.lengths.append(len(value))
            self.shapes.append((len(value),))
        else:
            self.pieces.append(np.ascontiguousarray(value))
            self.lengths.append(value.nbytes)
            self.shapes.append(value.shape)


class _Column:
    """A fixed field's tensor in the frame. A row is rendered in a buffer that stays in the CPU cache, then
    written.

    Writing takes half the time of filling mapped pages: each of those costs a page fault, 3 µs or more in a
    virtual machine.
    """

    def __init__(self, fd: int, offset: int, dtype: str, shape: tuple[int, ...]) -> None:
        self.row = np.empty(shape, dtype)
        self._fd, self._offset = fd, offset
        self.sums: list[int] = []

    def store(self, number: int) -> None:
        """Write the rendered row to its place in the frame."""
        start, data = self._offset + number * self.row.nbytes, self.row.reshape(-1).view(np.uint8).data
        self.sums.append(crc32c(data))
        while data:
            written = os.pwrite(self._fd, data, start)
            start, data = start + written, data[written:]


class SliceRenderer:
    """Renders the rows of one request. `clock` returns seconds."""

    def __init__(
        self,
        files: SourceFiles,
        program: Program,
        request: RenderRequest,
        frame_fd: int,
        clock: Callable[[], float],
        segments: SegmentFiles | None = None,
        work_clock: WorkClock | None = None,
        copier: BlockCopier | None = None,
    ) -> None:
        self._files, self._request = files, request
        self._frame_fd, self._copier, self._copied = frame_fd, copier or BlockCopier(), 0
        self._segments = segments = segments or SegmentFiles()
        self._tally = OpStats(clock, traced=request.traced)
        work_clock = work_clock or ThreadWorkClock()
        self._recorder = (
            SliceRecorder(segments, request, self._tally, work_clock) if request.prefixes else None
        )
        self._program = program
        self._chains = tuple(program.chains.values())
        self._columns = [
            None if target is None else _Column(frame_fd, target[0], output.dtype, output.fixed or ())
            for target, output in zip(request.targets, _outputs(program), strict=True)
        ]
        pairing = program.pairing
        self._pairs = (
            None
            if pairing is None
            else PairRenderer(program, pairing, request.epoch, self._read, self._tally, self._recorder)
        )
        self._ragged = {number: _Ragged() for number, target in enumerate(request.targets) if target is None}
        self._runs: list[tuple[RaggedColumn, npt.NDArray[np.uint8]]] = []
        self._frame_sums: list[tuple[int, ...]] = []
        self._ragged_bytes = 0
        self._failures: list[Failure] = []

    def render(
        self, before_row: Callable[[int], None], is_full: Callable[[], bool]
    ) -> tuple[RenderReply, int | None]:
        """Return (reply, scratch memfd or None); the caller closes the scratch memfd.

        `before_row` is called with each row before it begins; `is_full` returns whether the slice should end
        for lack of memory.
        """
        rendered: list[int] = []
        self._segments.begin_slice()
        self._files.readahead(self._pieces())
        clock = self._tally.clock
        began = clock()
        for row in self._request.rows:
            before_row(row.row)
            failpoints.hit("transform.row")
            if self._row(row) if row.block is None else self._block(row, row.block):
                rendered.append(row.row)
            if clock() - began > SLICE_SECONDS or self._ragged_bytes > SLICE_RAGGED_BYTES or is_full():
                break
        columns = tuple(
            RaggedColumn(number, tuple(ragged.lengths), tuple(ragged.shapes))
            for number, ragged in self._ragged.items()
        )
        scratch = None
        if self._copied:
            columns = tuple(column for column, _ in self._runs)
            scratch = _scratch([_Ragged([data]) for _, data in self._runs]) if self._runs else None
        elif self._ragged:
            scratch = _scratch(list(self._ragged.values()))
        sums = tuple(tuple(column.sums) for column in self._columns if column is not None)
        sums = tuple(self._frame_sums) or sums
        number, failures, seconds = self._request.number, tuple(self._failures), clock() - began
        uses = self._tally.op_totals()
        report = None if self._recorder is None else self._recorder.report()
        reply = RenderReply(
            number,
            tuple(rendered),
            failures,
            columns,
            sums,
            seconds,
            uses,
            self._tally.reading,
            report,
            copied=self._copied,
            spans=tuple(self._tally.spans or ()),
        )
        return reply, scratch

    def _pieces(self) -> Iterator[Piece]:
        """Yield the pieces of all rows, in the order in which they are read: of sources, or of entries."""
        paths = self._request.paths
        for row in self._request.rows:
            for sources, kept in ((row.sources, row.kept), (row.partner, row.partner_kept)):
                for number, pieces in enumerate(sources):
                    entries = [place for place in kept[number] if len(place) > 1] if kept else ()
                    if not entries:
                        yield from self._request.places(pieces)
                    for _, path, offset, length in entries:
                        self._segments.readahead(paths[path], offset, length)

    def _row(self, row: Row) -> bool:
        draw = self._draw(row)
        values: list[tuple[_Ragged, Any]] = []
        recorder = self._recorder
        kept = RowPrefixes(recorder, row.sample, row.kept) if recorder else None
        start = RowInputs(self._program.joints, row.sources, self._read, draw, self._tally, kept)
        pair = None
        try:
            start.run_multi_field_ops()
            if self._pairs is not None:
                start.number = self._pairs.number
                pair = self._pairs.begin(row, draw, start)
            for start.number in range(len(self._chains)):
                self._field(start.number, start, draw, values, pair)
        except OutOfMemoryError as error:
            if not self._request.last:
                raise
            return self._report_failure(row, start.number, "bad", error.op, str(error))
        except ROW_ERRORS as error:
            return self._report_failure(row, start.number, *row_failure(error))
        for ragged, value in values:
            ragged.add(value)
            self._ragged_bytes += value_bytes(value)
        if pair is not None:
            self._fill_pair(pair)
        for column in self._columns:
            if column is not None:
                column.store(row.row)
        return True

    def _block(self, row: Row, block: RowBlock) -> bool:
        """Copy many rows. A failure is of the block: its rows are then rendered one by one."""
        began = self._tally.clock()

        def read() -> None:
            self._tally.record_read(began)

        try:
            runs = self._copier.copy(block, row.row, self._request, self._chains, self._frame_fd, read)
            if block.frames:
                self._frame_sums.append(write_frames(block, runs, self._frame_fd))
                runs = {}
        except Exception as error:  # an op that is at fault for one of the rows can raise anything
            for file in block.files:
                self._copier.forget(self._request.paths[file])
            return self._report_failure(row, 0, "read", "copy", f"{type(error).__name__}: {error}"[:300])
        self._copied += block.count
        for number, (lengths, data) in runs.items():
            column = RaggedColumn(number, (), (), pack_integers(lengths), lengths.size)
            self._runs.append((column, data))
            self._ragged_bytes += data.nbytes
        return True

    def _draw(self, row: Row) -> Draw:
        if self._pairs is not None:
            return self._pairs.draw(row.position, row.sources)
        return self._program.draw(self._request.epoch, row.position)

    def _fill_pair(self, pair: PairedRow) -> None:
        """Fill the columns that mixing adds."""
        names = self._program.chains
        own = {name: column.row for name, column in zip(names, self._columns, strict=False) if column}
        for column, value in zip(self._columns[len(self._chains) :], pair.columns(own), strict=True):
            assert column is not None
            column.row[...] = value

    def _read(self, pieces: Sequence[tuple[int, ...]]) -> bytes:
        began, places = self._tally.clock(), self._request.places(pieces)
        try:
            failpoints.hit("transform.read")
            return self._files.read_pieces(places)
        finally:
            self._tally.record_read(began, places)

    def _field(
        self,
        number: int,
        start: RowInputs,
        draw: Draw,
        values: list[tuple[_Ragged, Any]],
        pair: PairedRow | None,
    ) -> None:
        mixed = pair is not None and self._pairs is not None and number == self._pairs.number
        column, chain = self._columns[number], self._chains[number]
        data, done = (pair.value, 0) if mixed and pair is not None else start.begin_chain(number, chain)
        if column is not None:
            chain.render_into(data, draw, column.row, self._tally, done)
            if pair is not None:
                pair.mix_soft_label(number, column.row)
            return
        value = chain.render(data, draw, self._tally, done)
        size = sum(value_bytes(other) for _, other in values) + value_bytes(value)
        if size > MAX_RAGGED_BYTES:
            raise BadSampleError("its ragged fields exceed 1 GiB; resize or crop in the plan", op="row")
        values.append((self._ragged[number], value))

    def _report_failure(self, row: Row, field_number: int, kind: FailureKind, op: str, message: str) -> bool:
        beside = None if self._pairs is None else self._pairs.through()
        number = field_number if beside is None else beside
        self._failures.append(Failure(row.row, number, kind, op, message, beside is not None))
        return False


def _outputs(program: Program) -> list[FieldType]:
    """Return the types of a frame's columns: those of the fields, then those that mixing adds."""
    added = program.pairing.outputs if program.pairing is not None else {}
    return [*program.outputs.values(), *added.values()]


def _scratch(columns: list[_Ragged]) -> int:
    """Return a memfd with all pieces of the first column, then those of the second, …"""
    fd = os.memfd_create("mesh-scratch", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            for column in columns:
                for piece in column.pieces:
                    file.write(
                        piece if isinstance(piece, bytes) else piece.data.cast("B") if piece.size else b""
                    )
    except BaseException:
        os.close(fd)
        raise
    return fd
