"""Renders the samples of inner plans as sequences: their lengths and all their elements.

Law: a sample that cannot be rendered, or whose packed fields differ in length, is bad and has no elements.
"""

from __future__ import annotations

import asyncio
import mmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from meshd.batches.assembly.stored_sequence_format import BAD
from meshd.core.frame_address import RowsAddress
from meshd.telemetry import metrics
from meshwire.frame import tensor_frame
from meshwire.frame.tensor_frame import Status

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from meshd.batches.assembly.stored_sequence_format import SequenceSet
    from meshd.core.frame_address import FrameSource
    from meshwire.frame.columns import Integers

_ROWS_A_FRAME: Final = 1024
Sequences = tuple["Integers", dict[str, "npt.NDArray[Any]"]]


class SequenceRenderer:
    """Renders sequences through frames of the inner plan."""

    def __init__(self, frames: FrameSource) -> None:
        self._frames = frames

    def __repr__(self) -> str:
        return f"<SequenceRenderer through {self._frames!r}>"

    async def render(
        self, sequences: SequenceSet, samples: range, rendered: Callable[[int], None] | None = None
    ) -> Sequences:
        """Return (lengths, elements by field) of these samples: int64[n] with BAD for bad ones, 1-d arrays.

        `rendered` is called with the end of what is rendered so far. Raises BatchError.
        """
        found: list[Sequences] = []
        for start in range(samples.start, samples.stop, _ROWS_A_FRAME):
            some = tuple(range(start, min(start + _ROWS_A_FRAME, samples.stop)))
            found.append(await self._frame(RowsAddress(sequences.plan.hash, 0, some), sequences.fields))
            metrics.samples_measured.inc(len(some))
            if rendered is not None:
                rendered(some[-1] + 1)
        columns = {name: np.concatenate([part[1][name] for part in found]) for name in sequences.fields}
        return np.concatenate([part[0] for part in found]), columns

    async def _frame(self, address: RowsAddress, fields: tuple[str, ...]) -> Sequences:
        frame = await self._frames.get_frame(address)
        try:
            with mmap.mmap(frame.fd, frame.size, prot=mmap.PROT_READ) as data:
                return await asyncio.to_thread(_read_frame, data, fields)
        finally:
            frame.close()


def _read_frame(data: mmap.mmap, fields: tuple[str, ...]) -> Sequences:
    header = bytes(data[: tensor_frame.header_size(data[:8])])
    slots = tensor_frame.parse_frame_header(header).tensors

    def read(name: str) -> npt.NDArray[Any]:
        slot = slots[name]
        raw = data[slot.offset : slot.offset + slot.nbytes]  # a copy, so that the mapping can be closed
        return np.frombuffer(raw, tensor_frame.DTYPES[slot.dtype])

    offsets = {name: read(f"{name}.offsets").astype(np.int64) for name in fields}
    lengths = np.diff(offsets[fields[0]])
    bad = read("__status") != Status.OK
    for name in fields[1:]:
        bad |= np.diff(offsets[name]) != lengths
    columns = {name: read(f"{name}.data") for name in fields}
    if bad.any():
        columns = {name: column[np.repeat(~bad, np.diff(offsets[name]))] for name, column in columns.items()}
    return np.where(bad, BAD, lengths), columns
