"""The S3 client and everything below it: transport, connections, retries, routing, credentials.

Law: lowest package of the SDK; it imports `errors`, `byte_sizes` and `meters` only, and knows no
dataset, loader or command. Every request here is idempotent unless it says otherwise.
"""

from typing import TYPE_CHECKING

from meshsdk.earlier_paths import earlier_names

if not TYPE_CHECKING:
    __getattr__ = earlier_names(__name__)
