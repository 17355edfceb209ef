"""sandbox: processes inside limits of memory and time, where templates, tokenizers and patterns of
others are run.

It knows jobs and texts; no engine, no HTTP.
"""
