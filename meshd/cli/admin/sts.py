"""`meshd admin sts` and `whoami`: temporary credentials, printed as a `credential_process` prints them."""

from __future__ import annotations

import json
import re
import shlex
from typing import IO, TYPE_CHECKING, Any

import click

from meshd.cli.admin.client import admin_client_options
from meshd.cli.admin.output import answer, as_json, show_one

if TYPE_CHECKING:
    from meshd.cli.admin.client import AdminClient

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_EXAMPLES = """
\b
In ~/.aws/config, for every program that uses botocore, with fresh credentials whenever it needs them:
  [profile train]
  endpoint_url = https://mesh.example:9000
  credential_process = meshd admin sts --endpoint https://mesh.example:9000 --keys /etc/mesh/ann.json

\b
In a shell, or for a program:
  meshd admin sts --keys ann.json --duration 12h > keys.json
  eval "$(meshd admin sts --duration 2h --policy read-train.json --env)"
"""


@click.command(epilog=_EXAMPLES)
@click.option("--duration", default="1h", metavar="TIME", help="15m to 36h; 900 is seconds.  [1h]")
@click.option("--policy", type=click.File("rb"), help="Narrower rights: a policy document; - for stdin.")
@click.option("--name", default="", help="Shown in the audit log: a job, a pod.")
@click.option("--env", is_flag=True, help="Print lines for a shell to evaluate, not JSON.")
@admin_client_options(own_keys_first=True)
def sts(node: AdminClient, duration: str, policy: IO[bytes] | None, name: str, env: bool) -> None:
    """Get temporary credentials of the key that signs.

    They never may more than it, and end with it.

    Prints what botocore expects of a credential_process.
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
    """Show who the node takes these keys for.

    \b
    meshd admin whoami
    """
    found = node.request("GET", "whoami")
    answer(found, as_json, lambda: show_one(found))


def parse_duration(text: str) -> int:
    """Seconds of `900`, `15m`, `12h`. Raises UsageError; the node judges how long is too long."""
    match = re.fullmatch(r"([0-9]{1,9})([smh]?)", text)
    if match is None:
        raise click.UsageError(f"--duration: expected a time such as 15m, 12h or 900, not {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def _exports(made: dict[str, Any]) -> str:
    names = {
        "AWS_ACCESS_KEY_ID": "AccessKeyId",
        "AWS_SECRET_ACCESS_KEY": "SecretAccessKey",
        "AWS_SESSION_TOKEN": "SessionToken",
        "AWS_CREDENTIAL_EXPIRATION": "Expiration",
    }
    return "\n".join(f"export {name}={shlex.quote(made[field])}" for name, field in names.items())
