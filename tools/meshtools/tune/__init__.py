"""Advice for a live mesh: what it does at present, what would be faster, and what a change has gained.

Law: forecasts are those of `meshtools.sizing`, with what was measured in place of what it assumes.
"""
