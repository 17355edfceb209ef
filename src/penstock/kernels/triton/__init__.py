"""The fast column: kernels written in Triton, for CUDA. Only this folder imports triton."""
