"""Run the command line with ``python -m lrrn``."""

from lrrn.cli import app

app()
