"""A loader as the source of DALI's `external_source`. Not tested here, for lack of a GPU.

Law: one element is one batch, in the order of `fields`. An iteration is the rest of an epoch and the next
iteration the next epoch, which DALI calls `cycle="raise"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshsdk.datasets.batch import as_dict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshsdk.loader.loader import Loader


class ExternalSource:
    """A source for `fn.external_source(source, num_outputs=len(fields), batch=True, cycle="raise")`; set
    the pipeline's batch size to the loader's rows per rank. Fields are names of a plain dictionary (see
    `plain.as_dict`)."""

    def __init__(self, loader: Loader, fields: Sequence[str]) -> None:
        self.loader, self.fields = loader, tuple(fields)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self.loader:
            plain = as_dict(batch)
            yield tuple(plain[name] for name in self.fields)
