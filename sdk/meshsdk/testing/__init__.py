"""Test suites for users: the guarantees of a loader as tests.

Law: these modules need only the public SDK and pytest's conventions, and nothing in `meshsdk` imports them.
"""
