"""The paper's tables and figures, made from data: training runs, what is measured of them, and a report that compares."""

from lrrn.studies.paper.reproduction import ITEMS, Reproduction, reproduce

__all__ = ["ITEMS", "Reproduction", "reproduce"]
