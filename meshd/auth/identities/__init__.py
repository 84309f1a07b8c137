"""Identities: users, access keys, named policies and temporary credentials.

All state lives in the control store. Secrets appear once, in the response that created them.
"""
