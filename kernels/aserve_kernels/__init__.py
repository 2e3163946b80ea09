"""Kernels, one op per file: the kernel, its wrapper, and its torch reference."""
