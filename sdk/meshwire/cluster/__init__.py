"""The cluster: its map, and who owns what by it. Pure; the same in daemons, SDK and operator."""

from meshwire.cluster.maps import ClusterMap, Node, parse_map
from meshwire.cluster.placement import Placement, place, slot_of

__all__ = ["ClusterMap", "Node", "Placement", "parse_map", "place", "slot_of"]
