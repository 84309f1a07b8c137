"""Which part of the global batch this process takes.

Law: arguments win over torch.distributed, which wins over RANK and WORLD_SIZE; else it is one process of one.
torch is not imported for it: a process that uses torch.distributed has imported it already.
"""

from __future__ import annotations

import operator
import os
import sys
from typing import TYPE_CHECKING

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping


def find_rank(
    rank: int | None = None, world: int | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """(rank, world size); ConfigurationError when only one is given, or they make no sense together."""
    if (rank is None) != (world is None):
        raise ConfigurationError("rank and world belong together: pass both, or neither")
    if rank is None or world is None:
        rank, world = _from_torch() or _from_env(os.environ if env is None else env)
    try:
        rank, world = operator.index(rank), operator.index(world)
    except TypeError as error:
        raise ConfigurationError(f"rank={rank!r}, world={world!r}: both are integers") from error
    if world < 1:
        raise ConfigurationError(f"world={world}: the number of ranks, at least 1")
    if not 0 <= rank < world:
        raise ConfigurationError(f"rank {rank} of {world}: rank counts from 0 to world - 1")
    return rank, world


def check_still(rank: int, world: int) -> None:
    """Of a rank that was found: raises ConfigurationError where torch.distributed, initialised since, says
    another. Each process would go on as if it were alone."""
    now = _from_torch()
    if now is not None and now != (rank, world):
        raise ConfigurationError(
            f"this loader takes the part of rank {rank} of {world}, as it was made before torch.distributed "
            f"was initialised, and this is rank {now[0]} of {now[1]}: make it after init_process_group, or "
            "pass rank= and world="
        )


def _from_torch() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _from_env(env: Mapping[str, str]) -> tuple[int, int]:
    rank, world = env.get("RANK"), env.get("WORLD_SIZE")
    if rank is None and world in (None, "1"):
        return 0, 1
    try:
        return int(rank or ""), int(world or "")  # one alone: each process would take itself for the first
    except ValueError as error:
        raise ConfigurationError(
            f"RANK={rank!r} and WORLD_SIZE={world!r} must both be numbers (torchrun sets them); "
            "or pass rank= and world="
        ) from error
