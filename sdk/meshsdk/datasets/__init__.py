"""Datasets: snapshots with fields and ops, batches, splits, mixes and preflight.

Law: values and single samples only; the loader loads. This package never imports `loader`.
"""

from typing import TYPE_CHECKING

from meshsdk.earlier_paths import earlier_names

if not TYPE_CHECKING:
    __getattr__ = earlier_names(__name__)
