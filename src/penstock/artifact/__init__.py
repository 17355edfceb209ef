"""A built engine on disk: its manifest, and its files' checksums. docs/design/artifact.md explains
the design.
"""
