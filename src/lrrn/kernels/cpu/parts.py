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
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

OLDEST, NEWEST = (0, 60), (0, 68)
"""Versions of Numba whose internals are as this module expects. With others, kernels are compiled as Numba does it."""


class _Library(JITCodeLibrary):  # type: ignore[misc]
    """Code to be linked into other code, which is where it is optimised and becomes machine code."""

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


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):  # type: ignore[misc]
    """Numba's last pass, into a library of ours."""

    _name = "lowering_of_a_part"

    def run_pass(self, state: Any) -> bool:
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
        return bool(super().run_pass(state))


class _Compiler(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        manager = DefaultPassBuilder.define_nopython_pipeline(self.state)
        manager.passes = [(_Lowering if one is NativeLowering else one, what) for one, what in manager.passes]
        manager.finalize()
        return [manager]


def link_into_callers(compiled: Any, function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Let calls by other kernels use a version of a compiled function that is compiled into the caller.

    That version takes numbers for literals: Numba would compile ``f(x, 0)`` and ``f(x, n)`` separately.
    """
    part = compiled
    if OLDEST <= numba.version_info.short <= NEWEST:
        part = njit(pipeline_class=_Compiler, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
    template = part.get_call_template
    compiled.get_call_template = lambda args, kws: template([types.unliteral(one) for one in args], kws)
    compiled.get_overload = part.get_overload
