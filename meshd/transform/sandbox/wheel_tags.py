"""Which wheels of a module a node uses: those for its Python, machine and C library.

Law: names alone decide; no wheel is opened here. A module may bring several wheels of a library, for nodes
that differ.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from meshwire.plan.module_bundle import is_pure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from packaging import tags


class WrongWheelError(Exception):
    """No wheel of a library is for this node."""


@lru_cache(maxsize=1)
def _ranks() -> Mapping[tags.Tag, int]:
    """Return the tags that this interpreter supports, and how specific each is; 0 is the most specific."""
    from packaging import tags  # takes 25 ms to import, which nodes without such modules do not need

    return {tag: rank for rank, tag in enumerate(tags.sys_tags())}


def choose_wheels(names: Iterable[str]) -> list[str]:
    """Return the wheel of each library that suits this node best. Raises WrongWheelError."""
    best: dict[str, tuple[int, str]] = {}
    refused: dict[str, list[str]] = {}
    for name in names:
        library, rank = _rank(name)
        if rank is None:
            refused.setdefault(library, []).append(name)
        elif library not in best or (rank, name) < best[library]:
            best[library] = rank, name
    for library, wheels in refused.items():
        if library not in best:
            raise WrongWheelError(
                f"{' and '.join(wheels)} {'is' if len(wheels) == 1 else 'are'} not for this node, which has "
                f"{_node_tag()}: push a wheel with such tags along, too (pip download --only-binary=:all: "
                "--python-version … --platform …)"
            )
    chosen = {name for _, name in best.values()}
    return [name for name in names if name in chosen]


def _rank(name: str) -> tuple[str, int | None]:
    """Return the library of a wheel, and how well the wheel suits this node; None if it does not."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename  # see `_ranks`

    try:
        library, _, _, found = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return name, 0 if is_pure(name) else None
    ranks = [rank for tag in found if (rank := _ranks().get(tag)) is not None]
    if is_pure(name):
        return library, min(ranks, default=len(_ranks()))
    return library, min(ranks, default=None)


def _node_tag() -> str:
    """Return the tag of wheels that are built for this very node, as text."""
    return str(next(iter(_ranks())))
