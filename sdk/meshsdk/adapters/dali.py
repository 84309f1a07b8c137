"""A loader as the source of DALI's `external_source`: not run here, where there is no GPU for DALI.

Law: one element is one batch, in the order of `fields`; an iteration is (the rest of) an epoch, and the one
after it the next, which is `cycle="raise"` to DALI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshsdk.adapters.plain import as_dict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from meshsdk.loaders import Loader


class ExternalSource:
    """`fn.external_source(source, num_outputs=len(fields), batch=True, cycle="raise")`, with the pipeline's
    batch size the loader's rows a rank. Fields are names of a plain dictionary (see `plain.as_dict`)."""

    def __init__(self, loader: Loader, fields: Sequence[str]) -> None:
        self.loader, self.fields = loader, tuple(fields)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for batch in self.loader:
            plain = as_dict(batch)
            yield tuple(plain[name] for name in self.fields)
