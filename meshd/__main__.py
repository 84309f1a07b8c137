"""`python -m meshd` runs the `meshd` command."""

from meshd.cli import main

main()
