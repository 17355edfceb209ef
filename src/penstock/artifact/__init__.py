"""A built engine on disk: its manifest, and the checksums of its files. docs/design/artifact.md
says why it is so."""
