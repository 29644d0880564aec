"""Compiled kernels: arrays in, arrays out. They import nothing of this package but each other."""
