"""Schedule: what runs next, in numpy: rows, blocks, the prefix tree, the forecast, the step's plan.

Knows numbers and ids; no torch, no text."""
