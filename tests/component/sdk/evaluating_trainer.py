"""A Trainer under torchrun that evaluates, while it trains and after it: URL FOLDER. Rank 0 prints what the
metrics were computed from."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

import meshsdk as mesh
from meshsdk import ops
from meshsdk.adapters.huggingface import FedByLoader


class MeshTrainer(FedByLoader, Trainer):  # type: ignore[misc]  # the package is not followed by mypy
    pass


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, n: Any, labels: Any = None) -> dict[str, Any]:
        logits = self.layer(n.float()[:, None])
        return {"loss": (logits - labels[:, None]).square().mean() * 1e-3, "logits": logits}


def main() -> None:
    url, folder = sys.argv[1:]
    found: dict[str, list[int]] = {}

    def remember(name: str) -> Any:
        def metrics(told: Any) -> dict[str, float]:
            found[name] = sorted(told.label_ids.tolist())
            assert told.predictions.shape[0] == len(found[name])
            return {"rows": float(len(found[name]))}

        return metrics

    arguments = TrainingArguments(
        folder, num_train_epochs=1, report_to=[], use_cpu=True, per_device_train_batch_size=4,
        per_device_eval_batch_size=3, disable_tqdm=True, eval_strategy="epoch", save_strategy="no",
    )  # fmt: skip
    dataset = mesh.open(url, fields={"n": "cls"}).map(ops.int_label("n"))
    size = 3 * arguments.world_size  # leaves two rows for the last batch: of two ranks one has only padding
    judged = mesh.Loader(dataset, size, shuffle=False)
    trainer = MeshTrainer(
        Model(), arguments, loader=mesh.Loader(dataset, 4 * arguments.world_size, seed=3),
        inputs=lambda batch: {"n": batch["n"], "labels": batch["n"]},
        eval_dataset=judged, compute_metrics=remember("labels"),
    )  # fmt: skip
    trainer.train()
    trainer.compute_metrics = remember("others")
    assert trainer.evaluate({"a": judged, "b": judged})["eval_b_rows"] == 20
    trainer.compute_metrics = remember("again")
    trainer.evaluate()
    if arguments.process_index == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may keep an interpreter from ending


if __name__ == "__main__":
    main()
