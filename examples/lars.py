"""LARS: SGD whose every layer has a rate of its own, for batches so large that one rate fits no two layers.

Law: a layer moves by a share of its own length (`trust`), however large its gradient is; vectors (biases,
normalisation) move as in SGD, without decay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class Lars(torch.optim.Optimizer):
    """You, Gitman and Ginsburg 2017 (arXiv 1708.03888), with momentum and weight decay."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-2,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of all layers that have a gradient."""
        for group in self.param_groups:
            for layer in group["params"]:
                if layer.grad is not None:
                    self._move(layer, group)

    def _move(self, layer: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, rate = layer.grad, group["lr"]
        if layer.ndim > 1:
            gradient = gradient + group["weight_decay"] * layer
            length, steepness = layer.norm(), gradient.norm()
            if length > 0 and steepness > 0:
                rate = rate * group["trust"] * length / steepness
        state = self.state[layer]
        moving = state.setdefault("momentum", torch.zeros_like(layer))
        moving.mul_(group["momentum"]).add_(rate * gradient)
        layer.sub_(moving)
