"""The command line of `penstock` and `python -m penstock`. Every command imports what it needs when it runs."""

from penstock.cli.commands import app, main

__all__ = ["app", "main"]
