"""Reproduction of the paper's tables and figures: training runs, their measurements, and a report that compares."""

from lrrn.studies.paper.reproduction import ITEMS, Reproduction, reproduce

__all__ = ["ITEMS", "Reproduction", "reproduce"]
