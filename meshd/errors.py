"""Errors that any layer may raise and that end as one line for the operator.

Law: a message says what is wrong and what to do about it, and never contains a credential. Packages with
a failure model of their own (config, store, control) define their errors beside their code.
"""

from __future__ import annotations

from typing import Final

OWN_FILES: Final = "all files in the data directory must belong to the user who runs meshd: chown -R"
"""What to do where a file cannot be opened because it belongs to somebody else."""


class MeshdError(Exception):
    """Base of the daemon's own errors. `str()` is one line fit for an operator."""


class DirectoryInUseError(MeshdError):
    """Another daemon holds the data directory's lock."""


class StartupError(MeshdError):
    """The daemon could not start; the message names the part that could not and why."""


class IndexLostError(StartupError):
    """Processes die of reading what lies in memory of a file: the index cannot be read from its device."""


def missing_asset_message(digest: str) -> str:
    """Return the message for a missing asset, the same wherever it is found to be missing."""
    return (
        f"this node does not have the asset sha256:{digest}: what it was made with (a module of ops, a "
        "tokenizer) was removed; push the same file again (mesh op push), or create the plan or view again"
    )
