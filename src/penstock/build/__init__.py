"""`penstock build`: makes an artifact from a checkpoint, stage by stage. docs/build.md is the
user's guide.
"""
