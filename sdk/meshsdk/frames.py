"""Frames as they were received: arrays that are views of the memory they came into.

Law: a frame is taken only if layout, length, step and, where asked, checksums are right; nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshsdk.errors import CorruptFrameError, MeshError
from meshwire import frames

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from meshsdk.connections import Response
    from meshsdk.stalls import Arrival


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame: `arrays` are views of its lease. `origin` is how the node came by it: hit, joined,
    miss; `arrival` tells when what happened.
    """

    step: int
    arrays: Mapping[str, npt.NDArray[Any]]
    nbytes: int
    origin: str = ""
    arrival: Arrival | None = None


def open_frame(view: memoryview, step: int, *, verify: bool, origin: str = "") -> Frame:
    """The frame in `view`; raises CorruptFrameError when its layout, length or a checksum is wrong."""
    try:
        header = frames.parse_header(view)
        _check_version(header.metadata.get("version", frames.FRAME_VERSION))
        if header.size != len(view) or header.metadata.get("step", str(step)) != str(step):
            raise CorruptFrameError(f"step {step}: a frame of another size or step than was asked for")
        if verify:
            frames.verify(view, header)  # awscrt lets other threads run meanwhile
        return Frame(step, frames.views(view, header), len(view), origin)
    except frames.FrameError as error:
        raise CorruptFrameError(f"step {step}: {error}") from error


def _check_version(version: str) -> None:
    """Raises MeshError: to ask again would not help."""
    if version != frames.FRAME_VERSION:
        from meshwire.releases import RELEASE  # only who is refused asks

        raise MeshError(
            f"the node's frames are of version {version[:20]}, this SDK (release {RELEASE}) reads version "
            f"{frames.FRAME_VERSION}: upgrade shardmesh here to the node's release"
        )


def read_frame(response: Response, step: int = 0, *, verify: bool = True) -> Frame:
    """A frame read whole into memory of its own; raises CorruptFrameError (asked for again by the
    transport).
    """
    if not response.length:
        raise CorruptFrameError("the answer has no Content-Length")
    memory = np.empty(response.length, np.uint8)
    view = memory.data
    response.readinto(view)
    return open_frame(view, step, verify=verify, origin=response.headers.get("x-mesh-frame", ""))
