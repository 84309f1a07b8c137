"""The cluster: its map, who owns what by it, who may read, decide and write. Pure; the same in daemons,
SDK and operator."""

from meshwire.cluster.maps import ClusterMap, Node, parse_map
from meshwire.cluster.placement import Placement, place, slot_of
from meshwire.cluster.routes import Route, Routes, routes

__all__ = ["ClusterMap", "Node", "Placement", "Route", "Routes", "parse_map", "place", "routes", "slot_of"]
