"""`meshd serve`: flags → settings → the supervisor.

The exit status is 0 after a clean stop, 1 if the node could not start, 2 for a usage error or a directory in
use. Nothing heavy is imported before the environment is set.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshd.config import ConfigError, load_settings
from meshd.config.options import OPTIONS
from meshd.errors import DirectoryInUseError
from meshd.process.data_dir import prepare_data_dir
from meshd.process.run_dir import prepare_run_dir
from meshwire.phrases import open_files_message

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from meshd.config import NodeSettings


_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENCV_FOR_THREADS_NUM",
)


def set_environment(settings: NodeSettings, env: MutableMapping[str, str]) -> None:
    """Set the thread counts, and the directory in which the processes share their metrics."""
    for name in _ONE_THREAD:
        env[name] = "1"
    env["PROMETHEUS_MULTIPROC_DIR"] = str(settings.metrics_dir)


_EXAMPLE = """
\b
Example:
  meshd serve --data-dir ./data --workers 2
  export AWS_ENDPOINT_URL=http://127.0.0.1:9000   # and the printed keys
  aws s3 mb s3://photos && aws s3 sync ./photos s3://photos

\b
Three nodes as one store (each object on two of them; every node serves all of it):
  meshd serve --data-dir /d --node-id n1 --listen 10.0.0.1:9000 --control etcd://10.0.0.9:2379
  … the same on n2 and n3; `mesh cluster status` shows them.  On one machine: meshd dev --nodes 3

\b
Every setting is also read from MESHD_<NAME> (MESHD_DATA_DIR, MESHD_LISTEN, …) and from the
--config file (`data-dir: ./data`). Flags override the environment, which overrides the file.
SIGTERM stops the node after running requests; SIGHUP reloads the users file and the TLS
pair (which is also reloaded when it changes) and reopens the audit log.
"""


class _ServeCommand(click.Command):
    """A command that tells where a setting without a flag is set."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            option = OPTIONS.get(error.option_name.removeprefix("--"))
            if option is None:
                raise
            raise click.UsageError(
                f"{option.name} is a setting without a flag: set {option.env}, or `{option.name}: …` in the "
                "--config file",
                ctx,
            ) from None


@click.command(cls=_ServeCommand, epilog=_EXAMPLE)
@click.option("--data-dir", metavar="DIR", help="Directory of the node's data; created if missing.")
@click.option(
    "--disk", multiple=True, metavar="DIR", help="Directory for data files, one per disk; repeatable."
)
@click.option(
    "--lost-disk", multiple=True, metavar="DIR", help="Start without this disk, which is lost permanently."
)
@click.option(
    "--disk-type", metavar="TYPE", help="rotational, solid-state, or auto: as the kernel reports it.  [auto]"
)
@click.option(
    "--read-ahead",
    metavar="SIZE",
    help="Page cache for upcoming batches on rotational disks.  [a quarter of the free memory]",
)
@click.option(
    "--index-dir", metavar="DIR", help="Directory of the index; use the fastest device.  [DATA_DIR/index]"
)
@click.option(
    "--listen", metavar="HOST:PORT", help="Address to listen on; port 0: a free port.  [127.0.0.1:9000]"
)
@click.option("--domain", multiple=True, metavar="NAME", help="Serve BUCKET.NAME as a bucket; repeatable.")
@click.option("--tls-cert", metavar="FILE", help="PEM certificate (and its chain): serve https.")
@click.option(
    "--tls-key", metavar="FILE", help="Private key of the certificate. Both are reloaded when they change."
)
@click.option("--workers", metavar="N", help="HTTP processes.  [cores, at most 4]")
@click.option("--transform-workers", metavar="N", help="Processes that decode and augment.  [cores]")
@click.option("--transform-memory", metavar="SIZE", help="Memory for samples per such process.  [2GiB]")
@click.option("--frame-cache", metavar="SIZE", help="Memory for finished batches.  [1GiB]")
@click.option(
    "--decoded-cache",
    metavar="SIZE",
    help="Disk space for decoded samples, auto or off.  [auto: a quarter of the free space]",
)
@click.option(
    "--decoded-cache-dir", metavar="DIR", help="Directory of decoded samples.  [<data-dir>/decoded]"
)
@click.option("--local-frames", metavar="on|off|DIR", help="Shared memory for jobs on this host.  [on]")
@click.option("--console", metavar="on|off", help="Serve the web console at /console.  [off]")
@click.option("--console-grafana", metavar="URL", help="A Grafana that the console links to.  [none]")
@click.option("--console-oidc-role", metavar="ROLE", help="Sign users in with this role's provider.  [none]")
@click.option("--console-oidc-client", metavar="ID", help="The console's client id at that provider.")
@click.option("--console-oidc-secret", metavar="FILE", help="File with the client's secret, if it has one.")
@click.option("--user-ops", metavar="on|off", help="Run ops that users push, in a sandbox.  [on]")
@click.option("--user-op-seconds", metavar="SECONDS", help="Time limit of a user op per sample.  [30]")
@click.option("--user-op-memory", metavar="SIZE", help="Memory limit of a user-op process.  [4GiB]")
@click.option("--durability", metavar="MODE", help="commit, or relaxed: synced a moment later.  [commit]")
@click.option(
    "--sync-interval", metavar="SECONDS", help="When relaxed: seconds until a write is on disk.  [1]"
)
@click.option("--view-cache", metavar="SIZE", help="Disk space for results of views.  [10GiB]")
@click.option(
    "--archive-ratio",
    metavar="N",
    help="Maximum ratio of an archive's decompressed to compressed size.  [50]",
)
@click.option(
    "--cache", metavar="SIZE", help="Disk space for the cache of origins.  [half of the free space]"
)
@click.option("--origin-credentials", metavar="DIR", help="Directory of credentials files for origins.")
@click.option(
    "--origin-patience",
    metavar="SECONDS",
    help="How long reads of cached data wait for an origin that does not answer.  [3]",
)
@click.option(
    "--scrub-interval", metavar="SECONDS", help="Time between scrubs of all bytes.  [1209600: 14 days]"
)
@click.option("--scrub-rate", metavar="SIZE", help="Bytes per second that a scrub reads.  [64MiB]")
@click.option(
    "--repair-interval", metavar="SECONDS", help="Time between comparisons with other copies.  [21600: 6 h]"
)
@click.option(
    "--tombstone-ttl", metavar="SECONDS", help="How long deletions are remembered.  [864000: 10 days]"
)
@click.option("--lifecycle-interval", metavar="SECONDS", help="Time between lifecycle sweeps.  [900]")
@click.option("--stale-uploads", metavar="DAYS", help="Abort multipart uploads of this age; 0: never.  [7]")
@click.option(
    "--keep-documents", metavar="DAYS", help="Keep unused plans and snapshots this long; 0: forever.  [90]"
)
@click.option("--users", metavar="FILE", help="YAML list of users.")
@click.option("--audit-log", metavar="FILE", help="Write one JSON line per request; - for stdout.")
@click.option("--audit-size", metavar="SIZE", help="Rotate the audit log at this size; 0: never.  [0]")
@click.option("--audit-files", metavar="N", help="Rotated audit logs to keep.  [10]")
@click.option("--trace-endpoint", metavar="URL", help="Send traces to this OTLP collector.  [none]")
@click.option("--trace-ratio", metavar="SHARE", help="Share of requests to trace, 0 to 1.  [0.01]")
@click.option("--trace-keys", metavar="on|off", help="Include object keys in traces.  [off]")
@click.option("--config", metavar="FILE", help="YAML file with any of these settings.")
@click.option(
    "--sigv2", metavar="WHICH", help="Accept signature version 2: presigned, all or off.  [presigned]"
)
@click.option("--region", metavar="NAME", help="Region of new buckets.  [us-east-1]")
@click.option(
    "--node-id", metavar="NAME", help="Node name in the cluster map, metrics and logs.  [host name]"
)
@click.option(
    "--control",
    metavar="WHERE",
    help="etcd://HOST:PORT[,…][/PREFIX] or kubernetes://NAMESPACE/NAME: join a mesh.",
)
@click.option("--control-ca", metavar="FILE", help="CA certificates for etcds://.")
@click.option("--peer-ca", metavar="FILE", help="CA certificates for other nodes.")
@click.option("--zone", metavar="NAME", help="Failure domain; copies are placed in different zones.")
@click.option("--rack", metavar="NAME", help="Network locality; reads prefer nodes of the same rack.")
@click.option("--machine", metavar="NAME", help="Machine that has the disks, if the node may move.")
@click.option("--role", multiple=True, metavar="ROLE", help="store, cache, compute; repeatable.  [all]")
@click.option("--weight", metavar="N", help="Share of the data.  [GiB of the disks]")
@click.option(
    "--copies", metavar="N", help="Nodes that store each object; set when the mesh is created.  [2]"
)
@click.option(
    "--slots",
    metavar="N",
    help="Number of slots, 131072 for 10,000 nodes; set when the mesh is created.  [16384]",
)
@click.option("--advertise", metavar="URL", help="URL of this node for other nodes.  [the listen address]")
@click.option("--lease", metavar="SECONDS", help="Silence after which a node counts as away.  [5]")
@click.option(
    "--down-after", metavar="SECONDS", help="Time after which an absent node counts as down.  [900]"
)
@click.option("--head-timeout", metavar="SECONDS", help="Time limit for a request's line and headers.  [20]")
@click.option("--max-connections", metavar="N", help="Maximum client connections of the node.  [16384]")
@click.option("--drain-timeout", metavar="SECONDS", help="Time for requests to finish after SIGTERM.  [30]")
@click.option(
    "--shutdown-delay",
    metavar="SECONDS",
    help="Time to go on accepting connections after SIGTERM, not ready.  [0; on Kubernetes 5]",
)
@click.option(
    "--legacy-metric-names",
    metavar="on|off",
    help="Also export renamed metrics under their earlier names.  [on]",
)
@click.option("--log-format", metavar="FORMAT", help="text or json.  [text]")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.  [info]")
@click.option("--transforms", hidden=True)  # earlier names, see meshd.config.options.RENAMED
@click.option("--remember-removals", hidden=True)
def serve(config: str | None, **flags: Any) -> None:
    """Run a storage node until SIGTERM. Prints `meshd ready endpoint=…` once it serves requests."""
    file = config or os.environ.get("MESHD_CONFIG")
    try:
        settings = load_settings(flags, config_file=Path(file) if file else None)
        lock = prepare_data_dir(settings)
        settings = prepare_run_dir(settings, os.environ)
        set_environment(settings, os.environ)
        gc.disable()  # saves a sixth of the time to load a thousand modules
        from meshd.process.serve import serve_node

        gc.freeze()  # modules are permanent: skipping their first collection saves another sixth
        gc.enable()
        serve_node(settings, os.environ, _say)
        lock.release()
    except (ConfigError, DirectoryInUseError) as error:
        click.echo(f"meshd: {open_files_message(error) or error}", err=True)
        raise SystemExit(2) from None


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:  # the process that started the daemon no longer reads
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
