"""The loaders a user would pick instead, in an environment of their own.

Law: imports only the standard library, torch, numpy, Pillow and the one peer asked for; never meshd or
meshsdk. Each loader is set up as its own documentation shows, with the same two worker processes and the same
transform.
"""
