"""Locations on the command line: `s3://` addresses, local paths, standard input and output.

Law: text in, frozen values out; nothing is opened.
Invariant: a key never leads outside the folder it is downloaded into.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import click
from click.shell_completion import CompletionItem

from meshsdk.errors import ConfigurationError

SCHEME = "s3://"


@dataclass(frozen=True, slots=True, order=True)
class Remote:
    """An object, or with a key that is empty or ends in `/` a folder."""

    bucket: str
    key: str

    @property
    def is_folder(self) -> bool:
        return not self.key or self.key.endswith("/")

    def below(self, relative: str) -> Remote:
        """The object at a relative name within this folder."""
        folder = self.key if self.is_folder else f"{self.key}/"
        return Remote(self.bucket, folder + relative)

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True, order=True)
class Local:
    path: Path

    def below(self, relative: str) -> Local:
        """The file at a relative name below; raises ConfigurationError for a name that leads elsewhere."""
        parts = relative.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in relative:
            raise ConfigurationError(
                f"the key {relative!r} is no file name below {self.path}: copy it alone, to a name of its own"
            )
        return Local(self.path.joinpath(*parts))

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class Standard:
    """`-`: standard input as a source, standard output as a target."""

    def __str__(self) -> str:
        return "-"


Location = Remote | Local | Standard


def parse_location(text: str) -> Location:
    """`s3://bucket/key`, `-`, or a path. Raises BadParameter."""
    if text.startswith(SCHEME):
        bucket, _, key = text.removeprefix(SCHEME).partition("/")
        if not bucket:
            raise click.BadParameter(f"{text!r} names no bucket: write s3://BUCKET/KEY")
        return Remote(bucket, key)
    if "://" in text:
        raise click.BadParameter(f"{text!r}: addresses of the store begin with s3://")
    return Standard() if text == "-" else Local(Path(text))


class LocationType(click.ParamType[Location]):
    """A command-line argument that is a place."""

    name = "place"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        del param, ctx
        return parse_location(str(value))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Files by the shell itself; what is in the store is not asked for."""
        del ctx, param
        return [] if incomplete.startswith(SCHEME) else [CompletionItem(incomplete, type="file")]


class RemoteType(LocationType):
    """An argument that must be in the store."""

    name = "s3-url"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Remote:
        place = super().convert(value, param, ctx)
        if not isinstance(place, Remote):
            named = isinstance(place, Local) and not str(value).startswith((".", "/", "~"))
            meant = f"{SCHEME}{value}" if named else f"{SCHEME}BUCKET/KEY"
            self.fail(f"{value!r} is not in the store: write {meant}", param, ctx)
        return place


def relative_name(path: Path, root: Path) -> str:
    """The name of a file below a folder, with `/` on every system."""
    return PurePosixPath(*path.relative_to(root).parts).as_posix()
