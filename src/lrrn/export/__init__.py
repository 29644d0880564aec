"""Networks as graphs of plain operations, with the proven error of their outputs: torch.export, ONNX."""

from lrrn.export.files import save_onnx
from lrrn.export.unrolled import Unrolled, unroll

__all__ = ["Unrolled", "save_onnx", "unroll"]
