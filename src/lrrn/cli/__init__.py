"""The command line: parse, call, print."""

from lrrn.cli.commands import app

__all__ = ["app"]
