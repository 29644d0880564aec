"""Unrolled networks as ONNX files."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from lrrn.export.unrolled import Unrolled
from lrrn.runtime.storage import write_bytes

OPSET, IR_VERSION = 17, 8
"""Versions of the operators and of the format; runtimes of 2022 and later read them."""


def save_onnx(model: Unrolled, path: str | os.PathLike[str]) -> None:
    """Write an unrolled network to an ONNX file; needs the package onnx.

    The graph has an input ``x`` of shape (n, d_0) and an output ``y`` of shape (n, d_L), for any n. It consists of MatMul, Add,
    Sub, Max, Min and Slice, in the order of :meth:`Unrolled.forward`. Its metadata hold the bound and its box as JSON, under
    ``lrrn.error_bound``, ``lrrn.lower`` and ``lrrn.upper``, and the labels of a classifier under ``lrrn.classes``.

    Parameters
    ----------
    model : Unrolled
        Result of :func:`lrrn.unroll`.
    path : path-like
        File to write; an existing one is replaced.
    """
    if not isinstance(model, Unrolled):
        raise TypeError(f"save_onnx takes the result of lrrn.unroll; got {type(model).__name__}")
    try:
        import onnx
    except ImportError:
        raise ImportError("writing ONNX needs the package onnx: pip install 'lrrn[onnx]'") from None
    graph = _Graph(model)
    known: dict[str, Any] = {name: getattr(model, name).tolist() for name in ("error_bound", "lower", "upper")}
    if model.classes is not None:
        known["classes"] = model.classes.tolist()
    built = onnx.helper.make_model(
        graph.built(), opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="lrrn"
    )
    onnx.helper.set_model_props(built, {f"lrrn.{name}": json.dumps(value) for name, value in known.items()})
    onnx.checker.check_model(built, full_check=True)
    write_bytes(path, built.SerializeToString())


class _Graph:
    """The nodes and constants of :meth:`Unrolled.forward`."""

    def __init__(self, model: Unrolled) -> None:
        self._model = model
        self._nodes: list[Any] = []
        self._constants: dict[str, Tensor] = {}

    def built(self) -> Any:
        from onnx import helper

        model = self._model
        number = helper.np_dtype_to_tensor_dtype(model.output.new_empty(0).numpy().dtype)
        features = "x"
        if model.iterations > 0:
            pull, s = self._affine("x", "input", "bias"), self._constant("start", model.start[None])
            matrix = self._constant("matrix", model.matrix.mT)
            for _ in range(model.iterations):
                inside = self._projected(s)
                mirrored = self._add("Add", inside, self._add("Sub", inside, s))
                s = self._add("Add", self._add("MatMul", mirrored, matrix), pull)
            width, dim = model.output.shape[1], len(model.start)
            ends = [self._constant(f"slice_{k}", torch.tensor([k])) for k in (dim - width, dim, 1)]
            features = self._add("Slice", self._projected(s), *ends)
        self._affine(features, "output", "output_bias", "y")
        return helper.make_graph(
            self._nodes,
            "lrrn",
            [helper.make_tensor_value_info("x", number, ["n", len(model.lower)])],
            [helper.make_tensor_value_info("y", number, ["n", len(model.output_bias)])],
            [_tensor(name, value) for name, value in self._constants.items()],
        )

    def _add(self, kind: str, *inputs: str, name: str | None = None) -> str:
        from onnx import helper

        name = name or f"v{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, list(inputs), [name]))
        return name

    def _constant(self, name: str, value: Tensor) -> str:
        self._constants[name] = value
        return name

    def _affine(self, of: str, weight: str, bias: str, name: str | None = None) -> str:
        product = self._add("MatMul", of, self._constant(weight, getattr(self._model, weight).mT))
        return self._add("Add", product, self._constant(bias, getattr(self._model, bias)), name=name)

    def _projected(self, s: str) -> str:
        below, above = self._model.bounded
        s = self._add("Max", s, self._constant("lo", self._model.lo)) if below else s
        return self._add("Min", s, self._constant("hi", self._model.hi)) if above else s


def _tensor(name: str, value: Tensor) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(value.contiguous().numpy(), name)
