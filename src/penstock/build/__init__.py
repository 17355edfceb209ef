"""`penstock build`: makes a built engine from a checkpoint. A built engine (also called artifact)
is a folder with converted weights, and option values chosen by measurements on this machine. The
build runs in stages. docs/build.md is the user's guide.
"""
