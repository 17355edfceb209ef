"""vLLM's arguments, and what becomes of each here: tables by where they are given,
and the sifting."""
