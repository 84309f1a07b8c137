"""Lightning over a real daemon: a run that is stopped in an epoch and goes on from its checkpoint."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

import meshsdk as mesh
from meshsdk import ops
from meshsdk.datasets.batch import Ragged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.daemons import Daemon

# Lightning's own, on a torch that is newer than it.
pytestmark = pytest.mark.filterwarnings("ignore")


class Preempted(Exception):
    """What ends the first run."""


def kind() -> Any:
    """Of models: one weight; notes what it is given."""
    import pytorch_lightning as pl  # three seconds, which processes that run other tests do not spend

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[int]] = []

        def training_step(self, batch: dict[str, Any], _: int) -> Any:
            self.seen.append(batch["n"].tolist())
            assert batch["__status"].tolist() == [0] * 4
            assert len(batch["text.offsets"]) == 5
            return self.layer(batch["n"].float()[:, None]).mean()

        def validation_step(self, batch: dict[str, Any], _: int) -> None:
            assert batch["__pos"].shape == (4,)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.01)

    return Model


@pytest.fixture
def dataset(daemon: Daemon, bucket: str) -> Iterator[mesh.Dataset]:
    with mesh.connect(daemon.endpoint, access_key=daemon.access_key, secret_key=daemon.secret_key) as client:
        for number in range(20):
            client.put(bucket, f"n/{number:02}.cls", str(number).encode())
            client.put(bucket, f"n/{number:02}.txt", b"x" * number)
        opened = mesh.open(f"s3://{bucket}/n", fields={"n": "cls", "text": "txt"}, client=client)
        yield opened.map(ops.int_label("n"))


def test_a_run_goes_on_in_the_middle_of_an_epoch(dataset: mesh.Dataset, tmp_path: Path) -> None:
    import pytorch_lightning as pl

    from meshsdk.adapters.lightning import MeshDataModule

    checkpoint = str(tmp_path / "run.ckpt")

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(checkpoint)
                raise Preempted

    def loader() -> mesh.Loader:
        return mesh.Loader(dataset, 4, seed=3)

    def fit(*callbacks: Any, resume: str | None = None) -> list[list[int]]:
        trained = kind()()
        quiet = dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=2, use_distributed_sampler=False, callbacks=list(callbacks), **quiet
        )
        with contextlib.suppress(Preempted):
            trainer.fit(trained, MeshDataModule(loader, loader), ckpt_path=resume)
        seen: list[list[int]] = trained.seen
        return seen

    whole = fit()
    for epoch in (whole[:5], whole[5:]):
        assert sorted(value for batch in epoch for value in batch) == list(range(20))
    begun = fit(Stop())
    assert begun + fit(resume=checkpoint) == whole


@pytest.mark.parametrize(("accumulated", "steps"), [(1, [2, 4, 6, 8, 10]), (2, [2, 4, 6])])
def test_windows_of_steps_are_logged(dataset: mesh.Dataset, accumulated: int, steps: list[int]) -> None:
    import pytorch_lightning as pl
    from pytorch_lightning.loggers.logger import DummyLogger

    from meshsdk.adapters.lightning import DataStats, MeshDataModule

    logged = list[tuple[int, dict[str, float]]]()

    class Notes(DummyLogger):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            logged.append((step, metrics))

    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=accumulated,
        use_distributed_sampler=False,
        callbacks=[DataStats(every=2)],
        logger=Notes(),
        **quiet,
    )
    trainer.fit(kind()(), MeshDataModule(lambda: mesh.Loader(dataset, 4, seed=3)))
    ours = [(step, figures) for step, figures in logged if "data/wait_share" in figures]
    assert [step for step, _ in ours] == steps
    assert all(0 <= figures["data/wait_share"] <= 1 for _, figures in ours)
    assert all(figures["data/samples_per_second"] > 0 for _, figures in ours)


def test_a_loader_that_is_given_as_it_is(dataset: mesh.Dataset) -> None:
    """Lightning moves a batch by its `to`."""
    import pytorch_lightning as pl

    model_of_dicts: Any = kind()

    class Bare(model_of_dicts):
        def training_step(self, batch: Any, _: int) -> Any:
            assert type(batch) is mesh.Batch
            self.seen.append(batch["n"].tolist())
            return self.layer(batch["n"].float()[:, None]).mean()

    model, quiet = Bare(), dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    with mesh.Loader(dataset, 4, seed=3) as loader:
        pl.Trainer(accelerator="cpu", max_epochs=1, enable_checkpointing=False, **quiet).fit(model, loader)
    assert sorted(value for batch in model.seen for value in batch) == list(range(20))


def test_a_ragged_field_is_plain_in_its_parts(dataset: mesh.Dataset) -> None:
    from meshsdk.datasets.batch import as_dict

    with mesh.Loader(dataset, 20, shuffle=False, output="numpy") as loader:
        batch = loader.at(0)
    plain = as_dict(batch)
    assert list(plain) == ["n", "text.data", "text.offsets", "__pos", "__status"]
    assert isinstance(batch["text"], Ragged)
    assert plain["text.data"] is batch["text"].data
