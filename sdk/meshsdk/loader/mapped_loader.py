"""MappedLoader: a function of the trainer's own over the batches of a loader, in threads or processes.

Law: results come in the order of the batches, and the state counts those that were returned; batches that are
taken ahead are taken again after a `break` or a resume. What a function draws at random follows from the
address of the batch.
"""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

import numpy as np

from meshsdk.errors import ClosedError, ConfigurationError
from meshsdk.loader.plain_loader import ResumableLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Executor

    from meshsdk.client.native_api import PlanInfo
    from meshsdk.datasets.batch import Batch

R = TypeVar("R")
_AHEAD: Final = 2  # batches that wait for a worker


class PlannedLoader(ResumableLoader, Protocol):
    """What is mapped: a `Loader`."""

    plan: PlanInfo
    _moves: int

    def set_epoch(self, epoch: int) -> None: ...

    def close(self) -> None: ...


class MappedLoader(Generic[R]):
    """Iterates over the results of a function for each batch; made by `Loader.map`.

    Length, epochs and state are those of the loader, of which nothing else may be iterating meanwhile.
    """

    def __init__(
        self,
        loader: PlannedLoader,
        function: Callable[..., R],
        *,
        workers: int = 1,
        processes: bool = False,
    ) -> None:
        if not callable(function):
            raise ConfigurationError(f"map: {function!r:.80} is not a function of a batch")
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 256:
            raise ConfigurationError(f"map: workers={workers!r}: expected an integer from 1 to 256")
        self.loader = loader
        self._state: dict[str, Any] | None = None  # after the last result of an iteration that is not over
        self._moves = loader._moves  # when that iteration took its last batch
        self._call = _Call(function)
        self._workers, self._processes = workers, processes
        self._process_pool: ProcessPoolExecutor | None = None  # made once: processes take a second to start
        if processes:
            _check_sendable(function)
        self._running: object = None

    def __iter__(self) -> Iterator[R]:
        """Iterate over the rest of the epoch. Raises what the function raises, with a note that names the
        step, and the errors of the loader, after all results before them were returned."""
        self._go_back()
        self._running = running = object()
        return self._iterate(running)

    def _iterate(self, running: object) -> Iterator[R]:
        self._check_current(running)
        pending = deque[tuple[Future[R], dict[str, Any]]]()
        failure: Exception | None = None
        self._state, self._moves, key = self.loader.state_dict(), self.loader._moves, self._key()
        pool, batches = self._pool(), iter(self.loader)
        ended = False
        try:
            while True:
                while not ended and len(pending) < self._workers + _AHEAD:
                    try:
                        batch = next(batches)
                    except StopIteration:
                        ended = True
                    except Exception as error:
                        ended, failure = True, error
                    else:
                        self._moves = self.loader._moves
                        pending.append((self._submit(pool, batch, key), self.loader.state_dict()))
                        del batch  # its slot in the arena is free when its worker is done
                if not pending:
                    break
                future, state = pending.popleft()
                result = future.result()
                del future
                self._state = state
                yield result
                del result
                self._check_current(running)
                if pending and self._moves != self.loader._moves:
                    raise ClosedError("this iteration was ended: its loader was moved to another batch")
            if failure is not None:
                raise failure
            self._state = None
        except BrokenProcessPool as error:
            self._end_processes()
            error.add_note(
                "a process of loader.map ended: it crashed or was killed (for its memory?), or the program "
                "starts a loader when it is imported: begin the script with `if __name__ == '__main__':`"
            )
            raise
        finally:
            for future, _ in pending:
                future.cancel()
            if pool is not self._process_pool:
                pool.shutdown(wait=True)
            batches.close()  # type: ignore[attr-defined]
            if self._running is running:
                self._running = None
                self._go_back()

    def _check_current(self, running: object) -> None:
        if self._running is not running:
            raise ClosedError(
                "this iteration was ended by another one, or by load_state_dict, set_epoch or close"
            )

    def _position(self) -> dict[str, Any]:
        """Return the loader's state, without the batches that were taken ahead."""
        if self._state is None or self._moves != self.loader._moves:  # it was moved since
            return self.loader.state_dict()
        return self._state

    def _go_back(self) -> None:
        """Let the batches that were taken ahead be taken again."""
        state, self._state = self._position(), None
        if self.loader.state_dict() != state:
            self.loader.load_state_dict(state)

    def _key(self) -> tuple[int, int]:
        """Return what seeds the generators. The plan changes with a state whose order is taken over."""
        return int(self.loader.plan.hash[:16], 16), int(self.loader.state_dict()["seed"])

    def _pool(self) -> Executor:
        if not self._processes:
            return ThreadPoolExecutor(self._workers, "mesh-map")
        if self._process_pool is None:
            context = multiprocessing.get_context("spawn")  # a fork would copy the arena's locks as they are
            call = (pickle.dumps(self._call),)
            self._process_pool = ProcessPoolExecutor(self._workers, context, _set_up, call)
        return self._process_pool

    def _end_processes(self) -> None:
        pool, self._process_pool = self._process_pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: Executor, batch: Batch, key: tuple[int, int]) -> Future[R]:
        if self._processes:
            return pool.submit(_called_with, pickle.dumps(batch, 5), key)
        return pool.submit(self._call, batch, key)

    # --- of the loader ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """The epoch of the next result, from 0."""
        return int(self._position()["epoch"])

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last result that was returned."""
        return dict(self._position())

    def load_state_dict(self, state: Mapping[str, Any] | str | bytes) -> None:
        """Resume at the position of a state; this ends a running iteration. Raises as the loader does."""
        self.loader.load_state_dict(state)
        self._running = self._state = None

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch; this ends a running iteration."""
        self.loader.set_epoch(epoch)
        self._running = self._state = None

    def close(self) -> None:
        """Close the loader, and end the processes; this ends a running iteration."""
        self._running = None
        self._end_processes()
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        kind = "processes" if self._processes else "threads"
        return f"MappedLoader({self.loader!r}, {self._call!r}, {self._workers} {kind})"


class _Call(Generic[R]):
    """A function of a batch, or of a batch and a random generator."""

    def __init__(self, function: Callable[..., R]) -> None:
        self._function, self._draws = function, _parameters(function) >= 2

    def __call__(self, batch: Batch, key: tuple[int, int]) -> R:
        try:
            if not self._draws:
                return self._function(batch)
            first = int(batch.positions[0]) if len(batch.positions) else 0
            return self._function(batch, np.random.default_rng([*key, batch.epoch, first]))
        except Exception as error:
            error.add_note(f"in the function of loader.map, for step {batch.step} of epoch {batch.epoch}")
            raise

    def __repr__(self) -> str:
        return str(getattr(self._function, "__qualname__", self._function))


def _parameters(function: Callable[..., Any]) -> int:
    """Return how many arguments a function must be given by position."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a built-in
        return 1
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in by_position and each.default is each.empty for each in found)


def _check_sendable(function: Callable[..., Any]) -> None:
    try:
        pickle.dumps(function)
    except Exception as error:
        raise ConfigurationError(
            "map: a function for processes=True must be one that other processes can import, at the top of "
            f"a module: {error}"
        ) from error


_of_process: list[_Call[Any]] = []


def _set_up(call: bytes) -> None:
    _of_process[:] = [pickle.loads(call)]


def _called_with(batch: bytes, key: tuple[int, int]) -> Any:
    return _of_process[0](pickle.loads(batch), key)
