"""Integrity of stored bytes: verification, damage attribution, quarantine and scrub.

Law: damaged bytes are never served, and no damaged data is deleted on suspicion.
"""
