"""Studies: reproduction of the paper, the record of certified accuracy, benchmarks. The library does not depend on them."""
