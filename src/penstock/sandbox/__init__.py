"""sandbox: limits memory and time of untrusted templates and patterns. Runs chat templates,
tokenizers and regexes in child processes, since they may come from anyone.

Knows jobs and texts; no engine, no HTTP.
"""
