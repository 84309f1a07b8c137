"""Tests that look at the console: one package, so that its mesh and browser end with them."""
