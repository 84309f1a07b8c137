"""`python -m meshsdk` runs the `mesh` command."""

from meshsdk.cli import main

main()
