"""Load data sets by name or from files: scikit-learn's digits, the MNIST family, CIFAR-10, users' own tables."""

from lrrn.datasets.catalogue import FILES, FOLDERS, NAMES, PREFIX, find, image_shape, load
from lrrn.datasets.idx import read_idx
from lrrn.datasets.rows import DataError
from lrrn.datasets.tables import TABLES, open_table, read_table

__all__ = [
    "FILES",
    "FOLDERS",
    "NAMES",
    "PREFIX",
    "TABLES",
    "DataError",
    "find",
    "image_shape",
    "load",
    "open_table",
    "read_idx",
    "read_table",
]
