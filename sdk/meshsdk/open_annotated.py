"""`mesh.open_coco`, `mesh.open_voc`, `mesh.open_yolo`: images paired with their annotation files.

Law: a sample is an image with its annotations, which the nodes parse (`ops.boxes`, `ops.box_labels`). Only
COCO's single file for all images is read here, once, and stored as a tar with one small file per image.
"""

from __future__ import annotations

import io
import json
import logging
import tarfile
import tempfile
from typing import IO, TYPE_CHECKING, Any, Literal

from meshsdk import open_dataset, ops, transfers
from meshsdk.datasets.fields import check_source
from meshsdk.datasets.names_beside import IMAGES
from meshsdk.errors import ConfigurationError, NotFoundError
from meshwire.dataset.fields import sample_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from meshsdk.client.s3_client import Client
    from meshsdk.datasets.dataset import Dataset
    from meshwire.plan.plan_spec import OpSpec

_log = logging.getLogger("meshsdk")
_IMAGES = ";".join(IMAGES)


def open_voc(
    images: str,
    annotations: str,
    classes: Sequence[str],
    *,
    difficult: bool = False,
    client: Client | None = None,
    deadline: float | None = None,
) -> Dataset:
    """Open images with annotations of Pascal VOC: fields `image`, `boxes` and `labels`.

    Arguments:
        images: the folder of the images, such as "s3://voc/JPEGImages".
        annotations: the folder of the XML files with the same names; may be the folder of the images.
        classes: names in the order of their numbers; any other name makes a sample bad.
        difficult: whether to keep objects that are marked as difficult.
        client, deadline: as in `mesh.open`.

    An image without an annotation file is left out (and counted in `ds.snapshot.skipped`). Raises as
    `mesh.open` does.

    Example:
        ds = mesh.open_voc("s3://voc/JPEGImages", "s3://voc/Annotations", ["cat", "dog"])
        ds = ds.map(ops.decode("image"), ops.over(("image", "boxes"), ops.hflip))
    """
    return _open_paired(images, annotations, "voc", "xml", classes, difficult, client, deadline)


def open_yolo(
    images: str,
    labels: str,
    *,
    classes: Sequence[str] | None = None,
    client: Client | None = None,
    deadline: float | None = None,
) -> Dataset:
    """Open images with labels of YOLO (class, center x and y, width, height in shares of the image).

    The fields are `image`, `boxes` and `labels`.

    Arguments:
        images: the folder of the images, such as "s3://coco128/images/train".
        labels: the folder of the text files with the same names; may be the folder of the images.
        classes: numbers as text, to choose and renumber classes. Default: the numbers in the files.
        client, deadline: as in `mesh.open`.

    An image without a label file is left out (and counted in `ds.snapshot.skipped`); an image with an empty
    one has no boxes. Raises as `mesh.open` does.
    """
    return _open_paired(images, labels, "yolo", "txt", classes, False, client, deadline)


def open_coco(
    images: str,
    annotations: str,
    *,
    classes: Sequence[str] | None = None,
    keypoints: int = 0,
    swap: Sequence[Sequence[int]] = (),
    difficult: bool = False,
    client: Client | None = None,
    deadline: float | None = None,
) -> Dataset:
    """Open images with COCO annotations: fields `image`, `boxes`, `labels`, and `keypoints` if asked for.

    Arguments:
        images: the folder of the images, such as "s3://coco/train2017".
        annotations: the JSON file, such as "s3://coco/annotations/instances_train2017.json".
        classes: names of categories in the order of their numbers; any other category makes a sample bad.
            Default: the category ids of the file.
        keypoints: the number of keypoints of an object: 17 for people in COCO.
        swap: pairs of keypoints that change places in a mirror image; see `ops.keypoints`.
        difficult: whether to keep objects that are marked as iscrowd.
        client, deadline: as in `mesh.open`.

    The first call downloads the file (and needs seven times its size in memory). It stores the annotations by
    image as a tar next to the file, which requires the permission to write there; later calls use that tar.
    Segmentations are left out. Raises ConfigurationError if the file is not in COCO's format, and as
    `mesh.open` does.
    """
    from meshsdk.client.s3_client import connect

    check_source(images)
    _check_file(annotations)
    client = client or connect()
    fields = {"boxes": "json", "labels": "json", **({"keypoints": "json"} if keypoints else {})}
    paired = _join(images, _by_image(client, annotations), fields, client, deadline)
    parsers = _annotation_ops("coco", classes, difficult)
    if keypoints:
        parsers.append(
            ops.keypoints(
                "keypoints", "image", source="coco", count=keypoints, swap=swap, difficult=difficult
            )
        )
    return paired.map(*parsers)


def _open_paired(
    images: str,
    annotations: str,
    source: Literal["voc", "yolo"],
    extension: str,
    classes: Sequence[str] | None,
    difficult: bool,
    client: Client | None,
    deadline: float | None,
) -> Dataset:
    parsers = _annotation_ops(source, classes, difficult)
    fields = {"boxes": extension, "labels": extension}
    if check_source(images) == check_source(annotations):
        both = {"image": _IMAGES, **fields}
        return open_dataset.open(images, both, client=client, deadline=deadline).map(*parsers)
    return _join(images, annotations, fields, client, deadline).map(*parsers)


def _join(
    images: str, annotations: str, fields: Mapping[str, str], client: Client | None, deadline: float | None
) -> Dataset:
    left = open_dataset.open(images, {"image": _IMAGES}, client=client, deadline=deadline)
    right = open_dataset.open(annotations, fields, client=left.client, deadline=deadline)
    try:
        return left.join(right, deadline=600.0 if deadline is None else deadline)
    except NotFoundError as error:
        if "no key in common" not in str(error):
            raise
        reason = str(error).partition(" [")[0].removeprefix("join: ")
        raise ConfigurationError(
            f"no image below {images} has annotations in {annotations}: {reason}; `images` must be the "
            "folder to which the names of the annotations are relative"
        ) from error


def _annotation_ops(
    source: Literal["coco", "voc", "yolo"], classes: Sequence[str] | None, difficult: bool
) -> list[OpSpec]:
    return [
        ops.boxes("boxes", "image", source=source, difficult=difficult),
        ops.box_labels("labels", source, classes=classes, difficult=difficult),
    ]


def _check_file(url: str) -> None:
    """Raise ConfigurationError for an annotation file that is not in a bucket."""
    try:
        check_source(url)
    except ConfigurationError:
        raise ConfigurationError(
            f"annotations={url!r}: expected a JSON file in a bucket, such as "
            f"s3://coco/annotations/instances_train2017.json; upload a local one: mesh cp {url} s3://BUCKET/FOLDER/"
        ) from None


def _by_image(client: Client, url: str) -> str:
    """Return the URL of the tar with one file per image. Creates it if it does not exist yet."""
    bucket, _, key = check_source(url).removeprefix("s3://").rstrip("/").partition("/")
    etag = client.head(bucket, key).etag
    name = etag.strip('"')[:16]
    tar = f"{key}.by-image/{name}.tar"
    try:
        client.head(bucket, tar)
    except NotFoundError:
        _log.info("%s: storing its annotations by image in s3://%s/%s, once", url, bucket, tar)
        with tempfile.TemporaryFile() as file:
            write_by_image(file, client.get(bucket, key, etag=etag), url)
            file.seek(0)
            transfers.upload(client, file, bucket, tar, content_type="application/x-tar")
    return f"s3://{bucket}/{tar}"


def _parse_coco(data: bytes, url: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{url}: not a JSON file: {error}") from error
    listed = [document.get(name) for name in ("images", "annotations")] if isinstance(document, dict) else []
    if len(listed) != 2 or not all(isinstance(each, list) for each in listed):
        raise ConfigurationError(
            f"{url}: not an annotation file of COCO: it needs `images` and `annotations`"
        )
    found: dict[str, Any] = document
    return found


def write_by_image(file: IO[bytes], data: bytes, url: str) -> None:
    """Write a tar with a member for each image of a COCO file, ordered by name. The same data give the same
    bytes.

    `url` names the file in errors. Raises ConfigurationError if it is not in COCO's format.
    """
    document = _parse_coco(data, url)
    try:
        _write_tar(file, document)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{url}: not an annotation file of COCO: {type(error).__name__}: {error}"
        ) from error


def _write_tar(file: IO[bytes], document: Mapping[str, Any]) -> None:
    names = {each["id"]: each.get("name") for each in document.get("categories", ())}
    by_image: dict[Any, list[dict[str, Any]]] = {}
    for annotation in document["annotations"]:
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    with tarfile.open(fileobj=file, mode="w") as tar:
        for image in sorted(document["images"], key=lambda each: str(each["file_name"])):
            annotations = [dict(_used_fields(each, names)) for each in by_image.get(image["id"], ())]
            body = json.dumps({"annotations": annotations}, separators=(",", ":")).encode()
            member = tarfile.TarInfo(f"{sample_key(image['file_name'])[0]}.json")
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))


def _used_fields(annotation: Mapping[str, Any], names: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an annotation that ops read."""
    number = annotation["category_id"]
    yield "category_id", number
    if names.get(number) is not None:
        yield "category", names[number]
    for name in ("bbox", "iscrowd", "keypoints"):
        if annotation.get(name) is not None:
            yield name, annotation[name]
