"""`python -m tandemkv` is the command line."""

from tandemkv.cli import main

main()
