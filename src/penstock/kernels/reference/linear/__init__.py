"""Products with a weight matrix: bf16, fp8, integers, four-bit floats; one row, few, many."""
