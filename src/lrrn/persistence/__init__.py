"""Model files: fitted estimators, Pipelines, networks and reference samples as safetensors with a JSON header, never pickle."""

from lrrn.persistence.serialization import load, save

__all__ = ["load", "save"]
