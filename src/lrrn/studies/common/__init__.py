"""Code shared by the paper and the record: training runs, the pool that executes them, comparisons and the report."""
