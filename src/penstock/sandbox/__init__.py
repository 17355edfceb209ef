"""sandbox: processes with limits on memory and time, which run templates, tokenizers and patterns
from others.

Knows jobs and texts; no engine, no HTTP.
"""
