"""Rendering as in transform processes, in the process of the test."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from meshd.transform.compiler import load_program
from meshd.transform.messages import RenderReply, RenderRequest
from meshd.transform.pool import SLICE_ROWS
from meshd.transform.render_queue import RenderCall, RenderSpec, RowSlice
from meshd.transform.renderer import RaggedPart, RenderResult, RowChecksums, program_digest
from meshd.transform.row_blocks import BlockCopier
from meshd.transform.source_files import SourceFiles
from meshd.transform.worker import SliceRenderer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.transform.decoded_cache.sample_set import SampleSet
    from meshd.transform.renderer import RowWork


class InlineRenderer:
    """Renders as transform processes do, in this process: each slice is a message and its answer."""

    def __init__(self) -> None:
        self.messages = self.rows = 0
        self._files, self._copier = SourceFiles(), BlockCopier()
        self._load = lru_cache(load_program)

    def close(self) -> None:
        self._files.close()
        self._copier.close()

    async def render(
        self,
        job: str,
        program_text: str,
        epoch: int,
        rows: Sequence[RowWork],
        *,
        frame_fd: int,
        frame_bytes: int,
        targets: Sequence[tuple[int, int] | None],
        assets: Sequence[Any] = (),
        samples: SampleSet | None = None,
        early: bool = False,
    ) -> RenderResult:
        spec = RenderSpec(
            0.0, "", job, program_text, program_digest(program_text), epoch, frame_bytes, tuple(targets)
        )
        call, program, result = (
            RenderCall(spec, frame_fd, len(rows)),
            load_program(program_text),
            RenderResult(),
        )
        slices = [
            RowSlice(call, rows[start : start + SLICE_ROWS]) for start in range(0, len(rows), SLICE_ROWS)
        ]
        for item in slices:
            self.messages += 1
            sent = item.to_request(self.messages, with_text=True)
            request = msgspec.json.decode(msgspec.json.encode(sent), type=RenderRequest)
            self.rows += len(request.rows)
            renderer = SliceRenderer(
                self._files, program, request, frame_fd, lambda: 0.0, copier=self._copier
            )
            made, scratch = renderer.render(lambda row: None, lambda: False)
            reply = msgspec.json.decode(msgspec.json.encode(made), type=RenderReply)
            result.failures += reply.failures
            if scratch is not None:
                result.parts.append(RaggedPart(reply.rendered, reply.ragged, scratch))
            result.checksums.append(RowChecksums(reply.rendered, reply.sums))
            call.release_slice()
        return result
