"""The commands of `mesh` that this package registers: cache, doctor, simulate, sizing, top and tune.

Law: as in `meshsdk.cli`: a command parses, calls the tool and prints; the tool's modules are imported when
the command runs.
"""
