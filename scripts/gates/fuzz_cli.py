"""The command line as a target of the fuzzer: any arguments, with valid and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import numpy as np
from typer.testing import CliRunner

import fuzz_inputs as inputs
from fuzz_inputs import Chance
from fuzz_targets import Target, Undocumented, models, npy_of, table
from lrrn.cli import app
from lrrn.cli.parameters import PARAMETERS

STRANGE = (
    "", " ", "-1", "0", "nan", "inf", "1e999", "x", "é", "\ud800", "²", "1,2", ",", "9" * 30, "--", "-", "/", "..", "a b", "%s",
    "{0}", "\n", "[red]", "[/]",
)  # fmt: skip
COMMON = "--seed --device --json --page"
STUDY = "--quick --output --work --jobs --data --no-download --report-only --seed --device --json"
TABLE = [parameter for group in PARAMETERS.values() for parameter in group]
OPTIONS = {
    "train": "--model --output --overwrite --target --drop --delimiter --test-share --data --checkpoint --resume --log --eps "
    f"--image {' '.join(parameter.option for parameter in TABLE)} {COMMON}",
    "predict": "--output --radius --eps --method --target --drop --delimiter --data --split --limit --seed --device --json",
    "evaluate": "--target --drop --delimiter --data --split --eps --image --samples " + COMMON,
    "certify": "--target --drop --delimiter --data --split --eps --limit --method --samples --part --export-proof " + COMMON,
    "attack": "--target --drop --delimiter --data --split --eps --limit --method --steps --restarts --clip " + COMMON,
    "export": "--lower --upper --error --dtype --overwrite --seed --device --json",
    "demo": COMMON,
    "bench": "--suite --quick --repeats --samples --rows --model --data --update " + COMMON,
    "reproduce": STUDY,
    "record": "--rows --seeds --stages --images --autoattack --budget --validation " + STUDY,
    "explore": "--samples --target --data --image --host --port --no-open --seed --device --json",
    "info": "--seed --device",
    "models": "--seed --device --json",
    "verify": "--images --ignore-digests --data --seed --device --json",
}
"""Options of every command, except those of ``info`` that search all data on the machine."""
FLAGS = (
    "--overwrite --resume --quick --update --no-download --report-only --validation --no-open --radius --ignore-digests".split()
)
FLAGS += [parameter.option for parameter in TABLE if parameter.type is bool]
PLACES = "--json --page --log --checkpoint --samples --export-proof --output --work --data".split()
LABOUR = "--epochs --pretrain-epochs --steps --restarts --limit --batch-size --max-sweeps".split()
"""Options for which a large number makes a command run long."""
VALUES = {
    "--model": "classifier regressor energy",
    "--objective": "contrastive margin squared_error class_energy semi_supervised cross_entropy",
    "--hidden-sizes": "4 3,3 4, 0 -3 1000000000 1e3 4;4",
    "--beta": "1 1,0 0.5,0.5,0 -1 nan",
    "--gamma": "0.125 0 1 -1 nan 1e300",
    "--constraint": "free nonneg box 0,1 1,0 0,inf nan,1 1,2,3",
    "--init": "glorot orthogonal uniform",
    "--dtype": "float32 float64 float16",
    "--schedule": "none cosine one_cycle",
    "--margin": "0.3 0.1,0.5 1,2,3 nan -1",
    "--temperature": "0.1 0.5,0.1 0 nan",
    "--adversarial-eps": "0.1 0,0.1 -1 nan",
    "--class-weight": "balanced a=1,b=2 a=0,b=0 a=-1,b=nan c=1 =1",
    "--on-failure": "warn raise",
    "--lower": "0 -1 0,1 2",
    "--upper": "1 1,2,3 inf",
    "--error": "0.1 1e-3 1e-9 0 -1 nan",
    "--epochs": "1 2",
    "--batch-size": "1 4 100",
    "--learning-rate": "0.1 1e-3 0 1e300",
    "--optimizer": "sgd adam adamw",
    "--weight-decay": "0 1e-3",
    "--pretrain-epochs": "0 1",
    "--max-sweeps": "1 100",
    "--test-share": "0.25 0.01 0.9 1",
    "--target": "none label 0 2 -1",
    "--drop": "f0 label 1 no",
    "--delimiter": ", ; | tab xy",
    "--eps": "0.1 0.1,0.2 -1 nan 1e308",
    "--image": "1x3 3x1 2x2 0x3 x 3x ²x² 3x1x1 1x1x3 2x1x1 3x1x1x1",
    "--part": "1/2 2/2 0/1 3/2 1 1/0 1/1000000000 ²/²",
    "--device": "cpu auto cuda tpu",
    "--split": "train test",
    "--limit": "1 5 100",
    "--steps": "1 2",
    "--restarts": "1 2",
    "--method": "auto paper pairwise spectral multiplier local energy",
    "--clip": "0,1 1,0 0",
    "--seed": "0 1 -5 4294967296 18446744073709551616",
    "--suite": "solve all",
    "--port": "0 80 70000",
    "--host": "127.0.0.1 nowhere",
    "--rows": "wide logistic:2",
    "--stages": "train all",
}


@final
class Arguments(Target):
    """Checks for exit status 0, 1 or 2, a message unless it is 0, and never a traceback."""

    name, share = "cli", 6

    def __init__(self, folder: Path, canary: Path) -> None:
        super().__init__(folder, canary)
        X, y = table()
        self.sound = models(folder)
        np.savez(folder / "t.npz", X=X, y=np.array(["a", "b"])[y])
        np.savez(folder / "n.npz", X=X, y=X[:, 0])
        np.save(folder / "t.npy", X)
        lines = [",".join(map(str, row)) + f",{'ab'[label]}" for row, label in zip(X, y, strict=True)]
        (folder / "t.csv").write_text("\n".join(["f0,f1,f2,label", *lines]))
        self.data = [folder / name for name in ("t.npz", "n.npz", "t.npy", "t.csv")]
        self.runner = CliRunner()
        keep_from_running()

    def __call__(self, chance: Chance) -> str:
        arguments = self.arguments(chance)
        self.last = arguments
        done = self.runner.invoke(app, arguments)
        for name in ("out.safetensors", "lrrn-model.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
        error = done.exception
        if error is not None and not isinstance(error, SystemExit):
            raise Undocumented(f"{type(error).__name__}: {error}") from error
        if done.exit_code not in (0, 1, 2) or "Traceback" in done.output:
            raise Undocumented(f"exit status {done.exit_code}: {done.output[-500:]}")
        if done.exit_code and len(done.output.strip()) < 10:
            raise Undocumented(f"exit status {done.exit_code} without a message: {done.output!r}")
        return "refused" if done.exit_code else "accepted"

    def arguments(self, chance: Chance) -> list[str]:
        """Draw a command line, mostly a plausible one."""
        command = chance.choice([*OPTIONS, "train", "predict", "evaluate", "certify", "attack"])
        given = [] if chance.random() < 0.97 else [chance.choice(["-v", "--verbose", "--version", "--help", *STRANGE])]
        given.append(command if chance.random() < 0.98 else chance.choice(STRANGE))
        if command in ("predict", "evaluate", "certify", "attack", "export", "explore") and chance.random() < 0.97:
            given.append(self.model(chance))
        if command in ("train", "predict", "evaluate", "certify", "attack") and chance.random() < 0.97:
            given.append(self.table(chance))
        if command == "reproduce":
            given.append(chance.choice(["table1", "all", "record", "tables"]))
        if command == "verify":
            given.append(chance.choice(["mnist-paper-a", "tables", ""]))
        if command == "record":
            given.append(chance.choice(["mnist", "kmnist_7011", "tables"]))
        known = OPTIONS[command].split()
        for name in chance.sample(known, min(len(known), chance.choice([0, 1, 1, 2, 3, 5]))):
            given += [name] if name in FLAGS else [name, self.value(name, chance)]
        if command == "export" and chance.random() < 0.97:
            given += [str(self.folder / "x.onnx"), "--lower", "0", "--upper", chance.choice(["1", "1,2", "-1", "1e30"])]
        bounds = {"train": {"--epochs": "1", "--output": str(self.folder / "out.safetensors")}, "attack": {"--steps": "1"}}
        for name, value in bounds.get(command, {}).items():
            given += [] if name in given else [name, value]
        if chance.random() < 0.03:
            given.insert(chance.randrange(len(given) + 1), chance.choice(STRANGE))
        return given

    def value(self, name: str, chance: Chance) -> str:
        if name in PLACES and chance.random() < 0.9:
            names = ("out.safetensors", "x.npz", "x.parquet", "x.txt", "no/such/x.npz", "", "x" * 300, "t.npz/x", "nul\0")
            return str(self.folder / chance.choice(names))
        if name in VALUES and (name in LABOUR or chance.random() < 0.7):
            return chance.choice(VALUES[name].split())
        return chance.choice(STRANGE)

    def model(self, chance: Chance) -> str:
        if chance.random() < 0.7:
            return str(chance.choice(self.sound))
        if chance.random() < 0.3:
            return chance.choice([*STRANGE, str(self.folder), str(self.data[0]), "/dev/null"])
        valid = chance.choice(self.sound).read_bytes()
        path = self.folder / "fuzzed.safetensors"
        path.write_bytes(inputs.safetensors(chance, self.canary, valid, valid))
        return str(path)

    def table(self, chance: Chance) -> str:
        if chance.random() < 0.7:
            return str(chance.choice(self.data))
        if chance.random() < 0.4:
            there = (str(self.folder), f"{self.folder}/no.npz", f"{self.folder}/no\0.csv", ".npz", "x.parquet")
            return chance.choice([*STRANGE, *there])
        X, y = (npy_of(array) for array in table())
        suffix = chance.choice([".csv", ".npy", ".npz"])
        make = {".csv": lambda: inputs.csv(chance), ".npy": lambda: inputs.npy(chance, self.canary, X)}
        path = self.folder / f"fuzzed{suffix}"
        path.write_bytes(make[suffix]() if suffix in make else inputs.npz(chance, self.canary, X, y))
        return str(path)


def keep_from_running() -> None:
    """Make commands that take minutes stop before their work begins."""
    import lrrn.cli.demo
    import lrrn.explore.launch
    import lrrn.studies.bench.suites
    import lrrn.studies.paper
    import lrrn.studies.record.record

    def ends(*_: Any, **__: Any) -> Any:
        raise ValueError("kept from running")

    parts: list[tuple[Any, str]] = [(lrrn.cli.demo, "run"), (lrrn.studies.bench.suites, "run"), (lrrn.explore.launch, "run")]
    for module, name in [*parts, (lrrn.studies.paper, "reproduce"), (lrrn.studies.record.record, "record")]:
        setattr(module, name, ends)
