"""Models: what a config.json says (torch-free), and the decoder that computes it. A file per
model_type holds only what differs. It knows layers and ops; of checkpoints it knows no more than
config files.
"""
