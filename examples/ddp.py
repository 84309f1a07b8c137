"""Images on several ranks: AMP, gradient accumulation, warm-up and cosine, early stopping, resume.

    torchrun --standalone --nproc-per-node 2 -m examples.ddp s3://photos/train --checkpoint s3://runs/ddp.pt

Run it again, with any number of ranks, and it goes on where the checkpoint says.
Law: what a step learns from does not depend on the number of ranks: losses are summed over rows that count
(not pads or stand-ins) and divided by the global batch.
"""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import meshsdk as mesh
from examples import checkpoints
from examples.arguments import command_line, positive, run
from examples.figures import SeenRows, report, sum_over_ranks
from examples.lars import Lars
from meshsdk import ops

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torch.optim.lr_scheduler import LRScheduler


def images(url: str, client: mesh.Client, side: int, *, augment: bool) -> mesh.Dataset:
    """uint8 [3, side, side] and a class, made on the storage nodes."""
    photos = mesh.open(url, fields={"image": "jpg;jpeg;png", "label": "@class"}, client=client)
    crop = (
        (ops.random_resized_crop("image", side, scale=(0.5, 1.0)), ops.hflip("image"))
        if augment
        else (ops.resize("image", [side, side]),)
    )
    return photos.map(ops.decode("image"), *crop, ops.to_chw("image"))


def make_model(classes: int) -> nn.Module:
    """A small CNN. Widths are multiples of 8, as tensor cores like; GroupNorm knows nothing of other rows."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]

    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes)]
    return nn.Sequential(*block(3, 16), *block(16, 32), *pooled)


def spread(net: nn.Module, powersgd: int | None) -> nn.Module:
    """The model on all ranks; its gradients travel as products of matrices of rank `powersgd`, if given."""
    model = DistributedDataParallel(net)
    if powersgd:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=powersgd, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def warm_up_and_cosine(optimizer: torch.optim.Optimizer, warm: int, total: int) -> LRScheduler:
    """From nothing to the optimizer's rate in `warm` steps, then down to nothing at `total`."""

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / max(1, total - warm))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Training:
    """Model, optimizer, schedule and data of one rank; `best` and `bad_epochs` are the early stopping's."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.client = mesh.connect()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(options.seed)
        dataset = images(options.source, self.client, options.side, augment=True)
        device = "cuda" if self.device.type == "cuda" else None
        self.loader = mesh.Loader(dataset, options.batch, seed=options.seed, device=device)
        held_out = images(options.held_out or options.source, self.client, options.side, augment=False)
        self.held_out = mesh.Loader(held_out, options.batch, shuffle=False, device=device)
        self.net = make_model(len(dataset.classes)).to(self.device)
        self.model = spread(self.net, options.powersgd) if dist.is_initialized() else self.net
        optimizer = {"adamw": torch.optim.AdamW, "lars": Lars}[options.optimizer]
        self.optimizer = optimizer(self.model.parameters(), options.rate)
        steps = options.epochs * math.ceil(len(self.loader) / options.accumulate)
        self.schedule = warm_up_and_cosine(self.optimizer, min(options.warm, steps), steps)
        self.seen, self.best, self.bad_epochs, self.steps = SeenRows(), math.inf, 0, 0

    def losses(self, batch: mesh.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(the sum over this rank's rows that count, their number)."""
        counts = (batch.status == 0).to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            outputs = self.model(batch["image"].to(self.device).float() / 255)
        each = nn.functional.cross_entropy(outputs.float(), batch["label"].to(self.device), reduction="none")
        return (each * counts).sum(), counts.sum()

    def run_epoch(self) -> bool:
        """Trains on what is left of the epoch; False if `--stop-after` ended it."""
        self.model.train()
        left, size = self.loader.remaining, self.options.accumulate
        for number, batch in enumerate(self.loader):
            last = number % size == size - 1 or number == left - 1
            window = min(size, left - number // size * size)
            with contextlib.nullcontext() if last or self.model is self.net else self.model.no_sync():
                loss, _ = self.losses(batch)
                # DDP averages over the ranks: times their number it is the sum over the global batch.
                (loss * self.loader.world / (self.options.batch * window)).backward()
            self.seen.add(batch)
            if not last:
                continue
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.steps += 1
            if self.steps == self.options.stop_after:
                return False
        return True

    @torch.no_grad()
    def measure(self) -> float:
        """The mean loss over the held-out images, of all ranks, so that all decide the same."""
        self.model.eval()
        parts = [self.losses(batch) for batch in self.held_out]
        loss, rows = sum_over_ranks(
            *(sum(float(value) for value in values) for values in zip(*parts, strict=True))
        )
        return loss / rows

    def judge(self) -> None:
        """Counts the epochs since the held-out loss last fell: `--patience` of them end the training."""
        loss = self.measure()
        self.bad_epochs = 0 if loss < self.best else self.bad_epochs + 1
        self.best = min(self.best, loss)

    def state(self) -> dict[str, Any]:
        """The same on all ranks, but for rank 0 alone to save; `of_all_ranks` is a collective."""
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "data": self.loader.state_dict(),
            "seen": self.seen.of_all_ranks(),
            "best": self.best,
            "bad_epochs": self.bad_epochs,
        }

    def save(self) -> None:
        if not self.options.checkpoint:
            return
        state = self.state()
        if self.loader.rank == 0:
            checkpoints.save(self.client, self.options.checkpoint, state)

    def resume(self) -> None:
        """From the checkpoint, if there is one, whatever the number of ranks that wrote it."""
        state = checkpoints.load(self.client, self.options.checkpoint) if self.options.checkpoint else None
        if state is None:
            return
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.loader.load_state_dict(state["data"])
        self.seen = SeenRows(state["seen"] if self.loader.rank == 0 else 0)
        self.best, self.bad_epochs = state["best"], state["bad_epochs"]

    def run(self) -> None:
        """All epochs, or those that are left; every epoch ends in a checkpoint."""
        with self.loader, self.held_out:
            while self.loader.epoch < self.options.epochs and self.bad_epochs < self.options.patience:
                whole = self.run_epoch()
                if whole:
                    self.judge()
                self.save()
                if not whole:
                    break
            hashed = self.seen.of_all_ranks()
            if self.loader.rank == 0:
                report(self.loader, hashed, epoch=self.loader.epoch, held_out_loss=f"{self.best:.4f}")


def join() -> None:
    """The process group that torchrun has made room for; none in a lone process."""
    if "RANK" not in os.environ:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("examples.ddp", __doc__)
    parser.add_argument("source", help="images in one folder a class, as s3://photos/train")
    parser.add_argument("--held-out", help="images to stop by; default: the source, whole")
    parser.add_argument("--checkpoint", help="an object to save to and resume from, as s3://runs/ddp.pt")
    parser.add_argument("--batch", type=positive, default=64, help="rows of a step over all ranks")
    parser.add_argument("--accumulate", type=positive, default=1, help="steps whose gradients are one update")
    parser.add_argument("--epochs", type=positive, default=10, help="at most")
    parser.add_argument(
        "--patience", type=positive, default=3, help="epochs without improvement before it stops"
    )
    parser.add_argument("--optimizer", choices=("adamw", "lars"), default="adamw", help="lars: large batches")
    parser.add_argument("--powersgd", type=positive, metavar="RANK", help="compress gradients to this rank")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--warm", type=int, default=20, help="updates of warm-up")
    parser.add_argument("--side", type=positive, default=32, help="pixels")
    parser.add_argument("--seed", type=int, default=7, help="of the order, the crops and the model")
    parser.add_argument(
        "--stop-after", type=positive, help="save and end after so many updates, as if preempted"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> Training:
    options = parse(arguments)
    join()
    training = None
    try:
        training = Training(options)
        training.resume()
        training.run()
        if dist.is_initialized():
            dist.barrier()
        return training
    finally:
        if dist.is_initialized():
            # The wrapper goes first. If it is the last to hold the group, torch joins gloo's threads with the
            # GIL held, and one of them can need the GIL to end (pytorch/pytorch#56297): the rank hangs.
            if training is not None:
                training.model = training.net
            dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
