"""Learning: objectives, and the training loop that minimises them."""

from lrrn.learning.losses import CrossEntropy, Margin, SquaredError
from lrrn.learning.many import fit_many
from lrrn.learning.monitor import DivergenceError
from lrrn.learning.objectives import Batch, ClassEnergy, Contrastive, FreeEnergy, Objective, SemiSupervised
from lrrn.learning.settings import Data, Settings
from lrrn.learning.trainer import Trainer

__all__ = [
    "Batch",
    "ClassEnergy",
    "Contrastive",
    "CrossEntropy",
    "Data",
    "DivergenceError",
    "FreeEnergy",
    "Margin",
    "Objective",
    "SemiSupervised",
    "Settings",
    "SquaredError",
    "Trainer",
    "fit_many",
]
