"""Runs the `penstock` command as `python -m penstock`."""

from penstock.cli import main

main()
