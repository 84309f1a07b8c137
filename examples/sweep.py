"""Trials of a sweep over one shared pass: each batch is prepared once for all that run together.

    python -m examples.sweep s3://photos/train --trials 8

The first trial runs alone and is measured; so many of the others run at once as the machine has room for.
Law: what a trial sees does not depend on sharing: all print the same hash.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import TYPE_CHECKING

import torch
from torch import nn

import meshsdk as mesh
from examples.arguments import command_line, positive, run
from examples.ddp import images, make_model
from examples.figures import SeenRows, report

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Trial:
    """What one trial does; all but `rate` is the same for all, or they would share nothing."""

    source: str
    share: str
    batch: int
    epochs: int
    side: int
    rate: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """`busy`: the part of the machine it used; `frames`: how the nodes came by its batches."""

    rate: float
    loss: float
    seen: int
    busy: float
    frames: dict[str, int]


def run_trial(trial: Trial) -> Outcome:
    """Trains with one rate, in a process of its own."""
    torch.manual_seed(7)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset = images(trial.source, mesh.connect(), trial.side, augment=True)
    model = make_model(len(dataset.classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), trial.rate, momentum=0.9)
    seen, total, wall, cpu = SeenRows(), 0.0, time.perf_counter(), time.process_time()
    with mesh.Loader(dataset, trial.batch, seed=7, share=trial.share) as loader:
        for _ in range(trial.epochs):
            total = 0.0
            for batch in loader:
                images_, labels = batch["image"].to(device).float() / 255, batch["label"].to(device)
                loss = nn.functional.cross_entropy(model(images_), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.add(batch)
                total += loss.item()
        busy = utilisation(device, time.process_time() - cpu, time.perf_counter() - wall)
        report(loader, seen.total, rate=f"{trial.rate:g}", loss=f"{total / len(loader):.3f}")
        return Outcome(trial.rate, total / len(loader), seen.total, busy, dict(loader.stats().frames))


def utilisation(device: torch.device, cpu: float, wall: float) -> float:
    """The busier of processor and GPU, 0…1. The GPU's part needs the package nvidia-ml-py."""
    processor = cpu / wall / len(os.sched_getaffinity(0))
    return max(processor, torch.cuda.utilization(device) / 100) if device.type == "cuda" else processor


def places(busy: float, trials: int) -> int:
    """How many trials as busy as this one fit side by side, at most `trials`."""
    return max(1, min(trials, int(1 / max(busy, 0.01))))


def side_by_side(trials: Sequence[Trial], parallel: int) -> list[Outcome]:
    """So many at once, each in a process of its own; they end when this one is interrupted."""
    with ProcessPoolExecutor(parallel, get_context("spawn")) as pool:
        try:
            # Ctrl-C in a terminal reaches every process; one that starts while it is blocked never sees it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                running = pool.map(run_trial, trials)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return list(running)
        except KeyboardInterrupt:
            for process in active_children():
                process.terminate()
            raise


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("examples.sweep", __doc__)
    parser.add_argument("source", help="images in one folder a class, as s3://photos/train")
    parser.add_argument("--trials", type=positive, default=8, help="learning rates to try, 1 to 10^-3")
    parser.add_argument("--parallel", type=positive, help="how many at once; default: as measured")
    parser.add_argument("--share", default="sweep", help="the name under which they meet")
    parser.add_argument("--batch", type=positive, default=64, help="rows of a step")
    parser.add_argument("--epochs", type=positive, default=2, help="of each trial")
    parser.add_argument("--side", type=positive, default=32, help="pixels")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    """The outcomes, the best first."""
    options = parse(arguments)
    rates = [10 ** (-3 * number / max(1, options.trials - 1)) for number in range(options.trials)]
    same = (options.source, options.share, options.batch, options.epochs, options.side)
    trials = [Trial(*same, rate) for rate in rates]
    first, rest = run_trial(trials[0]), trials[1:]
    outcomes = [first]
    parallel = options.parallel or places(first.busy, len(rest))
    print(f"one trial keeps {first.busy:.0%} of the machine busy: {parallel} at once", flush=True)
    if rest:
        outcomes += side_by_side(rest, parallel)
    outcomes.sort(key=lambda outcome: outcome.loss)
    made = sum(outcome.frames.get("miss", 0) for outcome in outcomes)
    given = sum(sum(outcome.frames.values()) for outcome in outcomes)
    best = outcomes[0]
    print(f"best rate={best.rate:g} loss={best.loss:.3f}; {given} batches given, {made} prepared")
    return outcomes


if __name__ == "__main__":
    run(main)
