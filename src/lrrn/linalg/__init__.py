"""Block-tridiagonal matrices, and proven bounds on their spectra."""
