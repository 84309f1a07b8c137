"""Loader arguments: validation, memory sizes, and the rank from torch.distributed, JAX or the environment.

Law: a bad argument raises a ConfigurationError with its name and the accepted values. Explicit rank and world
take precedence over torch.distributed, that over jax.distributed, and that over RANK and WORLD_SIZE; the
default is one process. Neither torch nor JAX is imported here.
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
    """Return (rank, world size). Raises ConfigurationError if only one is given, or if they are invalid."""
    if (rank is None) != (world is None):
        raise ConfigurationError("rank and world belong together: pass both, or neither")
    if rank is None or world is None:
        rank, world = _from_libraries() or _from_env(os.environ if env is None else env)
    try:
        rank, world = operator.index(rank), operator.index(world)
    except TypeError as error:
        raise ConfigurationError(f"rank={rank!r}, world={world!r}: both must be integers") from error
    if world < 1:
        raise ConfigurationError(f"world={world}: expected the number of ranks, at least 1")
    if not 0 <= rank < world:
        raise ConfigurationError(f"rank {rank} of {world}: rank must be between 0 and world - 1")
    return rank, world


def check_rank_unchanged(rank: int, world: int, *, found: bool, whole: bool = False) -> None:
    """Check a rank that was `found`, not given, against torch.distributed or jax.distributed, which may have
    been initialized since, perhaps in another process that was sent the loader. `whole`: all batches of the
    rank are about to be loaded, so that this must not be one of several workers.

    Raises ConfigurationError if it differs: otherwise each process would load all rows as if it were alone.
    """
    if found and whole:
        check_not_one_of_workers()
    now = _from_libraries() if found else None
    if now is not None and now != (rank, world):
        raise ConfigurationError(
            f"this loader was created for rank {rank} of {world}, before the processes met, but this process "
            f"is rank {now[0]} of {now[1]}: create the loader after torch's init_process_group or "
            "jax.distributed.initialize, or pass rank= and world="
        )


def check_not_one_of_workers() -> None:
    """Raise ConfigurationError in one of several workers of torch's DataLoader, each of which would load all
    batches."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise ConfigurationError(
            f"each of the {worker.num_workers} workers of this DataLoader would load all batches: pass "
            "loader.as_iterable() to the DataLoader, leave num_workers out, or give each worker a loader "
            "of its own with rank= and world="
        )


def _from_libraries() -> tuple[int, int] | None:
    return _from_torch() or _from_jax()


def _from_jax() -> tuple[int, int] | None:
    """Return JAX's number of this process, if the program has called jax.distributed.initialize."""
    jax = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if jax is None or is_initialized is None or not is_initialized():
        return None
    return jax.process_index(), jax.process_count()


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
        return int(rank or ""), int(world or "")  # only one is an error: each process would be rank 0
    except ValueError as error:
        raise ConfigurationError(
            f"RANK={rank!r} and WORLD_SIZE={world!r} must both be numbers (torchrun sets them); "
            "or pass rank= and world="
        ) from error


DEFAULT_PREFETCH = 256 << 20
_FRAME_OVERHEAD = 16 << 10
_Taken = ParamSpec("_Taken")
_Given = TypeVar("_Given")

_NO_WORKERS = "leave it out: nodes prepare the batches, and prefetch_bytes limits prefetching"
_NO_SAMPLER = (
    "leave it out: use shuffle=, rank= and world= for order and distribution, ds.filter and mesh.mix to "
    "choose samples"
)
# Arguments of torch's DataLoader, and what to use instead.
FOREIGN_ARGUMENTS = {
    "batch_size": "global_batch is the number of rows of a step over all ranks",
    "drop_last": "tail='drop' leaves the last batch out",
    "num_workers": _NO_WORKERS,
    "prefetch_factor": _NO_WORKERS,
    "persistent_workers": _NO_WORKERS,
    "multiprocessing_context": _NO_WORKERS,
    "worker_init_fn": "leave it out: randomness is keyed by seed, epoch and position",
    "generator": "order and random ops depend only on seed=",
    "sampler": _NO_SAMPLER,
    "batch_sampler": _NO_SAMPLER,
    "collate_fn": "leave it out: batches are already collated; apply your function to the batch",
    "pin_memory": "device='cuda' receives into pinned memory and copies batches to the GPU",
    "world_size": "world= is the number of ranks",
    "num_replicas": "world= is the number of ranks",
    "transform": "transforms belong to the dataset: ds.map(ops.decode('image'), …)",
    "dtype": "the ops determine the dtype: use ops.cast, or normalize=mesh.Normalize('image')",
    "timeout": "deadline= is the number of seconds for which an unavailable server is retried",
}


def explain_foreign_arguments(function: Callable[_Taken, _Given]) -> Callable[_Taken, _Given]:
    """Decorate a function that is called with arguments of other libraries: it raises a TypeError that says
    what to write instead of each."""

    @functools.wraps(function)
    def told(*args: _Taken.args, **kwargs: _Taken.kwargs) -> _Given:
        if wrong := [name for name in kwargs if name in FOREIGN_ARGUMENTS]:
            words = "; no argument ".join(f"{name}: {FOREIGN_ARGUMENTS[name]}" for name in wrong)
            raise TypeError(f"{function.__qualname__.split('.')[0]} has no argument {words}")
        return function(*args, **kwargs)

    return told


def checked_dataset(dataset: object) -> None:
    """Check that the argument is a Dataset. A URL is a common mistake. Raises ConfigurationError."""
    from meshsdk.datasets.dataset import Dataset

    if not isinstance(dataset, Dataset):
        raise ConfigurationError(
            f"a Loader loads a dataset, not {_short(dataset)}: write ds = mesh.open('s3://photos/train') and "
            "mesh.Loader(ds, global_batch=…). For a part of a dataset use ds.filter(…) or ds.split(…), for "
            "several mesh.mix(…)"
        )


def checked_batch(batch: SupportsIndex, world: int) -> int:
    """Check `global_batch`: an integer, with at least one row per rank. Raises ConfigurationError."""
    found = _integer(batch)
    if found is None or found < 1:
        raise ConfigurationError(
            f"global_batch={batch!r}: expected the rows of a step over all ranks, an integer above 0"
        )
    if found < world:
        raise ConfigurationError(
            f"global_batch={found} is less than {world} ranks, so some would get no row: raise it"
        )
    return found


def checked_verify(verify: object) -> Literal[True, False, "all"]:
    """Check `verify`: which frames have their checksums verified. Raises ConfigurationError."""
    if isinstance(verify, bool | np.bool_):
        return bool(verify)
    if verify == "all":
        return "all"
    raise ConfigurationError(
        f"verify={verify!r}: use True (frames from the network), 'all' (shared memory too) or False (none)"
    )


def checked_seed(seed: int) -> int:
    """Return `seed` with a numpy integer as a Python one, for JSON; the plan rejects other types."""
    found = _integer(seed)
    return seed if found is None else found


def checked_connections(count: SupportsIndex) -> int:
    """Check `connections`, the number of requests in flight. Raises ConfigurationError."""
    found = _integer(count)
    if found is None or not 1 <= found <= 64:
        raise ConfigurationError(
            f"connections={count!r}: expected an integer from 1 to 64; 4 saturate a 100 Gb/s link"
        )
    return found


def checked_share(name: str | None) -> str | None:
    """Check `share`, the common name of jobs that share batches. Raises ConfigurationError."""
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"share={name!r}: expected a name, such as 'sweep-42'")
    return name


def checked_cache(cache: str | int) -> int | None:
    """Return the bytes that each node may keep of decoded samples; None if it decides, 0 for none.

    Raises ConfigurationError.
    """
    if isinstance(cache, str):
        found = {"off": 0}.get(cache)
    else:
        found = None if isinstance(cache, bool) else _integer(cache)
    if cache != "auto" and (found is None or not 0 <= found < 10**18):
        raise ConfigurationError(
            f"cache={cache!r}: use 'auto', 'off', or the number of bytes that a node may keep for this plan"
        )
    return found


def checked_steps(steps: int, batch: int, positions: int, tail: str) -> str:
    """Return the warning for a batch that is larger than an epoch; "" for others. `steps`: of an epoch.

    Raises ConfigurationError for an epoch without a step.
    """
    if steps == 0:
        raise ConfigurationError(
            f"an epoch of {positions} rows has no full batch of {batch}, and tail='drop' leaves the rest "
            "out: lower global_batch, or use tail='pad'"
        )
    if batch <= positions or tail != "pad":
        return ""
    return (
        f"global_batch={batch} is more than the {positions} samples of an epoch, so the rest of each batch "
        "is padding (batch.status 3): lower it, or use tail='ragged'"
    )


def lost_position_hint(epoch: int, position: int) -> str:
    """Return the warning for a program that resumes and then calls `set_epoch`, as torch's samplers need."""
    return (
        f"set_epoch({epoch}) returns to the beginning of the epoch, so the rows before position {position}, "
        "where the loaded state is, will come again. Remove the call: a loader knows its epoch, and each "
        "`for` is the next one"
    )


def may_split_frames(rows_from: str) -> bool:
    """Return whether `rows_from` allows each node to send its own rows. Raises ConfigurationError."""
    if rows_from not in ("owners", "one"):
        raise ConfigurationError(f"rows_from={rows_from!r}: use 'owners' or 'one'")
    return rows_from == "owners"


def checked_normalize(normalize: Normalize | None, fields: Mapping[str, FieldSchema]) -> None:
    """Check that `normalize` names a field of uint8 images of one size. Raises ConfigurationError."""
    if normalize is None:
        return
    name = normalize.field
    if name not in fields:
        raise ConfigurationError(f"normalize: no field {name!r}; a batch has {', '.join(fields)}")
    field = fields[name]
    if field.dtype != "uint8" or field.shape is None or len(field.shape) != 3:
        shape = "ragged" if field.shape is None else list(field.shape)
        raise ConfigurationError(
            f"normalize: {name!r} must be uint8 images of one size, but is {field.dtype} {shape}: decode it, "
            "resize or crop it, and leave ops.normalize out"
        )


def frame_bytes(fields: Mapping[str, FieldSchema], rows: int) -> int:
    """Return the bytes of a frame of `rows` rows; 0 if they are unknown because of a ragged field."""
    total = _FRAME_OVERHEAD + 16 * rows
    for field in fields.values():
        if field.shape is None:
            return 0
        width = 2 if field.dtype == "bfloat16" else np.dtype(field.dtype).itemsize
        total += rows * prod(field.shape) * width
    return total


def arena_bytes(prefetch_bytes: SupportsIndex | None, slot: int) -> int:
    """Return the arena's size in bytes: `prefetch_bytes`, or by default 256 MiB and at least four slots.

    Raises ConfigurationError.
    """
    if prefetch_bytes is None:
        return max(DEFAULT_PREFETCH, 4 * slot)
    found = _integer(prefetch_bytes)
    if found is None or found < 1:
        raise ConfigurationError(
            f"prefetch_bytes={prefetch_bytes!r}: expected the arena's size in bytes, such as 256 << 20"
        )
    return found


def small_arena_hint(budget: int, slot: int) -> str:
    """Return the warning for an arena too small to prefetch a single batch; "" for others."""
    if budget >= 2 * slot:
        return ""
    return (
        f"prefetch_bytes={budget} has no room for a second batch of {slot} bytes, so nothing is prefetched: "
        f"pass {4 * slot} or more, or leave it out"
    )


def _integer(value: object) -> int | None:
    """Return the value as an int if it is an integer, else None; numpy integers are, True and 8.0 are not."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    return operator.index(value)


def _short(value: object) -> str:
    return repr(value) if isinstance(value, str) else type(value).__name__
