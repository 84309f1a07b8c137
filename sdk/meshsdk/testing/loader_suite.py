"""The guarantees of a loader as tests: subclass the suite, provide `loader`, and pytest collects the class.

Law: rows are compared byte by byte with those of a single undisturbed rank; ranks exchange no data. Every
dataset, order, mix and bad-sample policy must pass all tests.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from meshsdk.datasets.batch import Ragged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from meshsdk.datasets.batch import Batch
    from meshsdk.loader.loader import Loader

PAD = 3
Row = tuple[int, int, str]
"""Position, status and content of a row."""


class LoaderSuite:
    """Tests that your loaders keep their guarantees; subclass it and override `loader`.

    The tests cover: identical batches for every world size, resuming after any step and with another world or
    batch size, `at`, `seek` and `skip`, concurrent ranks, and sharing jobs.

    Attributes:
        batch: rows of a global batch; at least 16.
        ranks: world sizes to run concurrently, one thread per rank; none larger than `batch`.
        every_row: whether an epoch has all its positions; set it to False if bad samples are dropped.
    """

    batch: ClassVar[int] = 16
    ranks: ClassVar[Sequence[int]] = (2, 7, 16)
    every_row: ClassVar[bool] = True

    def loader(self, batch: int, rank: int = 0, world: int = 1, share: str | None = None) -> Loader:
        """Return a new loader at the beginning of epoch 0.

        Its plan must always be the same, with tail="pad", six or more steps of `batch` rows, and a last step
        that is not full.
        """
        raise NotImplementedError

    def events(self) -> Mapping[int, Callable[[], object]]:
        """Return what to do before which step of an epoch, such as killing a node; nothing by default."""
        return {}

    def test_an_epoch_is_the_same_whatever_happens_in_it(self) -> None:
        whole, events, found = self.epoch(1), self.events(), []
        with self.loader(self.batch) as one:
            for batch in one:
                found.append(rows(batch))
                events.get(batch.step + 1, lambda: None)()
        assert found == whole

    def test_a_global_batch_is_the_same_for_every_world(self) -> None:
        whole = self.epoch(1)
        for world in self.ranks:
            assert self.epoch(world) == whole

    def test_an_epoch_has_each_position_once(self) -> None:
        with self.loader(self.batch) as one:
            positions = [row[0] for step in steps_of(one) for row in step if row[1] != PAD]
            assert positions == sorted(set(positions))
            assert not self.every_row or positions == list(range(one.plan.positions))

    def test_epochs_follow_each_other_and_differ_in_what_is_random_only(self) -> None:
        with self.loader(self.batch) as one:
            epochs = [steps_of(one) for _ in range(2)]
            assert (one.epoch, one.step, one.remaining) == (2, 0, len(one))
            one.seek(1)
            assert steps_of(one) == epochs[1]
        assert len(epochs[0]) == len(epochs[1])

    def test_stop_after_any_step_and_resume(self) -> None:
        with self.loader(self.batch) as one:
            whole = [steps_of(one) for _ in range(2)]
            count = len(one)
        for stop in range(count + 1):
            with self.loader(self.batch) as one, self.loader(self.batch) as other:
                first = [rows(batch) for batch in itertools.islice(one, stop)]
                state = json.loads(json.dumps(one.state_dict()))
                other.load_state_dict(state)
                assert len(json.dumps(state)) < 300
                if stop == count:  # the end of an epoch is the beginning of the next
                    assert (state["epoch"], state["position"]) == (1, 0)
                    assert first + steps_of(other) == whole[0] + whole[1]
                else:
                    assert other.remaining == count - stop
                    assert first + steps_of(other) == whole[0]

    def test_the_world_goes_from_8_to_5_to_16_in_mid_epoch(self) -> None:
        whole = self.epoch(1) + self.epoch(1, 1)
        found: list[list[Row]] = []
        state: dict[str, Any] | None = None
        for world, stop in ((8, 2), (5, 4), (16, None)):
            parts, states = [], []
            for rank in range(world):
                with self.loader(self.batch, rank, world) as one:
                    if state is not None:
                        one.load_state_dict(state)
                    count = len(one) + one.remaining if stop is None else stop - len(found)
                    parts.append([rows(batch) for batch in itertools.islice(forever(one), count)])
                    states.append(one.state_dict())
            state = states[0]
            assert all(other == state for other in states)
            found += together(parts)
        assert found == whole

    def test_another_global_batch_on_resume_goes_on_with_the_next_row(self) -> None:
        whole = [row for step in self.epoch(1) for row in step if row[1] != PAD]
        with self.loader(self.batch) as one:
            first = [rows(batch) for batch in itertools.islice(one, 2)]
            state = one.state_dict()
        for batch in (self.batch // 2 + 1, self.batch * 2):
            parts = []
            for rank in range(3):
                with self.loader(batch, rank, 3) as other:
                    other.load_state_dict(state)
                    parts.append(steps_of(other))
            rest = first + together(parts)
            assert [row for step in rest for row in step if row[1] != PAD] == whole

    def test_at_seek_and_skip_find_the_same_batches(self) -> None:
        whole = self.epoch(1) + self.epoch(1, 1)
        with self.loader(self.batch) as one:
            count = len(one)
            for step in (count - 1, 0, 2):
                one.seek(0)
                assert rows(one.at(step)) == whole[step]
                assert rows(one.at(step, epoch=1)) == whole[count + step]
                one.seek(1, step)
                assert rows(next(iter(one))) == whole[count + step]
                one.seek(0, 1)
                one.skip(step)
                assert rows(next(iter(one))) == whole[1 + step]
            one.seek(0, count - 2)
            one.skip(3)
            assert rows(next(iter(one))) == whole[count + 1]

    def test_ranks_that_run_at_once_have_equally_many_steps(self) -> None:
        whole = self.epoch(1)
        for world in self.ranks:
            with ExitStack() as held, ThreadPoolExecutor(world) as threads:
                loaders = [held.enter_context(self.loader(self.batch, rank, world)) for rank in range(world)]
                parts = list(threads.map(steps_of, loaders))
            assert {len(part) for part in parts} == {len(whole)}
            assert together(parts) == whole

    def test_a_sharing_job_that_pauses_changes_nothing_for_the_others(self) -> None:
        whole = self.epoch(1)
        with self.loader(self.batch, share="laws") as paused, self.loader(self.batch, share="laws") as other:
            running = iter(paused)
            first = [rows(next(running))]
            with ThreadPoolExecutor(1) as thread:
                assert thread.submit(steps_of, other).result(60) == whole
            assert first + [rows(batch) for batch in running] == whole

    def epoch(self, world: int, number: int = 0) -> list[list[Row]]:
        """Return the global batches of an epoch, assembled from the ranks' slices."""
        parts = []
        for rank in range(world):
            with self.loader(self.batch, rank, world) as one:
                one.set_epoch(number)
                parts.append(steps_of(one))
        return together(parts)


def rows(batch: Batch) -> list[Row]:
    """Return position, status and content hash of each row of a batch."""
    found = []
    for number in range(batch.rows):
        content = hashlib.blake2b(digest_size=12)
        for name in sorted(batch):
            value = batch[name]
            row = np.asarray(value[number])
            ragged = isinstance(value, Ragged)
            content.update(f"\0{name}\0{row.dtype}{row.shape}{ragged}".encode())
            content.update(np.ascontiguousarray(row).tobytes())
        found.append((int(batch.positions[number]), int(batch.status[number]), content.hexdigest()))
    return found


def steps_of(loader: Loader) -> list[list[Row]]:
    """Return the rows of each remaining step of the loader's epoch."""
    return [rows(batch) for batch in loader]


def forever(loader: Loader) -> Iterable[Batch]:
    """Iterate over the loader's batches, epoch after epoch, without end."""
    while True:
        yield from loader


def together(parts: Sequence[Sequence[list[Row]]]) -> list[list[Row]]:
    """Return the global batches assembled from the ranks' slices, in rank order."""
    return [list(itertools.chain(*step)) for step in zip(*parts, strict=True)]
