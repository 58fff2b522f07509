"""`python -m sbp.cli`, where the console script is not at hand."""

from sbp.cli.main import main

main()
