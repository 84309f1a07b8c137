"""Extras of the distribution with their lowest and newest versions: `python -m tests.extras`."""
