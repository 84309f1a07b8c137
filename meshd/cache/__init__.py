"""What a cache keeps: pure policies, and a simulator that runs the same code on traces.

Law: nothing here reads a disk, a socket, a clock or a random number; what happened comes in as arguments,
what must go comes out as data. Imports the standard library only: `mesh cache simulate` runs anywhere.
"""
