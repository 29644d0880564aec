"""Process-wide settings and resources: threads, ranks, devices, precision, files. No mathematics."""
