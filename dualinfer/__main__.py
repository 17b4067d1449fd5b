"""`python -m dualinfer`: the command line."""

from .cli.main import main

main()
