"""Simulator: discrete events over modelled disks, processors, networks and trainers (`mesh simulate`).

Law: what the nodes decide by pure code is decided here by the same code, imported: the map's transitions,
placement, routes, orders of epochs, windows and reads. Only time is modelled.
Law: deterministic; a scenario with a seed gives the same result on every machine.
"""
