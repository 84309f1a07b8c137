"""A small CNN on the digits, fed by a Loader; all it does to a batch is cast and scale it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

import meshsdk as mesh
from meshdemo.datasets import SEED, connect, held_out_digits, training_digits
from meshdemo.screen import check, fact, progress

if TYPE_CHECKING:
    from meshdemo.daemon import Daemon
    from meshdemo.scale import Scale
    from meshsdk.loader_stats import LoaderStats

PEAK_RATE = 8e-3
WEIGHT_DECAY = 1e-2


@dataclass(frozen=True, slots=True)
class Trained:
    """How training went: `accuracy` on the held-out part, the loader's figures, rows asked for in all."""

    accuracy: float
    seconds: float
    stats: LoaderStats
    asked: int


def block(inputs: int, outputs: int) -> list[nn.Module]:
    """Convolution, normalisation, activation."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def make_model() -> nn.Sequential:
    """Three blocks and a linear layer: 1×16×16 → 10."""
    features = [*block(1, 24), nn.MaxPool2d(2), *block(24, 48), nn.MaxPool2d(2), *block(48, 64)]
    return nn.Sequential(
        *features, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10)
    )


def inputs_of(batch: mesh.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(float images 0…1, labels): narrow types on the wire, the cast where the model is."""
    return batch["image"].float() / 255, batch["label"]


def measure_accuracy(model: nn.Module, loader: mesh.Loader) -> float:
    """Share of right answers over one epoch of the loader."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for batch in loader:
            images, labels = inputs_of(batch)
            right += int((model(images).argmax(1) == labels).sum())
            total += batch.rows
    return right / total


def train(daemon: Daemon, scale: Scale) -> Trained:
    """Train, show progress, check the accuracy."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # the daemon on the same machine wants a core too
    client = connect(daemon)
    loader = mesh.Loader(training_digits(client), scale.batch, seed=SEED, shuffle="global", report="digits")
    held_out = mesh.Loader(held_out_digits(client), 256, shuffle=False, tail="ragged")
    sizes = f"{len(loader.dataset):,} digits to train on, {len(held_out.dataset)} held out"
    fact(f"{sizes}; {len(loader)} steps of {scale.batch} an epoch")
    model, start = make_model(), time.perf_counter()
    with loader, held_out:
        run_epochs(model, loader, held_out, scale.epochs)
        accuracy = measure_accuracy(model, held_out)
        stats, asked = loader.stats(), loader.stats().samples + held_out.stats().samples
    check(accuracy >= scale.accuracy, f"held-out accuracy {accuracy:.1%}, at least {scale.accuracy:.0%}")
    return Trained(accuracy, time.perf_counter() - start, stats, asked)


def run_epochs(model: nn.Module, loader: mesh.Loader, held_out: mesh.Loader, epochs: int) -> None:
    """Train all epochs by one-cycle AdamW, with a progress bar."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=WEIGHT_DECAY)
    total = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=total)
    with progress() as bars:
        task = bars.add_task("training", total=total, note="")
        for epoch in range(epochs):
            model.train()
            loss = torch.tensor(0.0)
            for batch in loader:
                images, labels = inputs_of(batch)
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                bars.advance(task)
            accuracy = measure_accuracy(model, held_out)
            bars.update(
                task, note=f"epoch {epoch + 1}/{epochs} loss {loss.item():.3f} held-out {accuracy:.1%}"
            )
