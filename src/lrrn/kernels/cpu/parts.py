"""Kernels inside other kernels, compiled once: into the code of their caller.

Numba optimises each function, turns it into machine code for calls from Python, and does both again wherever another function
calls it. With calls seven deep, that is most of the time of a first fit. Here, a kernel that is called by another one is only
linked into it. The outermost kernel is optimised and turned into machine code, and is cached on disk, as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import njit, types
from numba.core import config, typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.runtime.context import NRTContext
from numba.core.targetconfig import ConfigStack
from numba.core.typed_passes import NativeLowering
from numba.np.arrayobj import fix_integer_index, load_item, store_item

SUPPORTED = numba.version_info.short == (0, 68)
"""Whether Numba's internals are as this module expects: those of the version that it is tested with. With others, kernels are
compiled as Numba does it, which takes longer."""

UNUSED = {
    *(untyped_passes.WithLifting, untyped_passes.InlineClosureLikes, untyped_passes.MakeFunctionToJitFunction),
    *(untyped_passes.InlineInlinables, untyped_passes.LiteralUnroll, untyped_passes.LiteralPropagationSubPipelinePass),
    *(typed_passes.InlineOverloads, typed_passes.NopythonRewrites, typed_passes.DumpParforDiagnostics),
}
"""Passes for features that kernels do not use, such as closures and expressions of whole arrays."""


NUMBERS = (types.Number, types.Boolean)


class _Flags(Flags):  # type: ignore[misc]
    """Flags that are quick to compare, which Numba does for every call of every function."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Flags) and self._values == other._values

    def __hash__(self) -> int:
        return len(self._values)


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """Code to be linked into other code, which is where it is optimised and becomes machine code."""

    def _optimize_functions(self, module: Any) -> None:
        # Numba would create the passes again for each function and each declaration
        module.data_layout = self._codegen._data_layout
        passes, builder = self._codegen._function_pass_manager()
        for function in module.functions:
            if not function.is_declaration:
                passes.run(function, builder)

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Do nothing: the environment serves calls from Python."""


INLINED = 30
"""Largest cost, as LLVM estimates it, of a kernel that is copied to where it is called; LLVM's own limit is 225."""


class _Outermost(JITCodeLibrary):  # type: ignore[misc]
    """Code for calls from Python, optimised once all parts are in it."""

    def _optimize_final_module(self) -> None:
        """Optimise without unrolling loops: the inner ones are written with vectors, and others gain nothing."""
        codegen = self._codegen
        passes, builder = codegen._module_pass_manager(loop_vectorize=False, slp_vectorize=False, opt=0, cost="cheap")
        passes.run(self._final_module, builder)
        options = llvm.create_pipeline_tuning_options(speed_level=int(config.OPT))
        options.loop_vectorization, options.slp_vectorization = bool(config.LOOP_VECTORIZE), False
        options.loop_unrolling, options.inlining_threshold = False, INLINED
        builder = llvm.create_pass_builder(codegen._tm, options)
        passes = builder.getModulePassManager()
        if config.LLVM_REFPRUNE_PASS:
            passes.add_refprune_pass()
        passes.run(self._final_module, builder)


class _References(NRTContext):  # type: ignore[misc]
    """References to arrays. Numba would take all fields of an array, and all arrays of a tuple, apart for each of them.

    Named tuples are not counted: they are arguments, and their arrays belong to the caller.
    """

    def get_meminfos(self, builder: Any, kind: Any, value: Any) -> Any:
        if isinstance(kind, types.BaseNamedTuple):
            return []
        if isinstance(kind, types.Array):
            return [(kind, builder.extract_value(value, 0))]
        return super().get_meminfos(builder, kind, value)


_sizes: dict[str, int] = {}


def _size_of(context: Any) -> Callable[[Any], int]:
    """Return a function for the size of a type, which remembers it. Numba parses a module for every variable."""
    measure = type(context).get_abi_sizeof

    def size(kind: Any) -> int:
        name = str(kind)
        if name not in _sizes:
            _sizes[name] = measure(context, kind)
        return _sizes[name]

    return size


_resolved: dict[Any, Any] = {}
_resolve = types.Function.get_call_type


def _resolve_once(function: Any, context: Any, args: Any, kws: Any) -> Any:
    """Return the types of an operation, and remember those on numbers. Numba tries a dozen for each ``+``, twice."""
    if kws or not all(isinstance(one, NUMBERS) for one in args):
        return _resolve(function, context, args, kws)
    key = id(function), args, ConfigStack.top_or_none()  # hashing a function takes as long as resolving it
    if key not in _resolved:
        _resolved[key] = _resolve(function, context, args, kws), function  # alive, so that nothing else gets its id
    return _resolved[key][0]


class _Lower(Lower):  # type: ignore[misc]
    """Numba's last step in Python, with short code for entries of arrays: Numba takes a whole array apart for each of them."""

    context: Any

    def lower_getitem(self, resty: Any, expr: Any, value: Any, index: Any, signature: Any) -> Any:
        """Read an entry of an array, or what else has items."""
        place = self._entry(value.name, index.name)
        if place is None:
            return super().lower_getitem(resty, expr, value, index, signature)
        kind = self.typeof(value.name)
        return self.context.cast(self.builder, load_item(self.context, self.builder, kind, place), kind.dtype, resty)

    def lower_setitem(self, target_var: Any, index_var: Any, value_var: Any, signature: Any) -> Any:
        """Write an entry of an array, or what else has items."""
        place = self._entry(target_var.name, index_var.name)
        if place is None:
            return super().lower_setitem(target_var, index_var, value_var, signature)
        kind = self.typeof(target_var.name)
        value = self.context.cast(self.builder, self.loadvar(value_var.name), self.typeof(value_var.name), kind.dtype)
        return store_item(self.context, self.builder, kind, value, place)

    def _entry(self, name: str, index_name: str) -> Any:
        """Return the address of an entry, or None if it is not one of a contiguous array, by a number for each dimension."""
        array, place = self.typeof(name), self.typeof(index_name)
        several = isinstance(place, types.BaseTuple)
        kinds = [types.unliteral(one) for one in (place if several else (place,))]
        if not (isinstance(array, types.Array) and array.layout == "C" and array.ndim == len(kinds)):
            return None
        if not all(isinstance(one, types.Integer) for one in kinds):
            return None
        builder, value, index = self.builder, self.loadvar(name), self.loadvar(index_name)
        fields = self.context.data_model_manager[array]
        shape = fields.get(builder, value, "shape")
        at = None
        for k, kind in enumerate(kinds):
            length, one = builder.extract_value(shape, k), builder.extract_value(index, k) if several else index
            one = fix_integer_index(self.context, builder, kind, one, length)
            at = one if at is None else builder.add(builder.mul(at, length), one)
        return builder.gep(fields.get(builder, value, "data"), [at])

    def create_cpython_wrapper(self, release_gil: bool = False) -> None:
        """Make the function that Python calls, which holds references to all its arguments."""
        self.context = self.context.usual
        super().create_cpython_wrapper(release_gil)


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):  # type: ignore[misc]
    """Numba's last pass, with fewer references to count."""

    _name = "lowering_of_a_kernel"

    @property
    def lowering_class(self) -> type[Lower]:
        return _Lower

    def run_pass(self, state: Any) -> bool:
        if not state.flags.no_cpython_wrapper:  # the outermost kernel
            state.library = _Outermost(state.targetctx.codegen(), state.func_id.func_qualname)
            state.library.enable_object_caching()
        blocks = state.func_ir.blocks.values()
        made = [state.calltypes[call].return_type for block in blocks for call in block.find_exprs("call")]
        made.append(state.return_type)  # the caller releases what it is given
        usual = state.targetctx
        context = usual.subtarget()
        context.usual = usual
        context.get_abi_sizeof = _size_of(usual)
        if not any(isinstance(one, types.BaseTuple) for one in made):
            # without arrays of its own, a kernel has none to release
            context.enable_nrt = any(isinstance(one, types.Array) for one in made)
            context.nrt = _References(context, context.enable_nrt)
        state.targetctx = context
        return bool(super().run_pass(state))


class _Compiler(CompilerBase):  # type: ignore[misc]
    """Numba's compiler, without the passes that kernels do not need."""

    def compile_extra(self, function: Callable[..., Any]) -> Any:
        """Compile a function. Those that it calls, Numba's own included, become parts."""
        codegen = self.state.targetctx.codegen()
        usual, codegen._library_class = codegen._library_class, _Library
        resolve, types.Function.get_call_type = types.Function.get_call_type, _resolve_once
        try:
            return super().compile_extra(function)
        finally:
            codegen._library_class = usual
            types.Function.get_call_type = resolve

    def define_pipelines(self) -> list[Any]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        kept = [(one, what) for one, what in manager.passes if one not in UNUSED]
        manager.passes = [(_Lowering if one is NativeLowering else one, what) for one, what in kept]
        manager.finalize()
        return [manager]


def compile_kernel(function: Callable[..., Any], **options: Any) -> Any:
    """Return a kernel that is compiled on its first call."""
    if not SUPPORTED:
        return njit(**options)(function)
    compiled = njit(pipeline_class=_Compiler, **options)(function)
    compiled._compiler._customize_flags = _Flags
    return compiled


def link_into_callers(compiled: Any, function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Let calls by other kernels use a version of a compiled function that is compiled into the caller.

    That version takes numbers for literals: Numba would compile ``f(x, 0)`` and ``f(x, n)`` separately.
    """
    part = compile_kernel(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options) if SUPPORTED else compiled
    template = part.get_call_template
    compiled.get_call_template = lambda args, kws: template([types.unliteral(one) for one in args], kws)
    compiled.get_overload = part.get_overload
