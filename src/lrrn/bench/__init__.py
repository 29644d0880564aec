"""Benchmarks: problems, contenders and the neutral objective that rescores them, kept apart."""
