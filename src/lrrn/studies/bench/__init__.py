"""Benchmarks against other libraries. Problems, solvers and time measurement are in separate modules."""
