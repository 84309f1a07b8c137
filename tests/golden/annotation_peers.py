"""Boxes and keypoints as torchvision v2 and Albumentations move them: tests/golden/ops/annotation_peers.json.

    pip install --no-deps --target PEERS torchvision==0.28.0 albumentations==2.0.8 albucore==0.0.24 simsimd \
        stringzilla eval-type-backport
    PYTHONPATH=PEERS python -m tests.golden.annotation_peers > tests/golden/ops/annotation_peers.json

Their wheels are not in the development environment: see tests/support/torchvision_ops.py.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tests.support.torchvision_ops import no_torchvision_ops

HEIGHT, WIDTH = 60, 80
BOXES = [[10.0, 20.0, 50.0, 45.0], [0.0, 0.0, 8.0, 6.0], [60.5, 30.25, 79.0, 58.5], [30.0, 2.0, 33.0, 50.0]]
POINTS = [[10.0, 20.0], [0.0, 0.0], [79.0, 59.0], [40.5, 12.25]]
CASES: dict[str, list[Any]] = {
    "hflip": [],
    "vflip": [],
    "resize": [30, 48],
    "enlarge": [150, 100],
    "center_crop": [40, 50],
    "resized_crop": [12, 7, 30, 44, 64, 96],
    "pad": [1, 2, 3, 4],
    "rotate90": [1],
    "rotate180": [2],
    "rotate270": [3],
    "rotate": [30.0],
}
"""Arguments: of resize [height, width], resized_crop [top, left, height, width, new height, new width], pad
[top, right, bottom, left], rotate degrees counter-clockwise."""


def torchvision_results() -> dict[str, Any]:
    """Boxes clamped to the canvas; keypoints as they come."""
    import torch

    with no_torchvision_ops():
        from torchvision import tv_tensors
        from torchvision.transforms import v2
        from torchvision.transforms.v2 import functional as f

    def calls(kind: str, args: list[Any], value: Any) -> Any:
        if kind == "hflip":
            return f.horizontal_flip(value)
        if kind == "vflip":
            return f.vertical_flip(value)
        if kind in ("resize", "enlarge"):
            return f.resize(value, args)
        if kind == "center_crop":
            return f.center_crop(value, args)
        if kind == "resized_crop":
            return f.resized_crop(value, *args[:4], args[4:])
        if kind == "pad":
            top, right, bottom, left = args
            return f.pad(value, [left, top, right, bottom])
        degrees = args[0] if kind == "rotate" else 90.0 * args[0]
        return f.rotate(value, degrees, expand=kind != "rotate")

    boxes = tv_tensors.BoundingBoxes(
        torch.tensor(BOXES, dtype=torch.float64),
        format="XYXY",
        canvas_size=(HEIGHT, WIDTH),
        clamping_mode=None,
    )
    points = tv_tensors.KeyPoints(torch.tensor(POINTS, dtype=torch.float64), canvas_size=(HEIGHT, WIDTH))
    results = {}
    for kind, args in CASES.items():
        moved = calls(kind, args, boxes)
        kept = f.clamp_bounding_boxes(moved, clamping_mode="hard")
        results[kind] = {"boxes": kept.tolist(), "points": calls(kind, args, points).tolist()}
    crop = f.clamp_bounding_boxes(calls("resized_crop", CASES["resized_crop"], boxes), clamping_mode="hard")
    dropped = v2.SanitizeBoundingBoxes(min_size=10, min_area=500)
    target = dropped({"boxes": crop, "labels": torch.arange(len(BOXES))})
    return {"moved": results, "kept": target["labels"].tolist()}


def albumentations_results() -> dict[str, Any]:
    """Boxes clipped; keypoints with those outside the image."""
    import albumentations as a
    from albumentations.augmentations.geometric.functional import keypoints_rot90

    def rotated(points: Any, factor: int) -> Any:
        return keypoints_rot90(points, factor, (HEIGHT, WIDTH))[:, :2].tolist()

    top, left, high, wide, *size = CASES["resized_crop"]
    above, right, below, beside = CASES["pad"]
    crop = [a.Crop(left, top, left + wide, top + high), a.Resize(*size)]
    padded = a.Pad((beside, above, right, below))
    transforms: dict[str, list[Any]] = {
        "hflip": [a.HorizontalFlip(p=1)],
        "vflip": [a.VerticalFlip(p=1)],
        "resize": [a.Resize(*CASES["resize"])],
        "enlarge": [a.Resize(*CASES["enlarge"])],
        "center_crop": [a.CenterCrop(*CASES["center_crop"])],
        "resized_crop": crop,
        "pad": [padded],
    }
    image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    labels = list(range(len(BOXES)))
    results = {}
    for kind, steps in transforms.items():
        made = a.Compose(
            steps,
            bbox_params=a.BboxParams("pascal_voc", label_fields=["labels"], min_area=0, min_visibility=0),
            keypoint_params=a.KeypointParams("xy", remove_invisible=False),
        )(image=image, bboxes=BOXES, labels=labels, keypoints=POINTS)
        boxes = np.asarray(made["bboxes"], float).tolist()
        points = np.asarray(made["keypoints"], float).tolist()
        results[kind] = {"boxes": boxes, "labels": [int(each) for each in made["labels"]], "points": points}
    for kind, (factor,) in ((name, args) for name, args in CASES.items() if name.startswith("rotate")):
        if kind != "rotate":
            results[kind] = {"points": rotated(np.hstack([np.array(POINTS), np.zeros((4, 3))]), factor)}
    kept = {}
    for least in (0.3, 0.6, 0.9):
        params = a.BboxParams("pascal_voc", label_fields=["labels"], min_visibility=least)
        found = a.Compose(crop[:1], bbox_params=params)(image=image, bboxes=BOXES, labels=labels)
        kept[str(least)] = [int(each) for each in found["labels"]]
    return {"moved": results, "kept": kept}


def rounded(value: Any) -> Any:
    """Return the value with numbers of five digits after the point: of float32, no more are right."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 5) + 0.0 if isinstance(value, float) else value


if __name__ == "__main__":
    found = {"torchvision": torchvision_results(), "albumentations": albumentations_results()}
    print(json.dumps(rounded(found)))
