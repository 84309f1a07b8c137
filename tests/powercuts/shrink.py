"""A power cut after which something was lost or wrong, shrunk to the least that must be forgotten for that.

Law: it is tried with copies of what there was before the cut, by one process, so each attempt has one result.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from tests.powercuts.power_cut import Flip, LostBytes, LostNames, Outcome, recorded, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.powercuts.history import Report
    from tests.powercuts.power_cut import Record

T = TypeVar("T")
Lost = LostNames | LostBytes | Flip


class Shrinkable(Protocol):
    """A scene whose last cut can be tried again."""

    report: Report
    record: Record

    def fails(self, image: Path) -> bool: ...


def minimal(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A part of the items with which it still fails, and of which none can be left out (delta debugging).
    `fails` of all of them is taken for granted."""
    left, parts = list(items), 2
    if left and fails([]):
        return []
    while len(left) > 1:
        size = -(-len(left) // parts)
        for at in range(0, len(left), size):
            rest = left[:at] + left[at + size :]
            if fails(rest):
                left, parts = rest, max(2, parts - 1)
                break
        else:
            if parts >= len(left):
                break
            parts = min(len(left), 2 * parts)
    return left


def shrink(cut: Outcome, fails: Callable[[Outcome], bool]) -> Outcome:
    """The least of a cut that still fails: first whole files and directories, then changes and sectors."""
    all_: list[Lost] = [*cut.names, *cut.bytes, *cut.flips]
    kept = minimal(all_, lambda some: fails(_outcome(some)))
    for at, each in enumerate(kept):
        others = kept[:at], kept[at + 1 :]

        def alone(smaller: LostNames | LostBytes, others: tuple[list[Lost], list[Lost]] = others) -> bool:
            return fails(_outcome([*others[0], smaller, *others[1]]))

        if isinstance(each, LostNames):
            kept[at] = _fewer_changes(each, alone)
        elif isinstance(each, LostBytes):
            kept[at] = _fewer_sectors(each, alone)
    return _outcome(kept)


def _outcome(items: Sequence[Lost]) -> Outcome:
    return Outcome(
        [each for each in items if isinstance(each, LostNames)],
        [each for each in items if isinstance(each, LostBytes)],
        [each for each in items if isinstance(each, Flip)],
    )


def _fewer_changes(lost: LostNames, fails: Callable[[LostNames], bool]) -> LostNames:
    """Changes are forgotten from the last one on: the least number of them."""
    for count in range(1, len(lost.changes)):
        fewer = msgspec.structs.replace(lost, changes=lost.changes[-count:])
        if fails(fewer):
            return fewer
    return lost


def _fewer_sectors(lost: LostBytes, fails: Callable[[LostBytes], bool]) -> LostBytes:
    if lost.length is not None:
        whole = msgspec.structs.replace(lost, length=None)
        if fails(whole):
            lost = whole
    sectors = minimal(lost.sectors, lambda some: fails(msgspec.structs.replace(lost, sectors=some)))
    return msgspec.structs.replace(lost, sectors=sectors)


def keep(scene: Shrinkable, folder: Path) -> str:
    """Keep the last cut of a scene after which something was wrong, with what there was before it, what was
    found, and the least of the cut that does it; return that as text."""
    found = str(scene.report)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not scene.record.last.exists():
        return "it was found before the first cut"
    shutil.move(scene.record.last, folder)
    cut, image = recorded(folder), folder / "image"

    def fails(some: Outcome) -> bool:
        replay(folder, some, image)
        return scene.fails(image / "source")

    least = shrink(cut, fails) if fails(cut) else None
    told = "is not found again in the same bytes: it depends on the time" if least is None else f"\n{least}"
    replay(folder, cut if least is None else least, image)
    (folder / "found.txt").write_text(f"{found}\n\nthe least that has to be forgotten {told}\n")
    return f"kept in {folder}; the least that has to be forgotten {told}"
