"""Forwarding of client requests to the nodes that own their names, and relaying of the responses.

A forwarded request carries the client's own signature, and the owner decides. A request is forwarded at most
once.
"""
