"""The list of tests that are known to fail, and what a run means in its light.

Law: the list may only shrink. A line is `test name | reason`, or `test name (https) | reason`
for one door only; a reason is ours and says why, not what. A test
that fails and is not listed, and one that is listed and passes, both fail the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LIST = Path(__file__).with_name("known-failures.txt")
PASSED, SKIPPED = "passed", "skipped"
_SHORTEST_REASON = 8


class ListError(ValueError):
    """A line of the list that cannot be read; the message names it."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`new` fail without being listed (name → what was seen), `mended` are listed and pass, `gone` are listed
    and not in the suite (any more)."""

    new: Mapping[str, str]
    mended: tuple[str, ...]
    gone: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether all is as expected."""
        return not (self.new or self.mended or self.gone)


def known(text: str, door: str = "") -> dict[str, str]:
    """Test → reason, of those for `door` and for all; without a door, of all as they are written.

    Lines that are empty or begin with `#` are for the reader. Raises ListError."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, reason = (part.strip() for part in line.partition("|"))
        if len(reason) < _SHORTEST_REASON:
            raise ListError(f"line {number}: {name} needs a reason")
        if name in found:
            raise ListError(f"line {number}: {name} stands twice")
        found[name] = reason
    return (
        found
        if not door
        else {
            name.removesuffix(f" ({door})"): reason
            for name, reason in found.items()
            if " (" not in name or name.endswith(f" ({door})")
        }
    )


def judge(outcomes: Mapping[str, str], listed: Mapping[str, str], *, whole: bool = True) -> Judgement:
    """`whole` is whether all tests were run; only then is a listed test missing."""
    return Judgement(
        {
            name: seen
            for name, seen in outcomes.items()
            if seen not in {PASSED, SKIPPED} and name not in listed
        },
        tuple(sorted(name for name in listed if outcomes.get(name) == PASSED)),
        tuple(sorted(name for name in listed if name not in outcomes)) if whole else (),
    )
