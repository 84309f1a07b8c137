"""The cluster map, the placement of slots, and the primary, read set and write set of a key.

Law: pure functions of the map, computed alike by daemons, SDK and operator.
"""

from meshwire.cluster.cluster_map import ClusterMap, Node, parse_map
from meshwire.cluster.placement import Placement, compute_placement, slot_of
from meshwire.cluster.routes import Route, Routes, routes

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
