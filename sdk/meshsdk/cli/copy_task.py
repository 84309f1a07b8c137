"""One copy of `mesh cp` and `mesh sync`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshsdk.cli.path_arguments import Location


@dataclass(frozen=True, slots=True)
class Copy:
    """One object or file to copy; `size` in bytes, None if unknown before reading; `modified_ms` of the
    source.
    """

    source: Location
    target: Location
    size: int | None
    modified_ms: int | None = None
