"""Linear operators (matrices, convolutions), block-tridiagonal matrices, and proven bounds on norms and spectra."""
