"""The command line: parse, call, print."""

from lrrn.cli.main import app

__all__ = ["app"]
