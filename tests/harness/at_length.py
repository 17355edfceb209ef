"""The mark of tests that `make reliability` runs and `make test` leaves out: they take long, or hold
a figure to the clock of a quiet machine.

A file that imports it is run by the part "at length" of tests/reliability/run.py.
"""

from __future__ import annotations

import os

import pytest

at_length = pytest.mark.skipif(
    not os.environ.get("PENSTOCK_RELIABILITY"),
    reason="takes long, or needs a quiet machine: make reliability",
)
