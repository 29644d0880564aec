"""Benchmark of certified accuracy (the record): our networks and baselines, certified and attacked on the same images."""
