"""`meshd admin sts` and `whoami`: temporary credentials, in the format of a `credential_process`."""

from __future__ import annotations

import json
import re
import shlex
from typing import IO, TYPE_CHECKING, Any

import click

from meshd.cli.admin.client import admin_client_options
from meshd.cli.admin.output import answer, as_json, confirm, print_hint, show_one, yes

if TYPE_CHECKING:
    from meshd.cli.admin.client import AdminClient

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_EXAMPLES = """
\b
In ~/.aws/config, for programs that use botocore, which then refresh the credentials themselves:
  [profile train]
  endpoint_url = https://mesh.example:9000
  credential_process = meshd admin sts --endpoint https://mesh.example:9000 --keys /etc/mesh/ann.json

\b
In a shell, or for a program:
  meshd admin sts --keys ann.json --duration 12h > keys.json
  eval "$(meshd admin sts --duration 2h --policy read-train.json --env)"
"""


@click.command(epilog=_EXAMPLES)
@click.option(
    "--duration", default="1h", metavar="TIME", help="Lifetime, 15m to 36h; a plain number is seconds.  [1h]"
)
@click.option(
    "--policy", type=click.File("rb"), help="Policy document that limits the rights further; - for stdin."
)
@click.option("--name", default="", help="Name in the audit log, such as a job or a pod.")
@click.option("--env", is_flag=True, help="Print shell export lines instead of JSON.")
@admin_client_options(own_keys_first=True)
def sts(node: AdminClient, duration: str, policy: IO[bytes] | None, name: str, env: bool) -> None:
    """Get temporary credentials for the signing key.

    They never have more rights than the key and never outlive it. The output is what botocore expects of a
    credential_process.
    """
    body: dict[str, Any] = {"duration_seconds": parse_duration(duration), "name": name}
    if policy is not None:
        body["policy"] = policy.read().decode("utf-8", "replace")
    made = node.request("POST", "sts", body=body)
    click.echo(_exports(made) if env else json.dumps(made, indent=2))


@click.command()
@as_json
@admin_client_options(own_keys_first=True)
def whoami(node: AdminClient, as_json: bool) -> None:
    """Show the identity of the signing keys.

    \b
    meshd admin whoami
    """
    found = node.request("GET", "whoami")
    answer(found, as_json, lambda: show_one(found))


def add_revoke_command(group: click.Group, path: str, argument: str, question: str, help_text: str) -> None:
    """Add the command that revokes the temporary credentials of one entry of `path`. It asks `question`
    first, with the entry's name in place of `{}`."""

    @group.command("revoke", help=help_text)
    @click.argument("name", metavar=argument)
    @click.option(
        "--before",
        default="",
        metavar="TIME",
        help="Only those issued before this time: 2026-11-22T03:00:00Z.  [all]",
    )
    @yes
    @as_json
    @admin_client_options()
    def revoke(node: AdminClient, name: str, before: str, yes: bool, as_json: bool) -> None:
        confirm(question.format(name), yes)
        query = {"before": before} if before else None
        done = node.request("DELETE", "admin", path, name, "sessions", query=query)
        which = f"issued before {before}" if before else "issued until now"
        message = f"revoked the temporary credentials of {name} {which}; requests in progress still complete"
        answer(done, as_json, lambda: print_hint(message))


def parse_duration(text: str, option: str = "--duration") -> int:
    """Parse `900`, `15m` or `12h` into seconds. Raises UsageError; the node checks the limits."""
    match = re.fullmatch(r"([0-9]{1,9})([smh]?)", text)
    if match is None:
        raise click.UsageError(f"{option}: expected a time such as 15m, 12h or 900, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def _exports(made: dict[str, Any]) -> str:
    names = {
        "AWS_ACCESS_KEY_ID": "AccessKeyId",
        "AWS_SECRET_ACCESS_KEY": "SecretAccessKey",
        "AWS_SESSION_TOKEN": "SessionToken",
        "AWS_CREDENTIAL_EXPIRATION": "Expiration",
    }
    return "\n".join(f"export {name}={shlex.quote(made[field])}" for name, field in names.items())
