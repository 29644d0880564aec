"""Captured steps that do not converge give way to single steps, for the rest of a run, however often it is resumed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

import lrrn
from lrrn.learning import CrossEntropy, Data, Settings, Trainer, cuda_graph
from lrrn.learning.cuda_graph import CapturedSteps
from lrrn.learning.step import Step


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """Captured steps on the CPU, with direct calls in place of streams and graphs, and too few sweeps; their numbers."""
    numbers: list[int] = []
    run = CapturedSteps.run

    class Graph:
        def __init__(self, steps, n):
            self.steps, self.n = steps, n

        def replay(self):
            for _ in range(self.n):
                self.steps._step()

    def counted(self, n):
        numbers.append(n)
        return run(self, n)

    own = SimpleNamespace(stream=None, turn=contextlib.nullcontext())
    monkeypatch.setattr(cuda_graph, "OwnStream", lambda device: own)
    monkeypatch.setattr(cuda_graph, "LADDER", (2, 4))
    monkeypatch.setattr(CapturedSteps, "_side_stream", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(CapturedSteps, "graph", Graph)
    monkeypatch.setattr(CapturedSteps, "run", counted)
    monkeypatch.setattr(Step, "capturable", lambda self, data: True)
    return numbers


def test_a_resumed_run_stays_with_single_steps(taken, tmp_path):
    def fitted(last=None, **options):
        generator = torch.Generator().manual_seed(0)
        net = lrrn.LRRN((6, 30, 20, 3), generator=generator, solver="accelerated")
        with torch.no_grad():
            for w in net.W:
                w.mul_(3)
        x, label = torch.rand(60, 6, generator=generator), torch.randint(0, 3, (60,), generator=generator)
        settings = Settings(epochs=3, batch_size=10, learning_rate=0.01, max_unconverged=0.5)
        trainer = Trainer(net, CrossEntropy(), settings, callbacks=[lambda _, record: record["epoch"] == last], **options)
        trainer.fit(Data(x, torch.nn.functional.one_hot(label, 3).float(), label), resume=last is None)
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    whole = fitted()
    assert 0 < len(taken) < 18
    path = tmp_path / "checkpoint"
    fitted(last=2, checkpoint=path)
    before = len(taken)
    assert torch.equal(fitted(checkpoint=path), whole) and len(taken) == before


@pytest.mark.parametrize("name", ["x", "target", "weight"])
def test_data_of_another_type_than_the_network_are_refused(name):
    net = lrrn.LRRN((4, 5, 2), generator=torch.Generator().manual_seed(0))
    parts = {"x": torch.rand(6, 4), "target": torch.rand(6, 2), "weight": torch.rand(6)}
    parts[name] = parts[name].double()
    data = Data(parts["x"], parts["target"], torch.zeros(6, dtype=torch.int64), parts["weight"])
    with pytest.raises(ValueError, match=rf"{name} is torch.float64 and the network torch.float32: .*\.to\(torch.float32\)"):
        Trainer(net, CrossEntropy(), Settings(epochs=1)).fit(data)
