"""Compiled kernels, which read and write plain arrays. They import only each other from this package."""
