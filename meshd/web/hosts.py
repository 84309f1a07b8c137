"""Which bucket a request's host names: virtual-host addressing beside the path style.

Law: only below the domains the operator named; any other host, an address or a load balancer's name say, is
path style.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Hosts:
    """`domains`, such as `s3.example.com`: their subdomains are buckets."""

    def __init__(self, domains: Iterable[str] = ()) -> None:
        # The longest first: of `example.com` and `s3.example.com`, the latter is no bucket of the former.
        self._domains = tuple(sorted(domains, key=len, reverse=True))

    def __repr__(self) -> str:
        return f"<Hosts below {', '.join(self._domains) or 'no domain'}>"

    def bucket_of(self, host: str) -> str:
        """The bucket of a Host header, unchecked; empty for path style. The port is of no matter."""
        if not self._domains or not host:
            return ""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        name = name.rstrip(".").lower()
        for domain in self._domains:
            if name == domain:
                return ""
            if name.endswith(domain) and name[-len(domain) - 1] == ".":
                return name[: -len(domain) - 1]
        return ""
