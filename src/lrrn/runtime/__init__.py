"""Process policy: threads, ranks, devices, precision, files. No mathematics."""
