"""Datasets: snapshots with fields and ops, batches, splits, mixes and preflight.

Law: this package has only values and single samples; loading batches is the loader's task. It never imports
`loader`.
"""

from typing import TYPE_CHECKING

from meshsdk.earlier_paths import earlier_names

if not TYPE_CHECKING:
    __getattr__ = earlier_names(__name__)
