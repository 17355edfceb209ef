"""Products with a weight matrix, unquantized or quantized."""
