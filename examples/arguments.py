"""The examples' command lines: --help tells what is taken where nothing is said.

Law: what makes no sense is refused before anything is opened.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Those that there are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def command_line(program: str, about: str | None) -> argparse.ArgumentParser:
    """A parser; `about`: a module's docstring, of which the first line is shown."""
    first = (about or "").partition("\n")[0]
    return argparse.ArgumentParser(prog=program, description=first, formatter_class=_Defaults)


def positive(text: str) -> int:
    """An integer above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def show_progress(text: str) -> None:
    """Show where a terminal's user is, in one line that the next one replaces; "" ends it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}" if text else "", end="" if text else "\n", file=sys.stderr, flush=True)


def run(main: Callable[[], object]) -> None:
    """An example as a command: Ctrl-C ends it without a word, and with the shell's code for it."""
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
