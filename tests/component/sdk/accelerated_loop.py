"""A loop with Accelerate under torchrun: URL FOLDER. The first run saves its state after two batches and
ends; the second loads it and goes on. Each rank prints the numbers of its batches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import meshsdk as mesh
from meshsdk import ops


def main() -> None:
    url, folder = sys.argv[1:]
    accelerator = Accelerator(cpu=True)
    dataset = mesh.open(url, fields={"n": "cls"}).map(ops.int_label("n"))
    loader = mesh.Loader(dataset, 4, seed=3)
    assert (loader.rank, loader.world) == (accelerator.process_index, accelerator.num_processes)
    layer = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.01))
    assert accelerator.prepare(loader) is loader  # what a program that prepares everything gets
    accelerator.register_for_checkpointing(loader)
    place, seen = Path(folder, "state"), []
    stops = not place.exists()
    accelerator.wait_for_everyone()
    if not stops:
        accelerator.load_state(str(place))
    for batch in loader:
        batch = batch.to(accelerator.device)
        accelerator.backward(model(batch["n"].float()[:, None]).mean())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch["n"].tolist())
        if stops and batch.step == 1:
            accelerator.save_state(str(place))
            break
    sys.stdout.write(json.dumps(seen) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
