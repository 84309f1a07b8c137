"""Nodes, to operators and to each other: the map's changes, how far data moved, what a node holds.

Law: the map is changed here only as an administrator says; who decides about a name is `meshd.cluster`'s.
"""
