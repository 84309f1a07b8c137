"""Locations on the command line: `s3://` addresses, local paths, standard input and output.

Law: text in, frozen values out; nothing is opened.
Invariant: a key never leads outside the folder it is downloaded into.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import click
from click.shell_completion import CompletionItem

from meshsdk.errors import ConfigurationError
from meshwire.names import BucketNameError, check_bucket_name

SCHEME = "s3://"


@dataclass(frozen=True, slots=True, order=True)
class Remote:
    """An object, or a folder if the key is empty or ends in `/`."""

    bucket: str
    key: str

    @property
    def is_folder(self) -> bool:
        return not self.key or self.key.endswith("/")

    @property
    def folder(self) -> str:
        """What the keys below it begin with."""
        return self.key if self.is_folder else f"{self.key}/"

    def below(self, relative: str) -> Remote:
        """Return the object with a name relative to this folder."""
        return Remote(self.bucket, self.folder + relative)

    def holds(self, key: str) -> bool:
        """Whether a key is this object, or below this folder; `train-2/a` is not below `train`."""
        return key == self.key or key.startswith(self.folder)

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True, order=True)
class Local:
    """A file or a folder. `is_folder`: it was written with a `/` at the end, so it is one, or will be."""

    path: Path
    is_folder: bool = field(default=False, compare=False)

    def below(self, relative: str) -> Local:
        """Return the file with a relative name below this path. Raises ConfigurationError for a name that
        leads outside."""
        parts = relative.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in relative:
            raise ConfigurationError(
                f"the key {relative!r} is not a valid file name below {self.path}; copy it alone, under "
                "another name"
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
    """Parse `s3://bucket/key`, `-`, or a path. Raises BadParameter."""
    if text.startswith(SCHEME):
        bucket, _, key = text.removeprefix(SCHEME).partition("/")
        if not bucket:
            raise click.BadParameter(f"{text!r} names no bucket; write s3://BUCKET/KEY")
        try:
            check_bucket_name(bucket)
        except BucketNameError as error:
            raise click.BadParameter(f"{text!r}: {error}") from error
        return Remote(bucket, key)
    if text.startswith("s3:"):
        raise click.BadParameter(
            f"{text!r}: write s3://{text.removeprefix('s3:').strip('/') or 'BUCKET/KEY'}"
        )
    if "://" in text:
        raise click.BadParameter(f"{text!r}: addresses in the store must begin with s3://")
    return Standard() if text == "-" else Local(Path(text), text.endswith("/"))


class LocationType(click.ParamType[Location]):
    """A command-line argument that is a location."""

    name = "place"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        del param, ctx
        return parse_location(str(value))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete files; the store is not queried."""
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
    """Return the name of a file relative to a folder, with `/` on every system."""
    return PurePosixPath(*path.relative_to(root).parts).as_posix()
