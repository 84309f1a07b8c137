"""The cluster map, slot placement, and the primary, read set and write set of a key.

Law: pure functions of the map; daemons, SDK and operator compute the same results.
"""

from meshwire.cluster.cluster_map import ClusterMap, Node, parse_map
from meshwire.cluster.placement import Placement, compute_placement
from meshwire.cluster.routes import Route, Routes, routes, slot_of

__all__ = [
    "ClusterMap",
    "Node",
    "Placement",
    "Route",
    "Routes",
    "compute_placement",
    "parse_map",
    "routes",
    "slot_of",
]
