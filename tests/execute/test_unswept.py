"""The collector of cycles rests while modules are imported, and is as it was afterwards, whatever
happened."""

from __future__ import annotations

import gc

import pytest

from penstock.execute.unswept import unswept


@pytest.mark.parametrize("on", [True, False])
def test_it_rests_and_is_as_it_was(on: bool) -> None:
    gc.unfreeze()  # what the tests' own conftest froze
    try:
        if not on:
            gc.disable()
        with pytest.raises(ImportError), unswept():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == on and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
