"""The commands of `mesh` that this package registers: doctor, top and cache.

Law: as in `meshsdk.cli`: a command parses, calls the tool and prints; the tool's modules are imported when
the command runs.
"""
