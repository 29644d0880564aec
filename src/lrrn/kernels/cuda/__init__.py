"""Kernels for CUDA devices, compiled by Triton."""
