"""Measurements: the paper, the record of certified accuracy, benchmarks. The library does not need them."""
