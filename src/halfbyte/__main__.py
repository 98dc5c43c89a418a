"""`python -m halfbyte` is the command `halfbyte`."""

from .cli import main

main()
