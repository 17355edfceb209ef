"""Kimi K2: DeepSeek-V3's form by another name."""

from __future__ import annotations

from penstock.models.deepseek_v3 import ARCHITECTURE as ARCHITECTURE
from penstock.models.deepseek_v3 import build as build
from penstock.models.deepseek_v3 import read as read
