"""Schedule: decides what runs next, in numpy. Holds rows, KV cache blocks, the prefix tree, the
forecast of block use, and the step's plan.

Knows numbers and ids; no torch, no text."""
