"""Assets: files that op arguments name by content, such as a tokenizer or a user module.

Law: a spec that is hashed or run names an asset only as `sha256:HEX`, and bytes with another hash are
never used. Seam: declare the parameter as `Parameter("file", asset)`; the op is then built with an
`Asset`.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshd.errors import missing_asset_message
from meshd.transform.source_files import SourceGoneError
from meshwire.strict_json import PlanError, checked_text, shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from meshd.transform.source_files import Piece, SourceFiles

PREFIX = "sha256:"
MAX_ASSET_BYTES = 64 << 20
_NAME = re.compile(r"sha256:[0-9a-f]{64}")

AssetLoader = Callable[[str], "Asset"]
"""Maps a digest (hex) to the asset. Raises MissingAssetError, SourceGoneError."""


class MissingAssetError(PlanError):
    """The plan names content that this node does not have, so the node cannot reproduce the plan."""


class BadAssetError(ValueError):
    """The content is not what the op needs. An op's constructor raises it for its `parameter`."""

    def __init__(self, parameter: str, reason: str) -> None:
        super().__init__(reason)
        self.parameter, self.reason = parameter, reason[:300]


@dataclass(frozen=True, slots=True)
class Asset:
    """The content of an asset. `digest`: sha256 of `data` in hex.

    Equality compares only the digest, so values derived from an asset can be cached by the asset.
    """

    digest: str
    data: bytes = field(repr=False, compare=False)


def asset(value: Any, path: str) -> str:
    """An object, as s3://BUCKET/KEY, or its content, as sha256:HEX.

    When an op is built, the value is the latter: a node has replaced the address. Returns the digest.
    """
    text = checked_text(value, path, at_most=1200)
    if _NAME.fullmatch(text):
        return text.removeprefix(PREFIX)
    if text.startswith("s3://"):
        raise PlanError(path, f"{shown_value(text)} is not pinned yet: plans and views name it by sha256")
    raise PlanError(path, f"expected s3://BUCKET/KEY or sha256:HEX, got {shown_value(text)}")


def optional_asset(value: Any, path: str) -> str | None:
    """An object, as s3://BUCKET/KEY, or its content, as sha256:HEX; or null.

    As `asset`.
    """
    return None if value is None else asset(value, path)


def verify_asset(digest: str, data: bytes) -> Asset:
    """Return the asset. Raises SourceGoneError if the bytes do not match the digest."""
    if hashlib.sha256(data).hexdigest() != digest:
        raise SourceGoneError(f"the stored copy of the asset {PREFIX}{digest[:12]}… is damaged")
    return Asset(digest, data)


def no_assets(digest: str) -> Asset:
    """An asset loader that has no assets. Raises MissingAssetError."""
    raise MissingAssetError("", missing_asset_message(digest))


class LoadedAssets:
    """A cache of the assets a process used last, up to `limit` bytes. Not thread-safe."""

    def __init__(self, files: SourceFiles, limit: int = 4 * MAX_ASSET_BYTES) -> None:
        self._files, self._limit = files, limit
        self._known: OrderedDict[str, Asset] = OrderedDict()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<LoadedAssets {len(self._known)}, {self._bytes} bytes>"

    def loader(self, places: Mapping[str, Sequence[Piece]]) -> AssetLoader:
        """Return a loader for assets at these locations."""

        def load(digest: str) -> Asset:
            known = self._known.get(digest)
            if known is not None:
                self._known.move_to_end(digest)
                return known
            if digest not in places:
                return no_assets(digest)
            return self._keep(verify_asset(digest, self._files.read_pieces(places[digest])))

        return load

    def _keep(self, loaded: Asset) -> Asset:
        self._known[loaded.digest] = loaded
        self._bytes += len(loaded.data)
        while self._bytes > self._limit and len(self._known) > 1:
            self._bytes -= len(self._known.popitem(last=False)[1].data)
        return loaded
