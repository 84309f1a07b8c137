"""Position of a loader: resume, seek and skip.

Law: pure; a move returns another position. Positions are counted over all ranks of an epoch, so the number of
ranks and the batch size may change on resume.
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
    """Where the next batch begins.

    `state` has epoch and position; `positions` is the length of an epoch and `batch` the rows of a global
    batch. `gone_on`: the epoch that was resumed with another batch size, and its origin.
    """

    state: LoaderState
    positions: int
    batch: int
    tail: Tail
    gone_on: tuple[int, int] = (0, 0)

    @property
    def step(self) -> int:
        """The step of the next batch, counted from the origin."""
        return self.state.step(self.batch)

    @property
    def origin(self) -> int:
        """The position in the epoch at which step 0 begins."""
        return self.state.origin(self.batch)

    @property
    def remaining(self) -> int:
        """The number of batches left in the epoch."""
        return self.steps - self.step

    @property
    def steps(self) -> int:
        """The number of steps of the current epoch, from its origin."""
        return self.count_steps(self.origin)

    @property
    def steps_an_epoch(self) -> int:
        """The number of steps of a whole epoch."""
        return self.count_steps(0)

    def origin_of(self, epoch: int) -> int:
        """Return the position at which step 0 of any epoch begins."""
        if epoch == self.state.epoch:
            return self.origin
        return self.gone_on[1] if epoch == self.gone_on[0] else 0

    def count_steps(self, origin: int) -> int:
        """Return the number of steps of an epoch with this origin."""
        return plan_spec.step_count(self.positions, self.batch, origin, self.tail)

    def _at(self, epoch: int, position: int, skipped: int = 0) -> Position:
        skips = self.state.skips + skipped
        return replace(self, state=replace(self.state, epoch=epoch, position=position, skips=skips))

    def after_batch(self) -> Position:
        """Return the position after the next batch was returned."""
        return replace(self, state=self.state.after_batch(self.batch, self.positions, self.tail))

    def after_epochs(self, count: int) -> Position:
        """Return the beginning of the epoch that is `count` epochs later."""
        return self._at(self.state.epoch + count, 0)

    def after_resume(self, state: Mapping[str, Any] | str | bytes) -> Position:
        """Return the position that a state has.

        Raises StateMismatchError for a state of another plan, snapshot or seed, and ConfigurationError if it
        is not a state.
        """
        here = self.state
        if not isinstance(state, (Mapping, str, bytes)):
            raise ConfigurationError(f"not a loader state: {state!r:.80}; pass what state_dict() returned")
        try:
            loaded = LoaderState.from_json(state)
            loaded.check(plan=here.plan, snapshot=here.snapshot, seed=here.seed, samples=self.positions)
        except plan_spec.StateMismatchError as error:
            raise StateMismatchError(str(error), error.path.removeprefix("state.")) from error
        except plan_spec.PlanError as error:
            raise ConfigurationError(
                f"not a loader state: {error}; pass only what state_dict() returned, not the whole checkpoint"
            ) from error
        return replace(self, state=loaded, gone_on=(loaded.epoch, loaded.origin(self.batch)))

    def after_seek(self, epoch: int, step: int) -> Position:
        """Return the position of a step of an epoch, counted from the epoch's beginning.

        Rows of the current epoch that are passed over count as skipped. Raises IndexError.
        """
        epoch, step = operator.index(epoch), operator.index(step)
        if epoch < 0:
            raise IndexError(f"epoch {epoch}: epochs are counted from 0")
        if not 0 <= step < self.steps_an_epoch:
            raise IndexError(f"epoch {epoch}, step {step}: an epoch has steps 0 to {self.steps_an_epoch - 1}")
        position = step * self.batch
        ahead = position - self.state.position if epoch == self.state.epoch else 0
        return replace(self._at(epoch, position, max(ahead, 0)), gone_on=(epoch, 0))

    def after_skip(self, steps: int) -> Position:
        """Return the position `steps` batches later, if need be in a later epoch. Raises IndexError."""
        steps = operator.index(steps)
        if steps < 0:
            raise IndexError(f"skip({steps}): to go back, use seek")
        state, left = self.state, self.remaining
        if steps < left:
            ahead = steps * self.batch
            return self._at(state.epoch, state.position + ahead, ahead)
        epochs, step = divmod(steps - left, self.steps_an_epoch)
        passed = self.positions - state.position + epochs * self.positions
        position = step * self.batch
        return self._at(state.epoch + 1 + epochs, position, passed + position)
