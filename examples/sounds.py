"""A classifier of short recordings: log-mel spectrograms with SpecAugment, in folders named for their class.

    python -m examples.sounds s3://toys/sounds

Law: the storage nodes decode, resample, cut and transform; what is trained on changes with every epoch, and
what is tested does not. Below the source lie `train/CLASS/…` and `test/CLASS/…`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import meshsdk as mesh
from examples.arguments import command_line, positive, run
from examples.figures import SeenRows, report
from meshsdk import ops

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from meshwire.plan.plan_spec import OpSpec

BANDS = 40


def recordings(url: str, ending: str, options: argparse.Namespace, *, train: bool) -> mesh.Dataset:
    """Fields `audio`, float32 [frames, bands] in decibels, and `label`."""
    values = round(options.rate * options.seconds)
    random: tuple[OpSpec, ...] = ()
    if train:
        random = (ops.spec_augment("audio", time_width=8, frequency_width=6, value="mean"),)
    return mesh.open(url, fields={"audio": ending, "label": "@class"}).map(
        ops.decode_audio("audio", rate=options.rate, channels=1),
        ops.window("audio", [values], at="random" if train else "center", pad=0),
        *((ops.gain("audio", 6),) if train else ()),
        ops.mel_spectrogram("audio", BANDS, n_fft=256, hop=80, log="db"),
        *random,
    )


class Classifier(nn.Module):
    """[rows, frames, bands] in decibels → [rows, classes]: three convolutions and a mean over time."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.GELU(),
        )
        self.classes = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = (x - x.mean((1, 2), keepdim=True)) / 10  # how loud the recording is does not matter
        answer: torch.Tensor = self.classes(self.layers(levels.mT).mean(2))
        return answer


def accuracy(model: nn.Module, loader: mesh.Loader, device: torch.device) -> float:
    """The share of rows whose class is the likeliest; pads do not count."""
    right = rows = 0
    with torch.no_grad():
        for batch in loader:
            real = torch.as_tensor(batch.status == 0)
            guessed = model(batch["audio"].to(device)).argmax(1).cpu()
            right += int(((guessed == batch["label"]) & real).sum())
            rows += int(real.sum())
    return right / max(1, rows)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line("examples.sounds", __doc__)
    parser.add_argument("source", help="where train/ and test/ lie, as s3://toys/sounds")
    parser.add_argument("--ending", default="wav", help="of the files: wav, flac, mp3, ogg")
    parser.add_argument("--rate", type=positive, default=8_000, help="hertz that recordings are resampled to")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a window")
    parser.add_argument("--batch", type=positive, default=16, help="rows of a step over all ranks")
    parser.add_argument("--epochs", type=positive, default=10, help="passes over the recordings")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The accuracy on the test recordings after each epoch."""
    options = parse(arguments)
    torch.manual_seed(7)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = recordings(f"{options.source}/train", options.ending, options, train=True)
    test = recordings(f"{options.source}/test", options.ending, options, train=False)
    model = Classifier(len(train.snapshot.fields["label"].classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    seen, found = SeenRows(), []
    with (
        mesh.Loader(train, options.batch, seed=7) as loader,
        mesh.Loader(test, options.batch, shuffle=False) as held_out,
    ):
        for _ in range(options.epochs):
            for batch in loader:
                sounds, labels = batch["audio"].to(device), batch["label"].to(device)
                loss = nn.functional.cross_entropy(model(sounds), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.add(batch)
            found.append(accuracy(model, held_out, device))
        report(loader, seen.total, accuracy=f"{found[-1]:.3f}", epochs=options.epochs)
    return found


if __name__ == "__main__":
    run(main)
