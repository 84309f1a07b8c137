"""What a request says before its body, as signing and parsing take it.

Law: apart from `parsing`, so that who only signs does not load every operation there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class RequestHead:
    """`raw_path` and `raw_query` are as sent, still percent-encoded, the query without `?`; header names are
    lower-case, the values of repeated headers joined by `,`. `host_bucket` is the bucket that the host names
    (virtual-host addressing); the path is then the key's alone."""

    method: str
    raw_path: str
    raw_query: str
    headers: Mapping[str, str]
    host_bucket: str = ""
