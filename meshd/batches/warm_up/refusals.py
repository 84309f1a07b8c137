"""Why a node keeps nothing of a plan, in sentences for the user who wanted it warm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshd.transform.decoded_cache.policy import PrefixStatus

CACHE_OFF: Final = (
    "the decoded cache is off: start the node with --decoded-cache auto or a size, and the job with a limit "
    "that is not 0"
)
NO_SPACE: Final = (
    "the disk of the decoded cache is nearly full (a tenth of it, at most 32 GiB, stays free): free some "
    "space, or set decoded-cache-dir to another disk"
)
RANDOM_FIRST: Final = (
    "no field has an op before its first random one, so nothing is the same in every epoch: there is nothing "
    "to keep"
)


def why_nothing(names: Sequence[str], found: Sequence[PrefixStatus], *, rotational: bool) -> str:
    """Return why no result of a plan is kept. `names`: the fields, in the order of `found`."""
    measured = [(name, field) for name, field in zip(names, found, strict=True) if field.cost]
    if not measured:
        return RANDOM_FIRST
    said = "; ".join(
        f"{name}: {field.cost * 1e3:.3g} ms to compute, {field.read * 1e3:.3g} ms to read "
        f"{field.bytes / 1000:.3g} kB back"
        for name, field in measured
    )
    where = " from a rotational disk" if rotational else ""
    help = "; set decoded-cache-dir to a faster disk" if rotational else ""
    return f"nothing is kept, because reading results back{where} would save too little ({said}){help}"
