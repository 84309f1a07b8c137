"""The dashboards: cluster, training input, nodes and disks, datasets.

Law: a dashboard answers one reader's questions from the top down: is all well, what is it doing, what limits
it. Every expression gives data from a node that has work; a test asks a real Prometheus.
"""

from __future__ import annotations

from typing import Final

from meshoperator.monitoring.dashboard_cluster import CLUSTER
from meshoperator.monitoring.dashboard_datasets import DATASETS
from meshoperator.monitoring.dashboard_nodes import NODES
from meshoperator.monitoring.dashboard_training import TRAINING

DASHBOARDS: Final = (CLUSTER, TRAINING, NODES, DATASETS)
