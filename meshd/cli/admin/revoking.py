"""What `meshd admin user revoke` and `meshd admin key revoke` have in common."""

from __future__ import annotations

import click

before = click.option(
    "--before", default="", metavar="TIME", help="Only those issued before: 2026-11-22T03:00:00Z.  [all]"
)


def asked(before: str) -> dict[str, str] | None:
    """The query of the call."""
    return {"before": before} if before else None


def revoked(whose: str, before: str) -> str:
    """What was done, in a sentence."""
    which = f"issued before {before}" if before else "issued until now"
    return f"ended the temporary credentials of {whose} {which}; requests under way are answered"
