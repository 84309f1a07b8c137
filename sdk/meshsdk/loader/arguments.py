"""Loader arguments: validation, memory sizes, and the rank from torch.distributed or the environment.

Law: a bad argument is a ConfigurationError with its name and the accepted values. Explicit rank and
world win over torch.distributed, which wins over RANK and WORLD_SIZE; the default is one process. torch
is never imported here.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from math import prod
from typing import TYPE_CHECKING, Literal, ParamSpec, SupportsIndex, TypeVar

import numpy as np

from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from meshsdk.client.native_api import FieldSchema
    from meshsdk.loader.output_stage import Normalize


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


def check_rank_unchanged(rank: int, world: int) -> None:
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


DEFAULT_PREFETCH = 256 << 20
_FRAME_OVERHEAD = 16 << 10
_Taken = ParamSpec("_Taken")
_Given = TypeVar("_Given")

_NO_WORKERS = "leave it out: nodes prepare batches, and prefetch_bytes bounds what is asked ahead"
_NO_SAMPLER = "leave it out: shuffle=, rank= and world= say who gets what; ds.filter and mesh.mix, of what"
# What torch's DataLoader calls otherwise, or does where a loader has nothing to do.
FOREIGN_ARGUMENTS = {
    "batch_size": "global_batch is the rows of a step over all ranks",
    "drop_last": "tail='drop' leaves the last batch out",
    "num_workers": _NO_WORKERS,
    "prefetch_factor": _NO_WORKERS,
    "persistent_workers": _NO_WORKERS,
    "multiprocessing_context": _NO_WORKERS,
    "worker_init_fn": "leave it out: randomness is keyed by seed, epoch and position",
    "generator": "seed= is all that order and random ops depend on",
    "sampler": _NO_SAMPLER,
    "batch_sampler": _NO_SAMPLER,
    "collate_fn": "leave it out: batches come collated; what more there is to do, do to the batch",
    "pin_memory": "device='cuda' has an arena of pinned memory, and copies batches to the GPU",
    "world_size": "world= is the number of ranks",
    "num_replicas": "world= is the number of ranks",
    "transform": "what is done to samples is the dataset's: ds.map(ops.decode('image'), …)",
    "dtype": "batches have the types that the ops leave: ops.cast, or normalize=mesh.Normalize('image')",
    "timeout": "deadline= is how many seconds an unavailable server is waited for",
}


def explain_foreign_arguments(
    elsewhere: Mapping[str, str],
) -> Callable[[Callable[_Taken, _Given]], Callable[_Taken, _Given]]:
    """Makes a function say of arguments that it does not take, but others of its kind do, what to write.
    Raises the TypeError that they are."""

    def made(function: Callable[_Taken, _Given]) -> Callable[_Taken, _Given]:
        @functools.wraps(function)
        def told(*args: _Taken.args, **kwargs: _Taken.kwargs) -> _Given:
            if wrong := [name for name in kwargs if name in elsewhere]:
                words = "; no ".join(f"{name}: {elsewhere[name]}" for name in wrong)
                raise TypeError(f"{function.__qualname__.split('.')[0]} takes no {words}")
            return function(*args, **kwargs)

        return told

    return made


def checked_dataset(dataset: object) -> None:
    """What is to be loaded: often enough its URL is given."""
    from meshsdk.datasets.dataset import Dataset

    if not isinstance(dataset, Dataset):
        raise ConfigurationError(
            f"a Loader loads a dataset, not {_short(dataset)}: ds = mesh.open('s3://photos/train'), "
            "then mesh.Loader(ds, global_batch=…); parts of it are ds.filter(…) and ds.split(…), several "
            "together mesh.mix(…)"
        )


def checked_batch(batch: SupportsIndex, world: int) -> int:
    """`global_batch`: a row for each rank at least."""
    found = _integer(batch)
    if found is None or found < 1:
        raise ConfigurationError(
            f"global_batch={batch!r}: the rows of a step over all ranks, an integer above 0"
        )
    if found < world:
        raise ConfigurationError(f"global_batch={found} is less than {world} ranks: some would get no row")
    return found


def checked_verify(verify: object) -> Literal[True, False, "all"]:
    """`verify`: of which frames checksums are looked at."""
    if isinstance(verify, bool | np.bool_):
        return bool(verify)
    if verify == "all":
        return "all"
    raise ConfigurationError(
        f"verify={verify!r}: True (what was sent), 'all' (shared memory too) or False (nothing)"
    )


def checked_seed(seed: int) -> int:
    """`seed`: an integer of numpy's as one of Python's, which JSON knows; what is none the plan refuses."""
    found = _integer(seed)
    return seed if found is None else found


def checked_connections(count: SupportsIndex) -> int:
    """`connections`: requests in flight."""
    found = _integer(count)
    if found is None or not 1 <= found <= 64:
        raise ConfigurationError(f"connections={count!r}: 1 to 64; 4 keep a 100 Gb/s link busy")
    return found


def checked_share(name: str | None) -> str | None:
    """`share`: the name jobs meet under."""
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"share={name!r}: a name, as 'sweep-42'")
    return name


def oversized_batch_hint(batch: int, positions: int, tail: str) -> str:
    """What is to be told of a batch that no epoch fills; nothing of others."""
    if batch <= positions or tail != "pad":
        return ""
    return (
        f"global_batch={batch} is more than the {positions} samples of an epoch: the rest of each batch is "
        "padding (batch.status 3); lower it, or use tail='ragged'"
    )


def lost_position_hint(epoch: int, position: int) -> str:
    """What is to be told of a program that resumes, and then begins the epoch again as it would have to with
    torch's samplers."""
    return (
        f"set_epoch({epoch}) goes back to the epoch's beginning: the state that was loaded is at position "
        f"{position} of it, and what is before comes again. Leave set_epoch out: a loader knows its epoch, "
        "and each `for` is the next one"
    )


def may_split_frames(rows_from: str) -> bool:
    """`rows_from`: whether nodes may be asked for their rows each."""
    if rows_from not in ("owners", "one"):
        raise ConfigurationError(f"rows_from={rows_from!r}: 'owners' or 'one'")
    return rows_from == "owners"


def checked_normalize(normalize: Normalize | None, fields: Mapping[str, FieldSchema]) -> None:
    """`normalize`: of a field of uint8 images of one size that batches have."""
    if normalize is None:
        return
    name = normalize.field
    if name not in fields:
        raise ConfigurationError(f"normalize: no field {name!r}; a batch has {', '.join(fields)}")
    field = fields[name]
    if field.dtype != "uint8" or field.shape is None or len(field.shape) != 3:
        shape = "of unequal rows" if field.shape is None else list(field.shape)
        raise ConfigurationError(
            f"normalize: {name!r} must be uint8 images of one size, and is {field.dtype} {shape}: decode it, "
            "resize or crop it, and leave ops.normalize out"
        )


def frame_bytes(fields: Mapping[str, FieldSchema], rows: int) -> int:
    """Bytes of a frame of `rows`; 0 when a ragged field leaves them unknown."""
    total = _FRAME_OVERHEAD + 16 * rows
    for field in fields.values():
        if field.shape is None:
            return 0
        width = 2 if field.dtype == "bfloat16" else np.dtype(field.dtype).itemsize
        total += rows * prod(field.shape) * width
    return total


def arena_bytes(prefetch_bytes: SupportsIndex | None, slot: int) -> int:
    """`prefetch_bytes`, or what is taken without: four slots at least."""
    if prefetch_bytes is None:
        return max(DEFAULT_PREFETCH, 4 * slot)
    found = _integer(prefetch_bytes)
    if found is None or found < 1:
        raise ConfigurationError(
            f"prefetch_bytes={prefetch_bytes!r}: the arena's size in bytes, an integer above 0, as 256 << 20"
        )
    return found


def small_arena_hint(budget: int, slot: int) -> str:
    """What is to be told of an arena without room for a batch beside the one at hand; nothing of others."""
    if budget >= 2 * slot:
        return ""
    return (
        f"prefetch_bytes={budget} has no room for a batch of {slot} bytes beside the one at hand, so none is "
        f"asked for ahead: give {4 * slot} or more, or leave it out"
    )


def _integer(value: object) -> int | None:
    """It, if it is one; numpy's are, True and 8.0 are not."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    return operator.index(value)


def _short(value: object) -> str:
    return repr(value) if isinstance(value, str) else type(value).__name__
