"""Hugging Face: samples as a `datasets.IterableDataset`, and a Trainer fed by loaders.

Law: samples come in stored order, many per request. Training uses the loader's batches, and each Trainer
checkpoint contains the loader's state. An evaluation is a whole epoch of its loader, each sample once. Logs
have the loader's figures of the steps since the last log.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshsdk.errors import ConfigurationError
from meshsdk.loader.loader import Loader
from meshsdk.loader.plain_loader import PlainLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from meshsdk.datasets.dataset import Dataset
    from meshsdk.loader_stats import LoaderStats

    Inputs = Callable[[dict[str, Any]], dict[str, Any]]

STATE = "mesh_loader.json"
_SHARDS = 64
_ROWS = 256


def samples(dataset: Dataset, ranges: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yield the samples in these ranges of a dataset, in order."""
    for first, last in ranges:
        for start in range(first, last, _ROWS):
            yield from dataset.__getitems__(range(start, min(start + _ROWS, last)))


def as_iterable(dataset: Dataset, shards: int = _SHARDS) -> Any:
    """Return a `datasets.IterableDataset` of samples with ops applied, in at most `shards` shards, the
    units of `shuffle`, workers and nodes."""
    import datasets

    count = len(dataset)
    shards = max(1, min(shards, count))
    cuts = [number * count // shards for number in range(shards + 1)]
    ranges = list(pairwise(cuts))
    return datasets.IterableDataset.from_generator(samples, gen_kwargs={"dataset": dataset, "ranges": ranges})


class InputLoader(PlainLoader):
    """Batches as the keyword arguments of a model."""

    def __init__(self, loader: Loader, inputs: Inputs) -> None:
        super().__init__(loader)
        self.inputs = inputs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._arguments, super().__iter__())

    def _arguments(self, batch: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.inputs(batch)
        except KeyError as error:
            name = str(error.args[0])
            if f"{name}.data" not in batch:
                raise
            raise ConfigurationError(
                f"the rows of {name!r} may differ in shape: give them one in the plan (ops.resize, "
                f"ops.window, ops.pad_to), or let `inputs` take '{name}.data' and '{name}.offsets'"
            ) from error


class EvaluationLoader(InputLoader):
    """A whole epoch of a loader, as the keyword arguments of a model. Tells accelerate which rows of the last
    batch are padding, so that what the ranks have found is counted without them."""

    @property
    def dataset(self) -> Sequence[int]:
        """As many numbers as there are rows, which is all that a Trainer asks of it."""
        return range(self.rows)

    @property
    def rows(self) -> int:
        """Rows of an epoch over all ranks, without padding."""
        loader: Any = self.loader
        return int(loader.plan.positions)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader: Any = self.loader
        mark = _batches_of(self.dataset, loader.global_batch)
        loader.set_epoch(0)
        mark.begin()
        try:
            for left, batch in zip(reversed(range(len(loader))), super().__iter__(), strict=True):
                mark.end_of_dataloader = left == 0
                yield batch
        finally:
            mark.end()


def _batches_of(rows: Sequence[int], global_batch: int) -> Any:
    """Return what accelerate asks for the size of the last batch. It has to be kept: accelerate does not."""
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import GradientState

    class Batches(DataLoaderStateMixin):
        def __init__(self) -> None:
            self.gradient_state = GradientState()
            self.dataset, self.total_batch_size, self._drop_last = rows, global_batch, False

    return Batches()


class FedByLoader:
    """Mixin for a Trainer: `class MeshTrainer(FedByLoader, Trainer)`, then `MeshTrainer(model, args,
    loader=loader, inputs=lambda batch: {"pixel_values": batch["image"], "labels": batch["label"]})`.

    `inputs` converts a plain dictionary (see `plain.as_dict`) into the arguments of the model. The
    Trainer's settings for batch size, seed, workers and skipping have no effect: the loader has its own.
    Each log of the loss also has the loader's figures of the steps since the last one, such as
    "data/wait_share" (`LoaderStats.scalars`), for all of `report_to`; `log_data=False` leaves them out.
    `eval_dataset=` takes a loader, too, or a dictionary of them, on any number of ranks; every rank needs at
    least one row of it. Give it `shuffle=False`.
    """

    def __init__(
        self, *args: Any, loader: Loader, inputs: Inputs, log_data: bool = True, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.loader = loader
        self._inputs, self._log_data = inputs, log_data
        self._logged: LoaderStats | None = None

    def get_train_dataloader(self) -> InputLoader:
        return InputLoader(self.loader, self._inputs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the batches of an evaluation loader; other datasets are the Trainer's."""
        this: Any = self
        given = this.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, str):
            given = this.eval_dataset[given]
        if isinstance(given, Loader):
            return EvaluationLoader(given, self._inputs)
        parent: Any = super()
        return parent.get_eval_dataloader(eval_dataset)

    def train(self, resume_from_checkpoint: str | bool | None = None, **more: Any) -> Any:
        """Train like the Trainer; the loader resumes at its position in that checkpoint."""
        this: Any = self
        folder = resume_from_checkpoint
        if folder is True:
            from transformers.trainer_utils import get_last_checkpoint

            folder = get_last_checkpoint(this.args.output_dir)
        if folder:
            this.args.ignore_data_skip = True  # nothing to skip: the loader is already at that position
            self.loader.load_state_dict(_read_state(Path(folder)))
        parent: Any = super()
        return parent.train(resume_from_checkpoint=folder or None, **more)

    def log(self, logs: dict[str, float], *args: Any, **more: Any) -> None:
        """Log like the Trainer; a loss comes with what the loader did since the last one."""
        if self._log_data and "loss" in logs:
            now = self.loader.stats()
            window = now if self._logged is None else now - self._logged
            self._logged = now
            logs = {**logs, **window.scalars()}
        parent: Any = super()
        parent.log(logs, *args, **more)

    def _save_checkpoint(self, *args: Any, **more: Any) -> None:
        this: Any = self
        parent: Any = super()
        parent._save_checkpoint(*args, **more)
        if self.loader.rank == 0:
            folder = Path(this.args.output_dir) / f"checkpoint-{this.state.global_step}"
            _save(folder / STATE, json.dumps(self.loader.state_dict()))


def _save(path: Path, text: str) -> None:
    """Write a file that is whole or absent, whenever the process is killed."""
    beside = path.with_name(f"{path.name}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _read_state(folder: Path) -> Mapping[str, Any]:
    try:
        state: Mapping[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{folder} has no {STATE}: a Trainer without FedByLoader saved it, or was killed meanwhile; load "
            "only its weights, or resume from an earlier checkpoint"
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"{folder / STATE} is damaged ({error}): resume from an earlier checkpoint"
        ) from error
    return state
