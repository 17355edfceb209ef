"""Models: a config.json's meaning (torch-free) and the decoder that computes it. A file per
model_type holds only the differences. Knows layers and ops; of checkpoints only config files."""
