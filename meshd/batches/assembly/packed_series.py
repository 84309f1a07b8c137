"""PackedSeries: the packed frames of consecutive steps, written into one block of shared memory.

Law: the frames have the bytes that they have alone. A frame is written once; nothing is copied afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshd.batches.assembly.direct_rows import NotDirectError
from meshd.core.memory_frames import make_block

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from meshd.batches.assembly.packed_rows import PackedRows
    from meshd.core.memory_frames import MemoryAccount
    from meshwire.frame.tensor_frame import FrameLayout


class PackedSeries:
    """The frames of one plan while they are written; `metadata`: that of each.

    `frames`: to be written, all of them, before any is handed out.
    """

    def __init__(
        self,
        packings: Sequence[PackedRows],
        metadata: Sequence[Mapping[str, str]],
        memory: MemoryAccount,
    ) -> None:
        self._packings, self._metadata = packings, metadata
        layouts: dict[int, FrameLayout] = {}  # by rows: the layouts of frames differ only in their metadata
        self._layouts = []
        for packing, values in zip(packings, metadata, strict=True):
            rows = len(packing.rows)
            if rows not in layouts:
                layouts[rows] = packing.layout(values)
            self._layouts.append(layouts[rows])
        self.frames = make_block([layout.size for layout in self._layouts], memory)

    def __repr__(self) -> str:
        return f"<PackedSeries, {len(self.frames)} frames>"

    def write(self, number: int, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write a frame (blocking). Raises NotDirectError if its header is longer than that of others."""
        layout, metadata = self._layouts[number], self._metadata[number]
        if not self._packings[number].fill(self.frames[number], layout, metadata, tensors):
            raise NotDirectError("the headers have different lengths")
