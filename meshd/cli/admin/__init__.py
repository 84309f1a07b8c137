"""`meshd admin`: users, keys, policies, roles, temporary credentials and the log level of a running node.

It talks to the node only through its admin API, so it works from any host, and imports nothing heavy. A
secret is printed once, when it is created, and never accepted on the command line.
"""

from __future__ import annotations

import click

from meshd.cli.admin.idp import idp
from meshd.cli.admin.keys import key
from meshd.cli.admin.log_level import log_level
from meshd.cli.admin.policies import policy
from meshd.cli.admin.roles import role
from meshd.cli.admin.sts import sts, whoami
from meshd.cli.admin.users import user

_EXAMPLES = """
\b
Create a user and credentials for a training pod that may read only one prefix:
  export MESHD_ROOT_ACCESS_KEY=… MESHD_ROOT_SECRET_KEY=…     # or --data-dir DIR on the node itself
  meshd admin user add ann
  meshd admin key add ann --json > ann.json                  # the secret is shown only once
  meshd admin policy put read-train read-train.json
  meshd admin policy attach read-train --user ann
  meshd admin sts --keys ann.json --duration 12h --policy read-train.json

\b
Keys are taken from the first of: --keys FILE, --data-dir DIR (its root-credentials.json),
MESHD_ROOT_ACCESS_KEY and MESHD_ROOT_SECRET_KEY, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.
The node is the first of: --endpoint, MESHD_ENDPOINT, AWS_ENDPOINT_URL, else http://127.0.0.1:9000.
"""


@click.group(epilog=_EXAMPLES)
def admin() -> None:
    """Manage users, keys, policies, roles and the log level of a running node; get temporary credentials."""


for command in (user, key, policy, idp, role, sts, whoami, log_level):
    admin.add_command(command)
