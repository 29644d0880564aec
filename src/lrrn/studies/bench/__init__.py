"""Benchmarks against peers: what is solved, who solves it and how it is measured are apart."""
