"""COCO's file for all images, split into one for each."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

import meshsdk as mesh
from meshsdk.errors import ConfigurationError
from meshsdk.open_annotated import write_by_image

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = [{"id": 7, "file_name": "b/2.x.jpg"}, {"id": 3, "file_name": "a/1.jpg"}]
BOX = {
    "image_id": 7,
    "category_id": 18,
    "bbox": [1, 2, 3, 4],
    "segmentation": [[1, 2, 3, 4, 5, 6]],
    "iscrowd": 0,
}


def split(document: Any) -> dict[str, Any]:
    made = []
    for _ in range(2):
        file = io.BytesIO()
        write_by_image(file, json.dumps(document).encode(), "s3://coco/a.json")
        made.append(file.getvalue())
    assert made[0] == made[1]
    with tarfile.open(fileobj=io.BytesIO(made[0])) as tar:
        return {member.name: json.loads(tar.extractfile(member).read()) for member in tar}  # type: ignore[union-attr]


def test_every_image_has_a_member_of_its_stem() -> None:
    found = split({"images": IMAGES, "annotations": [BOX], "categories": [{"id": 18, "name": "dog"}]})
    kept = {"category_id": 18, "category": "dog", "bbox": [1, 2, 3, 4], "iscrowd": 0}
    assert found == {"a/1.json": {"annotations": []}, "b/2.json": {"annotations": [kept]}}
    assert list(found) == sorted(found)


def test_files_that_are_not_in_a_bucket_are_told_how_to_get_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    with pytest.raises(ConfigurationError, match=r"annotations='a\.json': .*mesh cp a\.json s3://"):
        mesh.open_coco("s3://coco/images", "a.json")
    with pytest.raises(ConfigurationError, match="mesh cp -r images s3://"):
        mesh.open_coco("images", "s3://coco/a.json")


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"images": IMAGES},
        {"images": [{"id": 1}], "annotations": []},
        {"images": IMAGES, "annotations": [{"bbox": []}]},
        {"images": IMAGES, "annotations": [7]},
        {"images": IMAGES, "annotations": [{"image_id": 7}]},
    ],
)
def test_another_file_is_named(document: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"s3://coco/a.json: not an annotation file of COCO"):
        split(document)
