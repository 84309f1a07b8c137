"""The S3 client and everything below it: transport, connections, retries, routing, credentials.

Law: this is the lowest package of the SDK. It imports only `errors`, `byte_sizes` and `loader_stats`, and
knows nothing of datasets, loaders or commands. Every request is idempotent unless it says otherwise.
"""

from typing import TYPE_CHECKING

from meshsdk.earlier_paths import earlier_names

if not TYPE_CHECKING:
    __getattr__ = earlier_names(__name__)
