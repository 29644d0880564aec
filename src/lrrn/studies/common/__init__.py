"""What the paper and the record share: training runs, the pool that carries them out, comparisons and the report."""
