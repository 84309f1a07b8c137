"""Test suites for users: the laws of a loader as tests.

Law: needs only the public SDK and pytest's conventions; nothing in `meshsdk` imports it.
"""
