"""Operations as Triton kernels for CUDA. Only this folder imports triton. A kernel runs as many
programs, each of which computes a part of the output."""
