"""Tools around Shardmesh that are no part of the product: `mesh doctor`, `mesh top`, `mesh cache`, traces.

Law: `meshtools` imports `meshsdk` and `meshwire`, and nobody imports it: `meshsdk` finds its commands and
its hooks for loaders as entry points (`meshsdk.tools_package`). Only the cache simulator also imports the
eviction policies of `meshd`, which need nothing but the standard library.
"""
