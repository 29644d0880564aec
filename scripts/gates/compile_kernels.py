"""Compile the GPU kernels without a GPU, and print the resources of each; exit with status 1 if one does not compile.

Triton needs a device only to run compiled kernels. The networks here go through the real launches, with tensors on the CPU.
Each kernel is compiled for the given compute capability, with the assembler that comes with Triton. Shared memory, registers
and register spills are printed: a kernel that spills runs, but slowly.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import lrrn
from lrrn.energy import adjoint
from lrrn.learning import Contrastive, FreeEnergy, Margin, Settings, SquaredError, clock, cuda_graph, flat_adam
from lrrn.learning.cuda_graph import DeviceCounts
from lrrn.learning.flat import FlatParameters
from lrrn.learning.objectives import Batch
from lrrn.learning.step import Step
from lrrn.learning.steps import triton
from lrrn.learning.steps.direct_prediction import DirectPrediction
from lrrn.linalg import split_products
from lrrn.network.policy import SolvePolicy
from lrrn.solvers import accelerated, half_operators, half_precision, loop
from lrrn.solvers.accelerated import Accelerated

NETWORKS = [((784, 64, 64, 10), 10), ((784, 64, 64, 10), 256), ((784, 32, 32, 10), 10), ((784, 32, 32, 32, 10), 256)]
"""Layer sizes and batch sizes of the training steps to compile."""
OBJECTIVES = {
    "contrastive": Contrastive(),
    "free energy": FreeEnergy(),
    "margin": Margin(),
    "adversarial margin": Margin(adversarial_eps=1.0),
    "squared error": SquaredError(),
}
"""Objectives of the training steps to compile."""
SOLVES = [
    *((units, batch, torch.float32) for units in (10, 128) for batch in (16, 60_000)),
    *((units, 256, dtype) for units in (128, 200, 600, 2048, 8192) for dtype in (torch.float32, torch.float64)),
]
"""Numbers of units, batch sizes and dtypes of the solves to compile."""
WIDE = [(784, 600, 10), (784, 2048, 10)]
"""Layer sizes of the steps of wide networks to compile, with adversarial inputs."""
CONVOLUTIONS = [(torch.float32,), (torch.float64,)]
"""Dtypes of the solves with convolutions to compile."""


class NoDevice:
    """Minimal Triton driver for compilation without a device."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        """Return the target architecture."""
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """Return a dummy device index."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Return a dummy stream handle."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the device of the tensors."""
        return torch.device("cpu")

    def is_active(self) -> bool:
        """Whether this is the driver to use."""
        return True


class Compiled:
    """Replacement for kernel launches: compiles and assembles each kernel and prints its resources, but does not run it."""

    def __init__(self, capability: int) -> None:
        self._ptxas = [get_ptxas(capability).path, "-v", f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}"]
        self._seen: set[int] = set()
        self.failed: list[str] = []

    @property
    def count(self) -> int:
        """Number of kernels, including those that failed."""
        return len(self._seen) + len(self.failed)

    def launch(self, function: JITFunction, grid: Any) -> Any:
        """Return a replacement for a launch."""

        def go(*args: Any, **options: Any) -> None:
            name = function.fn.__name__
            try:
                kernel = function.warmup(*args, grid=grid, **options)
            except Exception as error:
                self.failed.append(name)
                print(f"{name:14} FAILED: {str(error)[:500]}", flush=True)
                return
            if id(kernel) not in self._seen:
                self._seen.add(id(kernel))
                self._describe(name, kernel)

        return go

    def _describe(self, name: str, kernel: Any) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(kernel.asm["ptx"])
            file.flush()
            told = subprocess.run(
                [*self._ptxas, file.name, "-o", "/dev/null"], capture_output=True, text=True, check=True
            ).stderr
        registers, spilled = (re.search(f"(\\d+) {what}", told) for what in ("registers", "bytes spill stores"))
        facts = [f"{kernel.metadata.num_warps:3} warps", f"{kernel.metadata.shared / 1024:6.1f} KiB shared"]
        facts += [f"{registers[1] if registers else '?':>3} registers", f"{spilled[1] if spilled else '?':>5} bytes spilled"]
        print(f"{name:14} {', '.join(facts)}", flush=True)


def step(sizes: tuple[int, ...], batch: int, objective: Any) -> None:
    """Trigger the launches of a captured training step."""
    net = lrrn.LRRN(sizes, generator=torch.Generator().manual_seed(0))
    flat = FlatParameters(net)
    with torch.no_grad(), flat.attached():
        policy = SolvePolicy(fixed_sweeps=32, observer=DeviceCounts(4e-6, torch.device("cpu")))
        samples = Batch(torch.rand(batch, sizes[0]), torch.rand(batch, sizes[-1]), policy=policy)
        triton.TritonKernels(net, objective, flat, 4e-6).gradients(samples, None, batch, None)
        settings = Settings(optimizer="adamw", decoupled_weight_decay=0.1)
        flat_adam.FlatAdam(Step(net, objective, settings, flat).optimizer, flat)()
        clock.StepClock(2, batch, torch.device("cpu")).tick()


def wide_step(*sizes: int) -> None:
    """Trigger the launches of a captured step of a wide network."""
    net, n = lrrn.LRRN(sizes, generator=torch.Generator().manual_seed(0)), 256
    flat, label = FlatParameters(net), torch.arange(n) % sizes[-1]
    with flat.attached():
        policy = SolvePolicy(fixed_sweeps=4, observer=DeviceCounts(1e-4, torch.device("cpu")))
        samples = Batch(torch.rand(n, sizes[0]), torch.eye(sizes[-1])[label], label, policy=policy)
        DirectPrediction(net, OBJECTIVES["adversarial margin"], flat, 1e-4).gradients(samples, None, n, None)


def solver(units: int, batch: int, dtype: torch.dtype) -> None:
    """Trigger the launches of the accelerated solver: free phase and adjoint."""
    net = lrrn.LRRN((16, units, 10), generator=torch.Generator().manual_seed(0), dtype=dtype)
    energy = net.energy_snapshot(dtype)
    qp = energy.free(torch.rand(batch, 16, dtype=dtype))
    z = torch.zeros_like(qp.q)
    for problem in (qp, energy.adjoint(z, torch.ones_like(z))):
        stepper = Accelerated().begin(problem)
        for _ in range(2):  # the second call continues from the first
            stepper.advance(problem, z, -problem.q, 1, torch.zeros(batch, dtype=torch.float64))
            stepper.check(problem, z)


def convolutional_solver(dtype: torch.dtype) -> None:
    """Trigger the launches of solves with convolutions: a layer of images and a dense one, free phase and adjoint."""
    sizes = ((3, 32, 32), lrrn.Conv(64, 8, 4), 600, 10)
    net = lrrn.LRRN(sizes, generator=torch.Generator().manual_seed(0), dtype=dtype)
    energy = net.energy_snapshot(dtype)
    qp = energy.free(torch.rand(4, 3072, dtype=dtype))
    z = torch.zeros_like(qp.q)
    for problem in (qp, energy.adjoint(z, torch.ones_like(z))):
        stepper = Accelerated().begin(problem)
        stepper.check(problem, z)
        stepper.advance(problem, z, -problem.q, 3, torch.zeros(4, dtype=torch.float64))


def compile_case(case: tuple[Any, ...], capability: int) -> tuple[str, int, int]:
    """Compile the kernels of a training step or of a solve; return their resources, their number, and how many failed."""
    compiled = Compiled(capability)
    driver.set_active(NoDevice(capability))
    JITFunction.__getitem__ = lambda function, grid: compiled.launch(function, grid)
    for module in (half_precision, half_operators, split_products, adjoint, loop, cuda_graph, triton, flat_adam, clock):
        module.has_kernels = lambda t: True
    accelerated.fits_on_chip, accelerated.fits_in_rows = half_precision.fits_on_chip, half_precision.fits_in_rows
    accelerated.fits_operators = half_operators.fits_operators
    # products between kernels would only take time: some processors have no float16 arithmetic
    half_precision.largest_by_squaring = lambda a, *more, **named: torch.ones((), dtype=torch.float64)
    half_precision.product = split_products.product = lambda a, b: torch.empty((len(a), b.shape[1]))
    torch.mm = lambda a, b, out=None: torch.zeros((len(a), b.shape[1])) if out is None else out
    with redirect_stdout(StringIO()) as text:
        if case in SOLVES:
            units, batch, dtype = case
            print(f"== {units} units, batch {batch}, {str(dtype).removeprefix('torch.')}")
            solver(units, batch, dtype)
        elif case in WIDE:
            print(f"== {'-'.join(map(str, case))}, batch 256, adversarial margin")
            wide_step(*case)
        elif case in CONVOLUTIONS:
            print(f"== convolutions, {str(case[0]).removeprefix('torch.')}")
            convolutional_solver(*case)
        else:
            sizes, batch, objective = case
            print(f"== {'-'.join(map(str, sizes))}, batch {batch}, {objective}")
            step(sizes, batch, OBJECTIVES[objective])
    return text.getvalue(), compiled.count, len(compiled.failed)


def main() -> int:
    """Compile all kernels, print their resources, and return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="compute capability to compile for, such as 90 for Hopper")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many networks and solves at once")
    options = parser.parse_args()
    cases = [(*network, objective) for network in NETWORKS for objective in OBJECTIVES]
    cases += [*SOLVES, *WIDE, *CONVOLUTIONS]
    count = failed = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for text, kernels, failures in pool.map(compile_case, cases, [options.capability] * len(cases)):
            print(text, end="", flush=True)
            count, failed = count + kernels, failed + failures
    print(f"{count} kernels, {failed} failed")
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
