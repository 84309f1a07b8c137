"""Arguments of a dataset's structure methods: which make sense, and what is to be told of those that do.

Law: pure; an argument that makes no sense is a ConfigurationError that says what to write. What only the
node can know (names, classes) it says itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from meshsdk.native import SnapshotInfo


def checked_on(on: object) -> str | list[str] | None:
    """`on` of a join: an expression for both sides, or one for each."""
    if on is None or isinstance(on, str):
        return on
    if isinstance(on, (tuple, list)) and len(on) == 2 and all(isinstance(each, str) for each in on):
        return list(on)
    raise ConfigurationError(
        f"join: on={on!r}: an expression, as on='stem', or two, of this side and of the other: "
        "on=('stem', 'part(name, \"_\", 0)')"
    )


def checked_by(by: object) -> None:
    """`by` of a split: an expression."""
    if not isinstance(by, str):
        raise ConfigurationError(f"split: by={by!r}: an expression, as by='part(name, \"_\", 0)'")


def checked_classes(maps: Mapping[str, object]) -> dict[str, dict[str, str | None]]:
    """The new names of classes, by field."""
    found = {}
    for field, classes in maps.items():
        if not isinstance(classes, Mapping):
            raise ConfigurationError(
                "relabel takes new names of classes by old ones, as "
                f"ds.relabel({field}={{'tabby': 'cat', 'rest': None}}); got {type(classes).__name__}"
            )
        found[field] = dict(classes)
    return found


def nothing_left_out(expression: str, snapshot: SnapshotInfo) -> str:
    """What is to be told of a filter that holds for all samples, as one of another kind of value does."""
    name = next((name for name, field in snapshot.fields.items() if field.classes and name in expression), "")
    label = f"{name} is its class's name here, as {snapshot.fields[name].classes[0]!r}; " if name else ""
    return (
        f"filter({expression!r}) leaves nothing out: it holds for all {snapshot.samples} samples. {label}a "
        "text never equals a number (number(…) makes one of it)"
    )
