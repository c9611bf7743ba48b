"""`python -m distdiag`."""

from distdiag.cli import main

main()
