"""Quantizing the linear layers of a model in place."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from humming.checkpoints.patterns import holds_components
from humming.errors import UnsupportedError, check_type
from humming.formats import ActivationSpec, WeightSpec
from humming.nn import QuantLinear, check_activation
from humming.places import place_of
from humming.progress import watch
from humming.quantizer import check_method

DEFAULT_SKIP = ("lm_head",)
_UNSUPPORTED = ("refuse", "skip")


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What became of the linear layers of a model.

    Attributes:
        quantized: the names of the layers that are a `QuantLinear` now.
        skipped: those that stay as they are: name -> reason.
        notes: what else was asked for and led to nothing.
    """

    quantized: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{len(self.quantized)} linear layers quantized, {len(self.skipped)} left"
        left = (f"  {name}: {why}" for name, why in self.skipped.items())
        return "\n".join((head, *left, *(f"  {note}" for note in self.notes)))


def quantize_model(
    model: torch.nn.Module,
    weight: WeightSpec | str = "int4_g128",
    activation: ActivationSpec | str | None = None,
    *,
    only: Iterable[str] = (),
    skip: Iterable[str] = DEFAULT_SKIP,
    unsupported: str = "refuse",
    device: torch.device | str | None = None,
    method: str = "absmax",
) -> ModelReport:
    """Puts a `QuantLinear` in the place of each linear layer of a model, one after the other.

    That is where it holds a `torch.nn.Linear`. Left, and named in the report, are those whose
    weight another module uses too, as an output layer that is tied to the embedding; those with
    hooks; and instances of subclasses, which may multiply in another way. Nothing else is touched:
    embeddings, convolutions, and transformers' Conv1D, whose weight is [in, out].

    Args:
        model: an unquantized model, which is changed; no linear layer itself.
        weight: the format to quantize to.
        activation: as for `QuantLinear`.
        only: names of the layers to quantize, without any all. A name is a row of components, in
            which a star stands for any text: `mlp` and `layers.*.mlp` take `layers.3.mlp.up_proj`.
        skip: names of layers to leave; the report tells of those that name none.
        unsupported: what to do with a layer that the format cannot hold, such as negative weights
            in an unsigned one: `refuse` to raise, `skip` to leave it.
        device: where to quantize and to leave the results; None for each layer's own.
        method: how scales are chosen, see `humming.quantize`.

    Raises:
        UnsupportedError: the formats are none of a layer's, a name in `only` is no layer's, or a
            format cannot hold a layer, in which case those before it are quantized by then.
    """
    check_type("quantize_model", "the model", model, torch.nn.Module, "Pass a torch.nn.Module.")
    check_unsupported(unsupported)
    spec, wanted = check_formats(weight, activation, method)
    only, skip = check_names("only", only), check_names("skip", skip)
    if device is not None:
        device = place_of("quantize_model", device)
    found, skipped = linear_layers(model, only, skip)
    places, done = Places(model), []
    with watch(f"quantizing to {spec.name}") as progress:
        for count, (name, linear) in enumerate(found.items(), 1):
            try:
                layer = QuantLinear.from_linear(linear, spec, wanted, device, method=method)
            except UnsupportedError as error:
                if unsupported == "refuse":
                    told = f"the layer {name}: {error.asked}"
                    raise UnsupportedError(told, error.why, error.possible) from error
                skipped[name] = str(error)
                continue
            layer.name = name
            places.replace(linear, layer.train(linear.training))
            done.append(name)
            progress(count, len(found))
    return ModelReport(tuple(done), skipped, unused_entries(model, skip))


def linear_layers(
    model: torch.nn.Module, only: Iterable[str] = (), skip: Iterable[str] = DEFAULT_SKIP
) -> tuple[dict[str, torch.nn.Linear], dict[str, str]]:
    """The layers of a model that a `QuantLinear` can stand for by name, and why others are left.

    Raises:
        UnsupportedError: the model is a linear layer, or a name in `only` is no layer's.
    """
    if isinstance(model, torch.nn.Linear):
        raise UnsupportedError(
            "quantize_model with a linear layer",
            "nothing holds the module that could hold another in its place",
            "Use QuantLinear.from_linear.",
        )
    only, skip = check_names("only", only), check_names("skip", skip)
    users = _users_of_parameters(model)
    found: dict[str, torch.nn.Linear] = {}
    skipped: dict[str, str] = {}
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for entry in only:
        if not any(holds_components(name, entry) for name in linear):
            raise UnsupportedError(
                f"quantize_model(only={only!r})",
                f"{entry!r} names no linear layer",
                f"Layers are called {', '.join([*linear][:3])}, ...",
            )
    for name, module in linear.items():
        named = next((entry for entry in skip if holds_components(name, entry)), None)
        if named is not None:
            skipped[name] = f"{named!r} is to be skipped"
        elif only and not any(holds_components(name, entry) for entry in only):
            skipped[name] = "it is none of those to be quantized"
        elif why := _reason_to_leave(name, module, users):
            skipped[name] = why
        else:
            found[name] = module
    return found, skipped


def unused_entries(model: torch.nn.Module, skip: Iterable[str]) -> tuple[str, ...]:
    """What to tell of names of layers to skip that are none's.

    The default is for models that have such a layer.
    """
    layers = (torch.nn.Linear, QuantLinear)
    names = [name for name, module in model.named_modules() if isinstance(module, layers)]
    return tuple(
        f"skip: {entry!r} names no linear layer"
        for entry in (() if skip == DEFAULT_SKIP else skip)
        if not any(holds_components(name, entry) for name in names)
    )


class Places:
    """Where a model holds its modules, some of them more than once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._held: dict[torch.nn.Module, list[tuple[torch.nn.Module, str]]] = {}
        for parent in model.modules():
            for child, module in parent._modules.items():
                if module is not None:
                    self._held.setdefault(module, []).append((parent, child))

    def replace(self, old: torch.nn.Module, new: torch.nn.Module) -> None:
        """Puts a module in each place of another."""
        self._held[new] = self._held.pop(old)
        for parent, child in self._held[new]:
            setattr(parent, child, new)


def check_unsupported(choice: str) -> None:
    """Refuse what is no answer to layers that a format cannot hold.

    Raises:
        UnsupportedError: it is neither of the two.
    """
    if choice not in _UNSUPPORTED:
        raise UnsupportedError(
            f"unsupported={choice!r}",
            "it says what to do with layers that the format cannot hold",
            f"Possible: {', '.join(_UNSUPPORTED)}.",
        )


def check_formats(
    weight: WeightSpec | str, activation: ActivationSpec | str | None, method: str
) -> tuple[WeightSpec, ActivationSpec | None]:
    """The formats of layers, where some layer could have them.

    Raises:
        UnsupportedError: none could, or there is no such method.
    """
    check_method(method)
    spec = WeightSpec.parse(weight)
    if activation is None:
        return spec, None
    wanted = ActivationSpec.parse(activation)
    check_activation(wanted)
    return spec, wanted


def check_names(what: str, entries: Iterable[str]) -> tuple[str, ...]:
    """Names of layers as a tuple.

    Raises:
        UnsupportedError: they are no sequence of names.
    """
    # A single string would be taken for its letters.
    is_row = isinstance(entries, Iterable) and not isinstance(entries, (str, bytes, Mapping))
    found = tuple(entries) if is_row else ()
    if not is_row or not all(isinstance(entry, str) and entry.strip(".") for entry in found):
        example = entries if isinstance(entries, str) and entries.strip(".") else "mlp"
        raise UnsupportedError(
            f"{what}={entries!r}",
            "it is no sequence of names",
            f"Pass a tuple such as {what}=({example!r},), or () for none.",
        )
    return found


def _reason_to_leave(
    name: str, linear: torch.nn.Linear, users: dict[int, tuple[str, ...]]
) -> str | None:
    if type(linear) is not torch.nn.Linear:
        return f"it is a {type(linear).__name__}, which may multiply in another way"
    others = [user for user in users[id(linear.weight)] if user != f"{name}.weight"]
    if others:
        return f"its weight is tied to {', '.join(others)}"
    if any(held for key, held in vars(linear).items() if key.endswith("_hooks")):
        return "it has hooks, which a layer in its place would lose"
    return None


def _users_of_parameters(model: torch.nn.Module) -> dict[int, tuple[str, ...]]:
    """The names of each parameter by its id; a module that is held twice counts once."""
    users: dict[int, tuple[str, ...]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, False, remove_duplicate=False):
            users[id(parameter)] = (*users.get(id(parameter), ()), name)
    return users
