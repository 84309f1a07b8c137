"""Constructors of the ops that mix two rows of a batch: mixup and CutMix.

Law: that of `meshsdk.ops`, through which users call them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshsdk.ops import arguments as _values
from meshwire.plan.plan_spec import OpSpec

if TYPE_CHECKING:
    from collections.abc import Sequence


def mixup(field: str, *, alpha: float = 0.2, p: float = 1.0, labels: Sequence[str] | None = None) -> OpSpec:
    """Blend each row with its neighbor in the batch (mixup).

    The batch gets the fields `FIELD.weight` (float32, the weight of the row's own pixels) and `LABEL.other`
    (int64, the label of the neighbor).

    Arguments:
        alpha: the weight is drawn from Beta(alpha, alpha).
        p: probability that a row is blended.
        labels: names of the label fields. Default: all labels of the dataset.
    """
    args = {"alpha": _values.number("mixup", "alpha", alpha), "p": _values.probability("mixup", p)}
    return OpSpec("mixup", _values.field("mixup", field), args | _values.labels(labels))


def cutmix(field: str, *, alpha: float = 1.0, p: float = 1.0, labels: Sequence[str] | None = None) -> OpSpec:
    """Replace a rectangle of each row by that of its neighbor in the batch (CutMix).

    The arguments and the fields `FIELD.weight` and `LABEL.other` are those of `mixup`.
    """
    args = {"alpha": _values.number("cutmix", "alpha", alpha), "p": _values.probability("cutmix", p)}
    return OpSpec("cutmix", _values.field("cutmix", field), args | _values.labels(labels))


def mixup_or_cutmix(
    field: str,
    *,
    mixup: float = 0.8,
    cutmix: float = 1.0,
    switch: float = 0.5,
    p: float = 1.0,
    labels: Sequence[str] | None = None,
) -> OpSpec:
    """Apply CutMix with probability `switch`, else mixup, drawn for each pair of rows.

    `mixup` and `cutmix` are the alphas of the two. `p`, `labels` and the fields `FIELD.weight` and
    `LABEL.other` are those of `mixup`.
    """
    name = "mixup_or_cutmix"
    args = {
        "mixup": _values.number(name, "mixup", mixup),
        "cutmix": _values.number(name, "cutmix", cutmix),
        "switch": _values.probability(name, switch),
    }
    return OpSpec(
        name, _values.field(name, field), args | {"p": _values.probability(name, p)} | _values.labels(labels)
    )
