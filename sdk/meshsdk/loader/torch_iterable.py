"""A loader as torch's IterableDataset, for code that requires a `DataLoader` with workers.

Law: of k workers, worker w reads the steps w, w + k, …; DataLoader restores the order, and each batch comes
once.
Invariant: all processes share the count of finished epochs and the loader's last move in anonymous memory, so
the next `for` is the next epoch, or where the loader was moved to; the memory is freed with the last process
that uses it.
"""

from __future__ import annotations

import os
import struct
import weakref
from functools import partial
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from meshsdk.client.arena import open_descriptor
from meshsdk.datasets.batch import Batch
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from weakref import WeakSet

    from meshsdk.loader.epoch_iterator import Position

_WORKERS = 1024
_PASSES = struct.Struct("=qq")  # the loader's count of moves, and the epochs finished since the last move
_ENDED = struct.Struct("=qq")  # per worker: seed and number of the last epoch that it finished
_MOVE = struct.Struct("=6q32s")  # the loader's count of moves, its position's numbers, its plan's hash
_MOVE_OFFSET = _PASSES.size + _WORKERS * _ENDED.size
_OTHER_PLAN = (
    "the loader has loaded a state of another order, which persistent workers cannot follow: create a new "
    "DataLoader, or pass shuffle= to the loader as in the job that wrote the state"
)


def _one_batch(batches: Sequence[Batch], *, collate_fn_map: Any = None) -> Batch:
    """Collate a Batch for torch's default_collate: it is a batch already."""
    if len(batches) != 1:
        raise ConfigurationError(
            "the loader already returns batches: leave DataLoader's batch_size out, or pass 1"
        )
    return batches[0]


default_collate_fn_map[Batch] = _one_batch


class EpochCounter:
    """Counts the epochs that the workers of all processes have finished together, and tells workers that stay
    where their loader was moved to.

    No lock is needed: each write is one system call, and the last worker to finish an epoch counts it; if
    several workers count it, they write the same value.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Raises ConfigurationError if the process may have no more descriptors."""
        shared = partial(os.memfd_create, "mesh-passes", os.MFD_CLOEXEC)
        self._fd = open_descriptor(shared) if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self._fd, _MOVE_OFFSET + _MOVE.size)
        weakref.finalize(self, os.close, self._fd)

    def epochs_since(self, moves: int) -> int:
        """Return the number of epochs finished since the loader's last move."""
        base, count = _PASSES.unpack(os.pread(self._fd, _PASSES.size, 0))
        return int(count) if base == moves else 0

    def record_epoch(self, moves: int, count: int, part: int, parts: int, mark: tuple[int, int]) -> None:
        """Record that worker `part` of `parts` finished its share of an epoch.

        `mark` identifies the epoch; `count` epochs were finished since the last of the loader's `moves`.
        """
        os.pwrite(self._fd, _ENDED.pack(*mark), _PASSES.size + part * _ENDED.size)
        marks = _ENDED.iter_unpack(os.pread(self._fd, parts * _ENDED.size, _PASSES.size))
        if all(other == mark for other in marks):
            os.pwrite(self._fd, _PASSES.pack(moves, count + 1), 0)

    def record_move(self, moves: int, place: Position) -> None:
        """Record the position to which the loader was moved, and its number of moves."""
        plan = bytes.fromhex(place.state.plan)
        os.pwrite(self._fd, _MOVE.pack(moves, *place.numbers, plan), _MOVE_OFFSET)

    def last_move(self) -> tuple[int, tuple[int, ...], str]:
        """Return the number of moves, the numbers of the position, and the hash of the plan; zeros if the
        loader was not moved."""
        moves, *numbers, plan = _MOVE.unpack(os.pread(self._fd, _MOVE.size, _MOVE_OFFSET))
        return moves, tuple(numbers), plan.hex()

    def __repr__(self) -> str:
        base, count = _PASSES.unpack(os.pread(self._fd, _PASSES.size, 0))
        return f"EpochCounter({count} since move {base})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_counter, (DupFd(self._fd),)  # only while a process is being started


def _attach_counter(descriptor: Any) -> EpochCounter:
    return EpochCounter(cast("int", descriptor.detach()))


class SharedLoader(Protocol):
    """What worker processes need of a `Loader`, of which each has a copy."""

    device: str | None
    _moves: int
    _place: Position
    _followers: WeakSet[LoaderIterable]

    @property
    def _under_way(self) -> int: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def part(self, passes: int, part: int, parts: int) -> Iterator[Batch]: ...


class LoaderIterable(IterableDataset):
    """A loader as an IterableDataset; created by `Loader.as_iterable`.

    With workers, after a `break` the next `for` starts the same epoch again, unless the loader was moved in
    between (`seek`, `set_epoch`, `load_state_dict`).
    """

    def __init__(self, loader: SharedLoader) -> None:
        self.loader = loader
        self._passes = EpochCounter()
        self._number, self._pid = 0, os.getpid()
        loader._followers.add(self)

    def loader_moved(self) -> None:
        """Called when `seek`, `set_epoch`, `skip` or `load_state_dict` moved the loader."""
        if self._pid == os.getpid():  # not by a fork's copy of the loader
            self._passes.record_move(self.loader._moves, self.loader._place)

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        if worker is None:
            return iter(self.loader)
        device = self.loader.device
        if device not in (None, "cpu"):
            raise ConfigurationError(
                f"device={device!r} with num_workers={worker.num_workers}: GPU tensors cannot be passed "
                "between processes. Leave num_workers out: the loader copies while the GPU computes"
            )
        return self._part(worker.id, worker.num_workers, worker.seed - worker.id)

    def _part(self, part: int, parts: int, seed: int) -> Iterator[Batch]:
        if parts > _WORKERS:
            raise ConfigurationError(f"num_workers={parts}: at most {_WORKERS} are supported; none is needed")
        if self._number:  # this worker stays: its copy of the loader is as old as the first `for`
            self._follow()
        moves, self._number = self.loader._moves, self._number + 1
        count = self._passes.epochs_since(moves)
        yield from self.loader.part(count, part, parts)
        self._passes.record_epoch(moves, count, part, parts, (seed, self._number))

    def _follow(self) -> None:
        """Move this worker's copy of the loader to where the loader was moved to."""
        moves, numbers, plan = self._passes.last_move()
        if moves <= self.loader._moves:
            return
        if plan != self.loader._place.state.plan:
            raise ConfigurationError(_OTHER_PLAN)
        self.loader._place, self.loader._moves = self.loader._place.at_numbers(*numbers), moves

    def __len__(self) -> int:
        if self._passes.epochs_since(self.loader._moves):
            return len(self.loader)
        return self.loader._under_way
