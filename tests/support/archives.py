"""Tars that a node unpacks into objects."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

UNPACK: Final = {"snowball-auto-extract": "true"}
"""User metadata of a PUT that is unpacked."""
UNPACK_HEADERS: Final = {"x-amz-meta-snowball-auto-extract": "true"}


def tar_of(
    members: Mapping[str, bytes | None], pax: Mapping[str, str] | None = None, kind: bytes = tarfile.REGTYPE
) -> bytes:
    """A tar of files; None is a folder."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if data is None else kind
            info.size = len(data or b"")
            info.pax_headers = dict(pax or {})
            tar.addfile(info, io.BytesIO(data or b""))
    return body.getvalue()
