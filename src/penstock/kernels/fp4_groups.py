"""Group sizes of four-bit floats, without torch for config readers; `kernels/fp4_matrix.py` has the
layout."""

from __future__ import annotations

MX_GROUP, NV_GROUP = 32, 16  # neighbours of a row that share a scale
