"""The command line of `penstock`. Every command imports what it needs when it runs.

The distribution penstock installs all commands. penstock-client installs only the commands in
root.py, which need no engine.
"""

from importlib import import_module

from penstock.cli.root import ENGINE, app, main

__all__ = ["app", "main"]

if ENGINE:
    import_module("penstock.cli.commands")
