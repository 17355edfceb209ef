"""Strings to ids and back: tokenizer, chat templates, detokenisation, stop strings. Knows no engine
and no torch."""
