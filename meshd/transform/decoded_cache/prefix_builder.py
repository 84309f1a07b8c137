"""Builds prefixes for the decoded cache without rendering rows: a slice of a warm-up, in a transform process.

Law: it stores what rendering the same rows would have stored, and reports a failed row as rendering would.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from meshd.transform.decoded_cache.messages import KEPT, REFUSED
from meshd.transform.decoded_cache.row_prefixes import RowPrefixes
from meshd.transform.errors import ROW_ERRORS, OutOfMemoryError, row_failure
from meshd.transform.messages import Failure, RenderReply
from meshd.util import failpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from meshd.transform.compiler import Program
    from meshd.transform.decoded_cache.slice_recorder import SliceRecorder
    from meshd.transform.messages import RenderRequest, Row
    from meshd.transform.source_files import Piece, SourceFiles

SLICE_SECONDS: Final = 0.025
"""Time after which a slice ends: as long as a row of a batch may wait for this process."""


class PrefixBuilder:
    """Makes the prefixes of the rows of one request; `recorder`: the request's."""

    def __init__(
        self, files: SourceFiles, program: Program, request: RenderRequest, recorder: SliceRecorder
    ) -> None:
        self._files, self._program, self._request, self._recorder = files, program, request, recorder
        self._failures: list[Failure] = []

    def run(self, before_row: Callable[[int], None], is_full: Callable[[], bool]) -> RenderReply:
        """Return the reply. `before_row`, `is_full`: see `SliceRenderer.render`."""
        kept: list[int] = []
        verdicts: list[int] = []
        tally = self._recorder.tally
        self._files.readahead(self._pieces())
        began = tally.clock()
        for row in self._request.rows:
            before_row(row.row)
            failpoints.hit("transform.row")
            verdict = self._keep(row)
            if verdict is not None:
                kept.append(row.row)
                verdicts.append(verdict)
            if tally.clock() - began > SLICE_SECONDS or is_full():
                break
        return RenderReply(
            self._request.number,
            tuple(kept),
            tuple(self._failures),
            (),
            (),
            tally.clock() - began,
            tally.op_totals(),
            tally.reading,
            self._recorder.report(),
            tuple(verdicts),
        )

    def _pieces(self) -> Iterator[Piece]:
        """Yield the pieces of sources that are not in the cache."""
        for row in self._request.rows:
            for number, pieces in enumerate(row.sources):
                if not row.kept or all(len(place) == 1 for place in row.kept[number]):
                    yield from self._request.places(pieces)

    def _keep(self, row: Row) -> int | None:
        """Return the verdict on a row: the worst of its fields; None if it failed."""
        if not self._request.prefixes:
            return REFUSED
        prefixes = RowPrefixes(self._recorder, row.sample, row.kept)
        draw = self._program.draw(self._request.epoch, row.position)
        verdict, field = KEPT, 0
        try:
            for number, chain in self._program.first_chains:
                field = number
                read = partial(self._read, row, number)
                verdict = max(verdict, prefixes.keep(number, chain, draw, read))
        except OutOfMemoryError as error:
            if not self._request.last:
                raise
            self._failures.append(Failure(row.row, field, "bad", error.op, str(error)))
            return None
        except ROW_ERRORS as error:
            self._failures.append(Failure(row.row, field, *row_failure(error)))
            return None
        return verdict

    def _read(self, row: Row, number: int) -> bytes:
        tally = self._recorder.tally
        began = tally.clock()
        try:
            failpoints.hit("transform.read")
            return self._files.read_pieces(self._request.places(row.sources[number]))
        finally:
            tally.reading += tally.clock() - began
