"""The data set that a plan's rows are samples of, and those of them that this node is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt


class OwnRows(msgspec.Struct, frozen=True, eq=False):
    """The samples of which a node of a mesh builds the rows, if each node builds its own: `count` of them.
    `include` returns which of some samples they are, bool[n] (blocking). Another map has another object.
    """

    count: int
    include: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]]


class SampleSet(msgspec.Struct, frozen=True):
    """The data set that sample numbers of rows refer to: `snapshot` is its hash, `count` its size.

    `limit`: bytes that the caller allows for results of this plan; None if the node decides. `bucket`: its
    quota includes the results. `own`: the samples of which this node builds the rows; None: any of them.
    """

    snapshot: str
    count: int
    limit: int | None = None
    bucket: str = ""
    own: OwnRows | None = None

    @property
    def asked(self) -> int:
        """How many samples the node is asked for: results of the others take none of its room."""
        return self.count if self.own is None else min(self.count, self.own.count)
