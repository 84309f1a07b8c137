"""A daemon as the benchmark's filler takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from bench.presigned_requests import Account
    from bench.servers import Server


@dataclass(frozen=True, slots=True)
class Target:
    """What `bench.bulk_fill.stock` needs of a server."""

    name: str
    port: int
    account: Account

    @property
    def host(self) -> str:
        """The Host header."""
        return f"127.0.0.1:{self.port}"

    def as_server(self) -> Server:
        """Itself, to a function that takes a contender of the benchmark."""
        return cast("Server", self)
