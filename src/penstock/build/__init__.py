"""`penstock build`: from a checkpoint to an artifact, a stage after the other. docs/build.md is for
its users."""
