"""Execute: runs steps on devices. Rows, blocks and ids; no text, no requests."""
