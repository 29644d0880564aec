"""Kernels inside other kernels, compiled once: into the code of their caller.

Numba optimises each function, turns it into machine code for calls from Python, and does both again wherever another function
calls it. With calls seven deep, that is most of the time of a first fit. Here, a kernel that is called by another one is only
linked into it. The outermost kernel is optimised and turned into machine code, and is cached on disk, as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba import njit, types
from numba.core import typed_passes, untyped_passes
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.runtime.context import NRTContext
from numba.core.typed_passes import NativeLowering

SUPPORTED = numba.version_info.short == (0, 68)
"""Whether Numba's internals are as this module expects: those of the version that it is tested with. With others, kernels are
compiled as Numba does it, which takes longer."""

UNUSED = {
    *(untyped_passes.WithLifting, untyped_passes.InlineClosureLikes, untyped_passes.MakeFunctionToJitFunction),
    *(untyped_passes.InlineInlinables, untyped_passes.LiteralUnroll, untyped_passes.LiteralPropagationSubPipelinePass),
    *(typed_passes.InlineOverloads, typed_passes.NopythonRewrites, typed_passes.DumpParforDiagnostics),
}
"""Passes that search for what kernels do not have, such as closures and expressions of whole arrays."""


class _Flags(Flags):  # type: ignore[misc]
    """Flags that are quick to compare, which Numba does for every call of every function."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Flags) and self._values == other._values

    def __hash__(self) -> int:
        return len(self._values)


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """Code to be linked into other code, which is where it is optimised and becomes machine code."""

    def _optimize_functions(self, module: Any) -> None:
        # Numba would make the passes anew for each function and each declaration
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


class _Lower(Lower):  # type: ignore[misc]
    context: Any

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
            state.library = JITCodeLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
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
        try:
            return super().compile_extra(function)
        finally:
            codegen._library_class = usual

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
