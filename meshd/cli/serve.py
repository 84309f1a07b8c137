"""`meshd serve`: flags → settings → the supervisor.

Law: exit status 0 after a clean stop, 1 when the node could not start, 2 for a usage error or a
directory in use. Imports nothing heavy before the environment is set.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import click

from meshd.config import ConfigError, load_settings
from meshd.errors import DirectoryInUseError
from meshd.process.bootstrap import prepare_data_dir, set_environment, without_system_authorities

_EXAMPLE = """
\b
Example:
  meshd serve --data-dir ./data --workers 2
  export AWS_ENDPOINT_URL=http://127.0.0.1:9000   # and the keys it printed
  aws s3 mb s3://photos && aws s3 sync ./photos s3://photos

\b
Three nodes that are one store (each object on two of them; any node answers):
  meshd serve --data-dir /d --node-id n1 --listen 10.0.0.1:9000 --control etcd://10.0.0.9:2379
  … the same on n2 and n3; `mesh cluster status` shows them.  On one machine: meshd dev --nodes 3

\b
Every setting is also read from MESHD_<NAME> (MESHD_DATA_DIR, MESHD_LISTEN, …) and from the
--config file (`data-dir: ./data`). A flag wins over the environment, that over the file.
SIGTERM stops after running requests are done; SIGHUP reads the users file and the TLS
pair again (that also when it changes) and opens the audit log anew.
"""


@click.command(epilog=_EXAMPLE)
@click.option("--data-dir", metavar="DIR", help="Where the node keeps its data; made if missing.")
@click.option("--disk", multiple=True, metavar="DIR", help="A disk's directory for data files; repeat it.")
@click.option(
    "--lost-disk", multiple=True, metavar="DIR", help="One that is gone for good: start without it."
)
@click.option("--index-dir", metavar="DIR", help="The index; wants the fastest device.  [DATA_DIR/index]")
@click.option("--listen", metavar="HOST:PORT", help="Port 0 takes a free one.  [127.0.0.1:9000]")
@click.option("--domain", multiple=True, metavar="NAME", help="BUCKET.NAME is a bucket; repeat it.")
@click.option("--tls-cert", metavar="FILE", help="PEM certificate (and its chain): serve https.")
@click.option("--tls-key", metavar="FILE", help="Its private key. Both are read again when they change.")
@click.option("--workers", metavar="N", help="HTTP processes.  [cores, at most 4]")
@click.option("--transform-workers", metavar="N", help="Processes that decode and augment.  [cores]")
@click.option("--transform-memory", metavar="SIZE", help="Most that one of them takes for samples.  [2GiB]")
@click.option("--frame-cache", metavar="SIZE", help="Memory for finished batches.  [1GiB]")
@click.option("--local-frames", metavar="on|off|DIR", help="Shared memory for jobs on this host.  [on]")
@click.option("--user-ops", metavar="on|off", help="Run ops that users push, confined.  [on]")
@click.option("--user-op-seconds", metavar="SECONDS", help="The longest for one sample.  [30]")
@click.option("--user-op-memory", metavar="SIZE", help="The most for a process of them.  [4GiB]")
@click.option("--durability", metavar="MODE", help="commit, or relaxed for caches.  [commit]")
@click.option("--view-cache", metavar="SIZE", help="Disk for results of views.  [10GiB]")
@click.option("--archive-ratio", metavar="N", help="Size of an archive, inflated, in its own.  [50]")
@click.option("--cache", metavar="SIZE", help="Disk for buckets with an origin.  [half of what is free]")
@click.option("--origin-credentials", metavar="DIR", help="Credentials for them, a file a name.")
@click.option(
    "--origin-patience", metavar="SECONDS", help="Of readers of what is cached, with a silent one.  [3]"
)
@click.option("--scrub-interval", metavar="SECONDS", help="Between looks at all bytes.  [1209600: 14 days]")
@click.option("--scrub-rate", metavar="SIZE", help="Most bytes a second that it reads then.  [64MiB]")
@click.option("--repair-interval", metavar="SECONDS", help="Between looks at the other copies.  [21600: 6 h]")
@click.option(
    "--tombstone-ttl", metavar="SECONDS", help="How long deletions are remembered.  [864000: 10 days]"
)
@click.option("--lifecycle-interval", metavar="SECONDS", help="Between looks for what expires.  [900]")
@click.option("--stale-uploads", metavar="DAYS", help="Abort uploads this old; 0 never.  [7]")
@click.option("--keep-documents", metavar="DAYS", help="Plans and snapshots nobody uses; 0 for ever.  [90]")
@click.option("--users", metavar="FILE", help="YAML list of users.")
@click.option("--audit-log", metavar="FILE", help="One JSON line a request; - for stdout.")
@click.option("--audit-size", metavar="SIZE", help="Begin another file at this size; 0 never.  [0]")
@click.option("--audit-files", metavar="N", help="Full ones that are kept, then.  [10]")
@click.option("--config", metavar="FILE", help="YAML file with any of these settings.")
@click.option("--sigv2", metavar="WHICH", help="Signature version 2: presigned, all or off.  [presigned]")
@click.option("--region", metavar="NAME", help="Region of new buckets.  [us-east-1]")
@click.option("--node-id", metavar="NAME", help="Name in the map, metrics and logs.  [host name]")
@click.option(
    "--control",
    metavar="WHERE",
    help="etcd://HOST:PORT[,…][/PREFIX] or kubernetes://NAMESPACE/NAME: be one of many.",
)
@click.option("--control-ca", metavar="FILE", help="Who vouches for the certificates of etcds://.")
@click.option("--peer-ca", metavar="FILE", help="Who vouches for the certificates of other nodes.")
@click.option("--zone", metavar="NAME", help="What fails together; copies are in different zones.")
@click.option("--rack", metavar="NAME", help="What is near each other.")
@click.option("--role", multiple=True, metavar="ROLE", help="store, cache, compute; repeat it.  [all]")
@click.option("--weight", metavar="N", help="Share of the data.  [GiB of the disks]")
@click.option("--copies", metavar="N", help="Nodes that keep each object; of a mesh's first node.  [2]")
@click.option("--advertise", metavar="URL", help="Where others reach this node.  [where it listens]")
@click.option("--lease", metavar="SECONDS", help="Silence after which a node counts as away.  [5]")
@click.option("--down-after", metavar="SECONDS", help="After which one that is away is given up.  [900]")
@click.option("--head-timeout", metavar="SECONDS", help="For a request's line and headers to come.  [20]")
@click.option("--max-connections", metavar="N", help="Open client connections of the node.  [16384]")
@click.option("--drain-timeout", metavar="SECONDS", help="For running requests after SIGTERM.  [30]")
@click.option("--legacy-metric-names", metavar="on|off", help="Export renamed metrics twice.  [on]")
@click.option("--log-format", metavar="FORMAT", help="text or json.  [text]")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.  [info]")
@click.option("--transforms", hidden=True)  # earlier names, see meshd.config.options.RENAMED
@click.option("--remember-removals", hidden=True)
def serve(config: str | None, **flags: Any) -> None:
    """Run a storage node until SIGTERM. Prints `meshd ready endpoint=…` when it serves."""
    file = config or os.environ.get("MESHD_CONFIG")
    try:
        settings = load_settings(flags, config_file=Path(file) if file else None)
        lock = prepare_data_dir(settings)
        set_environment(settings, os.environ)
        gc.disable()  # a sixth of what a thousand modules take to load
        with without_system_authorities(os.environ):
            from meshd.process.serve import serve_node
        gc.freeze()  # modules stay: the first look through them, at once otherwise, is another sixth
        gc.enable()
        serve_node(settings, os.environ, _say)
        lock.release()
    except (ConfigError, DirectoryInUseError) as error:
        click.echo(f"meshd: {error}", err=True)
        raise SystemExit(2) from None


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:  # whoever started the daemon no longer reads
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
