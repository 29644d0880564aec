"""The parameters of the estimators as options of ``lrrn train``: one table, from which the options are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, final

import typer

from lrrn.cli.inputs import numbers, one_of
from lrrn.cli.options import Kind

Command = TypeVar("Command", bound=Callable[..., None])

NOT_OPTIONS = {
    "callbacks": "they are Python functions",
    "verbose": "progress is always shown on a terminal; lrrn --verbose logs more",
}
"""Parameters that ``lrrn train`` does not take, and why."""


@final
@dataclass(frozen=True)
class Parameter:
    """A parameter of the estimators, and the option that sets it.

    Attributes
    ----------
    name : str
        Of the parameter; the option has dashes for underscores.
    type : type
        What the option takes.
    help : str
    parse : callable, optional
        From the text given and the option's name to the parameter's value.
    aliases : tuple of str
        Further names of the option.
    least : int, optional
        The smallest number allowed.
    choices : tuple of str
        The texts allowed; any if empty.
    kinds : tuple of Kind
        The models that have the parameter.
    """

    name: str
    type: Any
    help: str
    parse: Callable[[str, str], Any] | None = None
    aliases: tuple[str, ...] = ()
    least: int | None = None
    choices: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = tuple(Kind)

    @property
    def option(self) -> str:
        """The option's name on the command line."""
        return "--" + self.name.replace("_", "-")

    def as_argument(self, panel: str) -> inspect.Parameter:
        """Return the argument that a command needs for Typer to make the option; None means not given."""
        name = f"{self.option}/--no-{self.option[2:]}" if self.type is bool else self.option
        told = f"{self.help} One of {', '.join(self.choices)}." if self.choices else self.help
        option = typer.Option(name, *self.aliases, help=told, min=self.least, rich_help_panel=panel)
        annotation = Annotated[self.type | None, option]  # type: ignore[name-defined]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _widths(text: str, option: str) -> tuple[int, ...]:
    return numbers(text, int, option)


def _image(text: str, option: str) -> tuple[int, ...]:
    found = numbers(text, int, option)
    if len(found) != 3 or min(found) < 1:
        raise typer.BadParameter(f"{option} should be CHANNELS,HEIGHT,WIDTH, such as 3,32,32; got {text!r}")
    return found


def convolutions(texts: list[str] | None) -> list[tuple[int, ...]]:
    """Return what --conv names: channels, kernel and, where given, stride, padding and pool."""
    found = [numbers(text, int, "--conv") for text in texts or ()]
    for text, each in zip(texts or (), found, strict=True):
        if not 2 <= len(each) <= 5:
            raise typer.BadParameter(
                f"--conv should be CHANNELS,KERNEL[,STRIDE[,PADDING[,POOL]]], such as 512,8,4; got {text!r}"
            )
    return found


def _one_or_more(text: str, option: str) -> float | tuple[float, ...]:
    found = numbers(text, float, option)
    return found[0] if len(found) == 1 else found


def _one_or_two(text: str, option: str) -> float | tuple[float, ...]:
    found = numbers(text, float, option)
    if len(found) > 2:
        raise typer.BadParameter(f"{option} should be a number, or two separated by a comma; got {text!r}")
    return found[0] if len(found) == 1 else found


def _name_or_interval(text: str, option: str) -> str | tuple[float, ...]:
    if "," not in text and text not in ("free", "nonneg", "box"):
        raise typer.BadParameter(f"{option} should be free, nonneg, box or LOW,HIGH; got {text!r}")
    return numbers(text, float, option) if "," in text else text


def _name_or_none(text: str, option: str) -> str | None:
    return None if text == "none" else text


def _scaling(text: str, option: str) -> str | bool:
    if text not in ("features", "common", "none"):
        raise typer.BadParameter(f"{option} should be features, common or none; got {text!r}")
    return text != "none" and text


def _class_weights(text: str, option: str) -> str | dict[Any, float]:
    """Return "balanced", or weights by label; labels that look like numbers are numbers, as in data files."""
    if text == "balanced":
        return text
    weights = {}
    for part in text.split(","):
        label, _, weight = part.rpartition("=")
        try:
            weights[_label(label)] = float(weight)
        except ValueError:
            raise typer.BadParameter(f"{option} should be balanced, or LABEL=WEIGHT,LABEL=WEIGHT; got {text!r}") from None
    return weights


def _label(text: str) -> Any:
    if not text:
        raise ValueError("a label is missing")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


of_classifier = partial(Parameter, kinds=(Kind.classifier,))
PARAMETERS = {
    "Model": (
        Parameter("hidden_sizes", str, "Widths of the hidden layers: 64,64.", _widths, aliases=("--hidden",)),
        Parameter("image_shape", str, "Channels, height and width, if samples are images: 3,32,32.", _image),
        Parameter("beta", str, "Weight of the reconstruction terms; or one per layer, separated by commas.", _one_or_more),
        Parameter("gamma", float, "Discount of later layers."),
        Parameter("constraint", str, "Set of the hidden activations: free, nonneg, box, or LOW,HIGH.", _name_or_interval),
        Parameter("init", str, "Initial weights.", choices=("glorot", "orthogonal", "uniform")),
        Parameter("dtype", str, "Type of the weights.", choices=("float32", "float64")),
        Parameter("max_weight_norm", float, "Cap on the spectral norm of hidden weights."),
        Parameter("max_condition", float, "Cap on the condition number of the Hessian, by scaling hidden weights."),
        Parameter(
            "max_output_norm",
            str,
            "Regressor: cap on the norm of the output weights; or one per target, separated by commas.",
            _one_or_more,
            kinds=(Kind.regressor,),
        ),
        Parameter(
            "standardize",
            str,
            "Centre the data and divide by a scale: features (one per feature), common (one for all), none. "
            "Default: features for tables; for images common, or none if all values are in [0, 1].",
            _scaling,
        ),
        Parameter("contamination", float, "Energy model: share of the training data to call outliers.", kinds=(Kind.energy,)),
    ),
    "Objective": (
        Parameter(
            "objective",
            str,
            "Classifier: any of these. Regressor: squared_error or contrastive.",
            choices=("contrastive", "margin", "cross_entropy", "squared_error", "class_energy", "semi_supervised"),
            kinds=(Kind.classifier, Kind.regressor),
        ),
        of_classifier("margin", str, "Objective margin: lead of the correct score; or START,END.", _one_or_two),
        of_classifier("temperature", str, "Objective margin: softness of the loss; or START,END.", _one_or_two),
        of_classifier(
            "adversarial_eps",
            str,
            "Objective margin: size of adversarial perturbations; or START,END.",
            _one_or_two,
        ),
        of_classifier("free_energy_weight", float, "Objective semi_supervised: weight of the free energy."),
        of_classifier("self_training", float, "Objective semi_supervised: weight of confident predictions as labels."),
        of_classifier("confidence", float, "Objective semi_supervised: lead that makes a prediction confident."),
        of_classifier(
            "class_weight",
            str,
            "Classifier: balanced, or LABEL=WEIGHT for all classes: 0=1,1=2.5.",
            _class_weights,
        ),
    ),
    "Training": (
        Parameter("epochs", int, "Passes over the data.", least=1),
        Parameter("batch_size", int, "Samples per step.", least=1),
        Parameter("learning_rate", float, "Step size."),
        Parameter("optimizer", str, "Optimiser.", choices=("sgd", "adam", "adamw")),
        Parameter("schedule", str, "Schedule of the learning rate.", _name_or_none, choices=("cosine", "one_cycle", "none")),
        Parameter("weight_decay", float, "The paper's lambda, on the output weights."),
        Parameter("decoupled_weight_decay", float, "AdamW's weight decay, on all weights."),
        of_classifier("pretrain_epochs", int, "Classifier: epochs without labels before those with.", least=0),
        of_classifier("pretrain_learning_rate", float, "Classifier: step size of those epochs."),
        Parameter("early_stopping", bool, "Hold out training data, stop when they no longer improve, and keep the best."),
        Parameter("validation_fraction", float, "Share of the training data that early stopping holds out."),
        Parameter("n_iter_no_change", int, "Epochs without improvement before early stopping.", least=1),
        Parameter("max_seconds", float, "End training after this many seconds."),
        Parameter("shifts", int, "Shift images, square or of --image-shape, at random by up to this many pixels.", least=0),
        Parameter("flips", bool, "Mirror images, square or of --image-shape, left to right at random."),
    ),
    "Solver": (
        Parameter("tol", float, "Tolerance of the solves during training."),
        Parameter("max_sweeps", int, "Largest number of sweeps of a solve.", least=1),
        Parameter("on_failure", str, "If a prediction does not converge.", choices=("warn", "raise", "ignore")),
        Parameter("reuse_activations", bool, "Start solves from the activations of the previous epoch."),
    ),
}
"""By heading of the help; ``lrrn train`` itself has ``random_state``, ``device``, ``checkpoint``, ``resume`` and ``log``."""


def with_parameters(command: Command) -> Command:
    """Give a command an option for every parameter of the table, in place of its ``**parameters``."""
    signature = inspect.signature(command, eval_str=True)
    own = [argument for argument in signature.parameters.values() if argument.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [parameter.as_argument(panel) for panel, group in PARAMETERS.items() for parameter in group]
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return command


def parsed(texts: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the values of the parameters that were given; refuse those that this kind of model does not have."""
    table = {parameter.name: parameter for group in PARAMETERS.values() for parameter in group}
    values = {}
    for name, text in texts.items():
        if text is None:
            continue
        parameter = table[name]
        if kind not in parameter.kinds:
            raise typer.BadParameter(f"{parameter.option} does not apply to --model {kind}")
        if parameter.choices:
            one_of(text, parameter.option, parameter.choices)
        values[name] = text if parameter.parse is None else parameter.parse(text, parameter.option)
    return values
