"""`python -m meshd` is the `meshd` command."""

from meshd.cli import main

main()
