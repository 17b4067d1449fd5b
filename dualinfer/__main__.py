"""`python -m dualinfer`: the command line."""

from .cli import main

main()
