"""Phrases that messages of every package share: lists in words, and the error of a process without free file
descriptors.

Law: pure text; nothing is printed or logged here.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Final

if sys.platform != "win32":
    import resource  # now: without descriptors, nothing can be imported

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_MOST_NAMED: Final = 5
_EXHAUSTED: Final = (os.strerror(errno.EMFILE), os.strerror(errno.ENFILE))


def word_list(items: Collection[object]) -> str:
    """Return the items as a phrase, such as `1, 2 and 3`; of more than five, it ends with how many more there
    are."""
    words = [str(item) for item in items]
    if len(words) > _MOST_NAMED:
        words = [*words[:_MOST_NAMED], f"{len(words) - _MOST_NAMED} more"]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def open_files_message(error: BaseException) -> str | None:
    """Return what to do if an error, or one that it follows from, means that the process or the machine has
    no file descriptors left; None for any other error. Libraries such as LMDB raise errors of their own with
    the system's text."""
    for each in _chain(error):
        number = each.errno if isinstance(each, OSError) else None
        if number == errno.ENFILE or (number is None and _EXHAUSTED[1] in str(each)):
            return (
                "too many open files on this machine: its kernel allows no more; stop other programs, or "
                "raise the limit with `sysctl fs.file-max`"
            )
        if number == errno.EMFILE or (number is None and _EXHAUSTED[0] in str(each)):
            return f"too many open files: the limit of this process is {_limit()}; raise it with `ulimit -n`"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and the members of groups; each once."""
    seen, found = set[int](), [error]
    while found:
        each = found.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            inner = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            found += [other for other in (each.__context__, each.__cause__, *inner) if other is not None]


def _limit() -> str:
    if sys.platform == "win32":
        return "reached"
    return str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
