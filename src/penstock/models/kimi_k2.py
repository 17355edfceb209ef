"""Kimi K2: the same architecture as DeepSeek-V3."""

from __future__ import annotations

from penstock.models.deepseek_v3 import ARCHITECTURE as ARCHITECTURE
from penstock.models.deepseek_v3 import build as build
from penstock.models.deepseek_v3 import read as read
