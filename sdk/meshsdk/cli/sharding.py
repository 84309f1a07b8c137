"""The options of views that show samples as shards.

Law: reads options; what a layout may be is decided by the node, whose complaints name the field.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

import click

from meshsdk import views
from meshsdk.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_OPTIONS: Final = (
    click.option("--shards", type=int, metavar="N", help="Not objects but shards of N samples.  [1000]"),
    click.option("--shard-size", type=int, metavar="BYTES", help="Shards of about so many bytes."),
    click.option("--tfrecord", is_flag=True, help="Shards are TFRecords of tf.Example, not tars."),
    click.option(
        "--feature",
        "features",
        multiple=True,
        metavar="EXT=KIND",
        help="A TFRecord's int64 or float; repeat.",
    ),
    click.option("--archives", is_flag=True, help="Samples are the members of tars, zips …, regrouped."),
    click.option("--where", default="", metavar="EXPR", help="Only samples it holds for: 'size > 10000'."),
    click.option(
        "--sort", default="", metavar="EXPR", help="In order of its values: 'part(stem, \"-\", 1)'."
    ),
    click.option("--group", default="", metavar="EXPR", help="A folder for each of its values: 'cls'."),
    click.option("--split", multiple=True, metavar="NAME=SHARE", help="Parts, a folder each; repeat."),
    click.option("--split-by", default="", metavar="EXPR", help="Samples of one value are in one part."),
)


@dataclass(frozen=True)
class ShardChoices:
    """What the options say."""

    shards: int | None
    shard_size: int | None
    tfrecord: bool
    features: Sequence[str]
    archives: bool
    where: str
    sort: str
    group: str
    split: Sequence[str]
    split_by: str

    @property
    def meant(self) -> bool:
        """Whether shards are asked for."""
        return any(value not in (None, False, "", ()) for value in vars(self).values())

    def document(self, match: Sequence[str], prefix: str, shuffle: int | None) -> dict[str, Any]:
        """Raises ConfigurationError."""
        return views.shards_view(
            count=self.shards,
            size=self.shard_size,
            match=match,
            prefix=prefix,
            shuffle=shuffle,
            split=dict(map(_share, self.split)),
            format="tfrecord" if self.tfrecord else "tar",
            samples="archives" if self.archives else "objects",
            where=self.where,
            sort=self.sort,
            group=self.group,
            split_by=self.split_by,
            features=dict(map(_feature, self.features)),
        )


def shard_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of shards, and passes `shards`, a ShardChoices."""

    @functools.wraps(command)
    def wrapped(*args: Any, **given: Any) -> Any:
        mine = {field.name: given.pop(field.name) for field in fields(ShardChoices)}
        return command(*args, shards=ShardChoices(**mine), **given)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def summary(view: Mapping[str, Any]) -> str:
    """A layout in a line."""
    size = view.get("size")
    parts = [f"{size} bytes each" if size else f"{view.get('count')} samples each"]
    parts += [f"as {view['format']}"] if "format" in view else []
    parts += [f"of {view['samples']}"] if "samples" in view else []
    parts += [f"{name} {view[name]}" for name in ("where", "group", "sort", "split_by") if view.get(name)]
    parts += [f"shuffled by {view['shuffle']}"] if view.get("shuffle") is not None else []
    parts += [f"split {' '.join(view['split'])}"] if view.get("split") else []
    return ", ".join(parts)


def _share(text: str) -> tuple[str, float]:
    name, equals, share = text.partition("=")
    try:
        return name, float(share if equals else "")
    except ValueError:
        raise ConfigurationError(f"--split {text!r}: expected NAME=SHARE, as train=0.9") from None


def _feature(text: str) -> tuple[str, str]:
    name, equals, kind = text.partition("=")
    if not name or not equals:
        raise ConfigurationError(f"--feature {text!r}: expected EXT=KIND, as cls=int64")
    return name, kind
