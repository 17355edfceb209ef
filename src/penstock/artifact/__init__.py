"""A built engine on disk. `penstock build` writes this folder (the artifact): weights and kernels,
their checksums, and a manifest with the option values chosen for one machine.
docs/design/artifact.md explains the design.
"""
