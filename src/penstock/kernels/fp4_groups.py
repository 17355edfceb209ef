"""Numbers per scale of MXFP4 and NVFP4. They are in a module without torch, for modules that read
configs; `kernels/fp4_matrix.py` describes the layout."""

from __future__ import annotations

MX_GROUP, NV_GROUP = 32, 16  # neighbours of a row that share a scale
