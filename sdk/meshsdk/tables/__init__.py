"""Tables of other formats, opened through their own libraries: Iceberg and Lance.

Law: the libraries are imported where they are used, and read metadata alone or make copies; order, filters
and types are those of `mesh.open(kind="table")`.
"""
