"""Models: a decoder for each model type, and its config. Reading a config.json needs no torch. Each
model_type has a file with what is particular to it. Knows layers and operations; of a checkpoint it
knows the config files only."""
