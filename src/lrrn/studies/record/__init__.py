"""The record of certified accuracy: our networks and baselines, trained, certified and attacked on the same images."""
