"""The command line of `penstock` and `python -m penstock`. Every command imports what it needs when
it runs.

The distribution penstock installs all commands, penstock-client only those of `root`, which need no
engine.
"""

from importlib import import_module

from penstock.cli.root import ENGINE, app, main

__all__ = ["app", "main"]

if ENGINE:
    import_module("penstock.cli.commands")
