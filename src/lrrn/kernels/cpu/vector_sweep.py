"""Vector code for the coordinate-descent kernel: the two inner loops, with explicit vectors of VECTOR_BYTES.

Each sample occupies one lane: unit j of lane s is at [j, s]. Automatic vectorisation would guard each short loop over lanes
against aliasing and use half the vector width of wide machines. With explicit vectors, the steps of a panel stay in registers
and the update runs near the rate of a matrix product. On machines with narrower vectors, the code generator splits them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PANEL = 8
VECTOR_BYTES = 64
FUSED = ("contract",)


class Vectors:
    """Helpers that emit LLVM vector instructions over the lanes of two-dimensional arrays."""

    def __init__(self, context: Any, builder: Any, dtype: Any) -> None:
        self.builder = builder
        self.item = dtype.bitwidth // 8
        self.width = VECTOR_BYTES // self.item
        self.kind = ir.VectorType(context.get_data_type(dtype), self.width)
        self.nothing = ir.Constant(self.kind, ir.Undefined)
        self.zero = ir.Constant(self.kind, [0.0] * self.width)

    def number(self, value: int) -> Any:
        return ir.Constant(ir.IntType(64), value)

    def address(self, data: Any, index: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(data, [index]), self.kind.as_pointer())

    def load(self, address: Any) -> Any:
        return self.builder.load(address, align=self.item)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, address, align=self.item)

    def spread(self, data: Any, index: Any) -> Any:
        """Load one number into every lane (broadcast)."""
        entry = self.builder.load(self.builder.gep(data, [index]))
        single = self.builder.insert_element(self.nothing, entry, ir.Constant(ir.IntType(32), 0))
        same = ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width)
        return self.builder.shuffle_vector(single, self.nothing, same)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, as a fused multiply-add where available."""
        return self.builder.fadd(c, self.builder.fmul(a, b, flags=FUSED), flags=FUSED)

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), b, a)

    def smaller(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), b, a)

    def sum(self, vector: Any) -> Any:
        """Return the sum of the lanes of a vector, in any order."""
        kind = self.kind.element
        name = f"llvm.vector.reduce.fadd.v{self.width}f{8 * self.item}"
        routine = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(kind, [kind, self.kind]), name)
        return self.builder.call(routine, [ir.Constant(kind, 0.0), vector], fastmath=("reassoc",))

    def any(self, flags: Any) -> Any:
        """Whether any lane of a vector of flags is set."""
        return self.builder.icmp_unsigned(
            "!=", self.builder.bitcast(flags, ir.IntType(self.width)), ir.Constant(ir.IntType(self.width), 0)
        )


class _Array(NamedTuple):
    data: Any
    shape: Any


def _arrays(context: Any, builder: Any, signature: Any, arguments: Any, count: int) -> list[_Array]:
    models = [context.data_model_manager[kind] for kind in signature.args[:count]]
    return [
        _Array(model.get(builder, value, "data"), model.get(builder, value, "shape"))
        for model, value in zip(models, arguments[:count], strict=True)
    ]


def _update_rows(
    v: Vectors, g: Any, panel: Any, steps: list[Any], lanes: Any, lane: Any, offset: Any, first: Any, rows: Any
) -> None:
    """Add a panel of the Hessian times the steps of its units to one vector of lanes of the gradient."""
    builder = v.builder
    with cgutils.for_range(builder, rows) as row:
        target = v.address(g.data, builder.add(builder.mul(builder.add(first, row.index), lanes), lane))
        source = builder.add(offset, builder.mul(row.index, v.number(PANEL)))
        total = v.load(target)
        for i, step in enumerate(steps):
            total = v.multiply_add(v.spread(panel.data, builder.add(source, v.number(i))), step, total)
        v.store(total, target)


@intrinsic  # type: ignore[untyped-decorator]
def multiply_panel(typing_context: Any, zs: Any, gs: Any, panels: Any, offset: Any, unit: Any, first: Any, rows: Any) -> Any:
    """gs[first : first + rows] += H[first : first + rows, unit : unit + PANEL] zs[unit : unit + PANEL]; see sweep_panel."""
    number = types.int64
    signature = types.void(zs, gs, panels, number, number, number, number)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = Vectors(context, builder, signature.args[0].dtype)
        z, g, panel = _arrays(context, builder, signature, arguments, 3)
        offset, unit, first, rows = arguments[3:]
        lanes = builder.extract_value(z.shape, 1)
        with cgutils.for_range(builder, builder.sdiv(lanes, v.number(v.width))) as group:
            lane = builder.mul(group.index, v.number(v.width))
            places = [builder.add(builder.mul(builder.add(unit, v.number(i)), lanes), lane) for i in range(PANEL)]
            values = [v.load(v.address(z.data, place)) for place in places]
            some = ir.Constant(ir.VectorType(ir.IntType(1), v.width), [0] * v.width)
            for value in values:
                some = builder.or_(some, builder.fcmp_unordered("!=", value, v.zero))
            with builder.if_then(v.any(some)):
                _update_rows(v, g, panel, values, lanes, lane, offset, first, rows)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def sweep_panel(
    typing_context: Any,
    zs: Any,  # (rows, lanes): activations, in and out
    gs: Any,  # (rows, lanes): gradient H z - q, in and out
    los: Any,  # (rows, lanes)
    his: Any,  # (rows, lanes)
    inverse_diagonal: Any,  # (rows,)
    panels: Any,  # (total,): H[first : first + rows, unit : unit + PANEL] from ``offset`` on, row by row
    offset: Any,
    unit: Any,
    first: Any,
    rows: Any,
) -> Any:
    """Minimise over PANEL units one after the other, then update the gradient of ``rows`` rows."""
    number = types.int64
    signature = types.void(zs, gs, los, his, inverse_diagonal, panels, number, number, number, number)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = Vectors(context, builder, signature.args[0].dtype)
        z, g, lo, hi, inverse, panel = _arrays(context, builder, signature, arguments, 6)
        offset, unit, first, rows = arguments[6:]
        lanes = builder.extract_value(z.shape, 1)
        within = builder.add(offset, builder.mul(builder.sub(unit, first), v.number(PANEL)))
        with cgutils.for_range(builder, builder.sdiv(lanes, v.number(v.width))) as group:
            lane = builder.mul(group.index, v.number(v.width))
            places = [builder.add(builder.mul(builder.add(unit, v.number(i)), lanes), lane) for i in range(PANEL)]
            local = [v.load(v.address(g.data, place)) for place in places]
            steps: list[Any] = []
            moved = ir.Constant(ir.VectorType(ir.IntType(1), v.width), [0] * v.width)
            for i, place in enumerate(places):
                before = v.load(v.address(z.data, place))
                scale = v.spread(inverse.data, builder.add(unit, v.number(i)))
                after = builder.fsub(before, builder.fmul(local[i], scale, flags=FUSED), flags=FUSED)
                after = v.smaller(v.larger(after, v.load(v.address(lo.data, place))), v.load(v.address(hi.data, place)))
                step = builder.fsub(after, before)
                v.store(after, v.address(z.data, place))
                steps.append(step)
                moved = builder.or_(moved, builder.fcmp_unordered("!=", step, v.zero))
                for k in range(i + 1, PANEL):
                    entry = v.spread(panel.data, builder.add(within, v.number(k * PANEL + i)))
                    local[k] = v.multiply_add(entry, step, local[k])
            with builder.if_then(v.any(moved)):
                _update_rows(v, g, panel, steps, lanes, lane, offset, first, rows)
        return context.get_dummy_value()

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def squared_residuals(typing_context: Any, zs: Any, gs: Any, los: Any, his: Any, out: Any) -> Any:
    """Write the squared KKT residual of every lane to ``out``, a float64 array of shape (lanes,)."""
    signature = types.void(zs, gs, los, his, out)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = Vectors(context, builder, signature.args[0].dtype)
        z, g, lo, hi, result = _arrays(context, builder, signature, arguments, 5)
        rows, lanes = builder.extract_value(z.shape, 0), builder.extract_value(z.shape, 1)
        double = ir.VectorType(ir.DoubleType(), v.width)
        with cgutils.for_range(builder, builder.sdiv(lanes, v.number(v.width))) as group:
            lane = builder.mul(group.index, v.number(v.width))
            total = cgutils.alloca_once_value(builder, ir.Constant(double, [0.0] * v.width))
            builder.store(ir.Constant(double, [0.0] * v.width), total)
            with cgutils.for_range(builder, rows) as row:
                place = builder.add(builder.mul(row.index, lanes), lane)
                at, slope, low, high = (v.load(v.address(array.data, place)) for array in (z, g, lo, hi))
                stuck_low = builder.and_(builder.fcmp_ordered("<=", at, low), builder.fcmp_ordered(">", slope, v.zero))
                stuck_high = builder.and_(builder.fcmp_ordered(">=", at, high), builder.fcmp_ordered("<", slope, v.zero))
                r = builder.select(builder.or_(stuck_low, stuck_high), v.zero, slope)
                wide = r if v.item == 8 else builder.fpext(r, double)
                square = builder.fmul(wide, wide, flags=FUSED)
                builder.store(builder.fadd(builder.load(total), square, flags=FUSED), total)
            address = builder.bitcast(builder.gep(result.data, [lane]), double.as_pointer())
            builder.store(builder.load(total), address, align=8)
        return context.get_dummy_value()

    return signature, generate
