"""Position of a loader: resume, seek and skip.

Law: pure; a move returns another position. It counts positions of an epoch over all ranks, so the number
of ranks and the batch size may differ after a resume.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshsdk.errors import ConfigurationError, StateMismatchError
from meshwire.plan import plan_spec
from meshwire.plan.plan_spec import LoaderState

if TYPE_CHECKING:
    from typing import Any

    from meshwire.plan.loader_state import Tail


@dataclass(frozen=True, slots=True)
class Position:
    """The next batch is at `state`, of epochs of `positions`, in batches of `batch` rows. `gone_on`: the
    epoch that was gone on with in other batches, and its origin.
    """

    state: LoaderState
    positions: int
    batch: int
    tail: Tail
    gone_on: tuple[int, int] = (0, 0)

    @property
    def step(self) -> int:
        """The next batch's, counted from the origin."""
        return self.state.step(self.batch)

    @property
    def origin(self) -> int:
        """The position of the epoch where its step 0 is."""
        return self.state.origin(self.batch)

    @property
    def remaining(self) -> int:
        """Batches that are left of the epoch."""
        return self.steps - self.step

    @property
    def steps(self) -> int:
        """Of the present epoch, from its origin on."""
        return self.count_steps(self.origin)

    @property
    def steps_an_epoch(self) -> int:
        """Of a whole one."""
        return self.count_steps(0)

    def origin_of(self, epoch: int) -> int:
        """The position where step 0 of an epoch is, which that of the present one need not be."""
        if epoch == self.state.epoch:
            return self.origin
        return self.gone_on[1] if epoch == self.gone_on[0] else 0

    def count_steps(self, origin: int) -> int:
        """Steps of an epoch, from its origin on."""
        return plan_spec.step_count(self.positions, self.batch, origin, self.tail)

    def _at(self, epoch: int, position: int, skipped: int = 0) -> Position:
        skips = self.state.skips + skipped
        return replace(self, state=replace(self.state, epoch=epoch, position=position, skips=skips))

    def after_batch(self) -> Position:
        """Once the next batch was returned."""
        return replace(self, state=self.state.after_batch(self.batch, self.positions, self.tail))

    def after_epochs(self, count: int) -> Position:
        """The beginning of the next epoch, or of a later one."""
        return self._at(self.state.epoch + count, 0)

    def after_resume(self, state: Mapping[str, Any] | str | bytes) -> Position:
        """Where a state says. Raises StateMismatchError for one of another plan, snapshot or seed, and
        ConfigurationError for what is none."""
        here = self.state
        if not isinstance(state, (Mapping, str, bytes)):
            raise ConfigurationError(f"not a loader's state: {state!r:.80}; give what state_dict() gave")
        try:
            loaded = LoaderState.from_json(state)
            loaded.check(plan=here.plan, snapshot=here.snapshot, seed=here.seed, samples=self.positions)
        except plan_spec.StateMismatchError as error:
            raise StateMismatchError(str(error), error.path.removeprefix("state.")) from error
        except plan_spec.PlanError as error:
            raise ConfigurationError(
                f"not a loader's state: {error}; give what state_dict() gave, of a checkpoint that part alone"
            ) from error
        return replace(self, state=loaded, gone_on=(loaded.epoch, loaded.origin(self.batch)))

    def after_seek(self, epoch: int, step: int) -> Position:
        """A step of an epoch, from its beginning on. What is passed over of the present epoch counts as
        skipped. Raises IndexError."""
        epoch, step = operator.index(epoch), operator.index(step)
        if epoch < 0:
            raise IndexError(f"epoch {epoch}: epochs count from 0")
        if not 0 <= step < self.steps_an_epoch:
            raise IndexError(f"epoch {epoch}, step {step}: an epoch has steps 0 to {self.steps_an_epoch - 1}")
        position = step * self.batch
        ahead = position - self.state.position if epoch == self.state.epoch else 0
        return replace(self._at(epoch, position, max(ahead, 0)), gone_on=(epoch, 0))

    def after_skip(self, steps: int) -> Position:
        """So many batches on, into the next epochs where they are more than are left. Raises IndexError."""
        steps = operator.index(steps)
        if steps < 0:
            raise IndexError(f"skip({steps}): to go back, seek")
        state, left = self.state, self.remaining
        if steps < left:
            ahead = steps * self.batch
            return self._at(state.epoch, state.position + ahead, ahead)
        epochs, step = divmod(steps - left, self.steps_an_epoch)
        passed = self.positions - state.position + epochs * self.positions
        position = step * self.batch
        return self._at(state.epoch + 1 + epochs, position, passed + position)
