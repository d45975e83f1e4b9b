"""Adapters: routers in a small file, and what they are for.

    adapter.safetensors   parameters of the routers
    adapter.json          the base, settings, versions, and what was measured
    lora/                 what PEFT put into the model, where it was trained along

A router is trained on the hidden states of one base. Loading checks that the model at hand is that
one: by its shape, and by a sample of its weights, whatever precision they are loaded in.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import meta_attention
from meta_attention.adapt.config import AdaptConfig
from meta_attention.adapt.families import family_of
from meta_attention.adapt.lora import check_lora, has_lora, load_lora, require_peft, save_lora
from meta_attention.adapt.model import ModelType, install_routers, new_routers
from meta_attention.adapt.router import Router, routers_of
from meta_attention.errors import ConfigError, DataError, OtherBaseError

WEIGHTS_FILE, CARD_FILE = "adapter.safetensors", "adapter.json"
FORMAT = 1

# of the sample of a base's weights: this many parameters, and values of each
NUM_PARAMETERS, NUM_VALUES = 32, 8
# bfloat16 rounds by up to 0.2%; other trainings of a model differ by more somewhere
TOLERANCE = 0.005


def save_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    base: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write the routers of an adapted model, and its LoRA where it has one.

    Args:
        model: An adapted model.
        folder: Where to; made if it is not there.
        base: Name of the base model; default: what it was loaded from.
        metadata: What else the card shall say, as JSON can: measured cost and loss, data, commit.

    Returns:
        The folder.
    """
    routers = routers_of(model)
    adaptation, pretrained = routers[0].adaptation, _pretrained(model)
    card = {
        "format": FORMAT,
        "base": {
            "name": base or _name_of(pretrained),
            **_description(pretrained),
            "weights": sample_weights(pretrained),
        },
        "settings": adaptation.settings.to_dict() | {"layers": list(adaptation.layers)},
        "lora": has_lora(pretrained),
        "versions": {
            "meta_attention": meta_attention.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "metadata": dict(metadata or {}),
    }
    try:
        text = json.dumps(card, indent=2)
    except TypeError as error:
        raise ConfigError(f"metadata must be plain JSON: {error}") from None
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(routers), folder / WEIGHTS_FILE)
    if has_lora(pretrained):
        save_lora(pretrained, folder, base or _name_of(pretrained))
    # last: where there is a card, the adapter is whole
    (folder / CARD_FILE).write_text(text + "\n", "utf-8")
    return folder


def load_adapter(
    model: ModelType, folder: str | Path, *, allow_other_base: bool = False
) -> ModelType:
    """Adapt a model and give its routers the parameters of an adapter, and its LoRA if it has one.

    Args:
        model: The base that the adapter was trained for.
        folder: Written by :func:`save_adapter`.
        allow_other_base: Load it also for a model of other weights, if the shapes fit.

    Returns:
        The same model.
    """
    card, tensors = read_card(folder), _read_tensors(Path(folder))
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"load_adapter takes a Transformers model, got {type(model).__name__}")
    base = card["base"]
    name = f"the adapter is for {base['name'] or 'another model'}"
    for key, here in _description(model).items():
        if base[key] == here:
            continue
        difference = f"{name}: its {key} is {base[key]}, but the model's is {here}"
        if key in ("family", "shape"):
            raise ConfigError(
                f"{difference}; load the base it was trained for, or train one for this model"
            )
        if not allow_other_base:
            raise OtherBaseError(difference)
    if not allow_other_base:
        unlike = _first_difference(base["weights"], sample_weights(model))
        if unlike is not None:
            raise OtherBaseError(
                f"{name}, of other weights than this model (they differ in {unlike})"
            )
    if card.get("lora"):
        # before anything changes: once it is installed, the same model can be tried again
        require_peft(f"{folder}, which was trained with LoRA,")
        check_lora(model, Path(folder))
    routers = new_routers(model, _settings(card, model, Path(folder)))
    _fill(routers.values(), tensors, Path(folder))
    # nothing has changed so far: a broken file leaves the model as it was
    install_routers(model, routers)
    if card.get("lora"):
        load_lora(model, Path(folder))
    return model


def read_card(folder: str | Path) -> dict[str, Any]:
    """What an adapter's JSON says: ``base``, ``settings``, ``versions``, ``metadata``."""
    path = Path(folder) / CARD_FILE
    try:
        card = json.loads(path.read_text("utf-8"))
    except OSError:
        raise DataError(
            f"{path.parent} has no {CARD_FILE}; give a folder of save_adapter"
        ) from None
    except ValueError:
        raise DataError(f"{path} is not JSON; save the adapter anew") from None
    version = card.get("format") if isinstance(card, dict) else None
    if version != FORMAT:
        raise DataError(
            f"{path} must be of format {FORMAT}, got {version!r}; update meta-attention, or save "
            "the adapter anew"
        )
    for name in ("base", "settings", "metadata"):
        if not isinstance(card.get(name), dict):
            raise DataError(f"{path} says nothing of {name!r}; save the adapter anew")
    missing = {"name", "family", "shape", "vocab_size", "windows", "weights"} - set(card["base"])
    if missing:
        raise DataError(f"{path} says nothing of the base's {', '.join(sorted(missing))}")
    return card


def sample_weights(model: PreTrainedModel) -> dict[str, str]:
    """A few values of some of the weights: of all kinds, evenly over the layers."""
    parameters = {
        # PEFT puts its own beside them
        name.replace(".base_layer.", "."): parameter
        for name, parameter in model.base_model.named_parameters()
        if ".router." not in name and ".lora_" not in name
    }
    names = list(parameters)
    chosen = {names[i] for i in spread(len(names), NUM_PARAMETERS)}
    sample = {}
    for name in sorted(chosen):
        flat = parameters[name].detach().flatten()
        at = torch.tensor(spread(flat.numel(), NUM_VALUES), device=flat.device)
        # six digits are more than the tolerance asks for
        sample[name] = " ".join(f"{value:.6g}" for value in flat[at].double().tolist())
    return sample


def spread(size: int, count: int) -> list[int]:
    """Indices below a size, evenly over it from the first to the last."""
    # whole numbers: in float32 the last of an embedding of 28 million values is one too far
    return [i * (size - 1) // (count - 1) for i in range(count)]


def _first_difference(there: Any, here: Mapping[str, str]) -> str | None:
    """The first parameter that is not the same in two samples, or None."""
    if not isinstance(there, dict) or set(there) != set(here):
        return "their names"
    for name, values in here.items():
        try:
            a, b = (torch.tensor(list(map(float, x.split()))) for x in (there[name], values))
        except (AttributeError, ValueError):
            raise DataError(
                f"the adapter's card must have numbers of the base's {name}, got {there[name]!r}; "
                "save the adapter anew"
            ) from None
        if a.shape != b.shape or not torch.allclose(a, b, rtol=TOLERANCE, atol=1e-6):
            return name
    return None


def _settings(card: Mapping[str, Any], model: PreTrainedModel, folder: Path) -> AdaptConfig:
    """What a card says of the routing, if routers can be built from it."""
    family = family_of(model.config)
    try:
        config = AdaptConfig.of(card["settings"])
        config.for_base(family.shape(model.config), causal=family.causal, use_rope=family.use_rope)
    except ConfigError as error:
        raise DataError(
            f"{folder / CARD_FILE} has settings that cannot be: {error}; update meta-attention, or "
            "save the adapter anew"
        ) from None
    return config


def _description(model: PreTrainedModel) -> dict[str, Any]:
    """What must be the same for a router to mean the same, beside the weights."""
    config = model.config
    family = family_of(config)
    shape = family.shape(config)
    return {
        "family": family.model_type,
        "shape": {name: getattr(shape, name) for name in shape.__slots__},
        "vocab_size": config.vocab_size,
        "windows": [family.has_window(config, i) for i in range(shape.num_hidden_layers)],
    }


def _name_of(model: PreTrainedModel) -> str | None:
    """What it was loaded from; of a folder only the last part, which others may have, too."""
    name: str | None = model.config._name_or_path or None
    return Path(name).resolve().name if name and Path(name).exists() else name


def _pretrained(model: nn.Module) -> PreTrainedModel:
    """The model itself, or the one that others have wrapped."""
    found = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return found[0]


def _tensors(routers: Iterable[Router]) -> dict[str, Tensor]:
    return {
        f"layers.{router.layer_idx}.{name}": tensor.detach().cpu().contiguous()
        for router in routers
        for name, tensor in router.state_dict().items()
    }


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}; save the adapter anew") from None


def _fill(routers: Collection[Router], tensors: dict[str, Tensor], folder: Path) -> None:
    expected = _tensors(routers)
    for name in sorted(expected.keys() | tensors.keys()):
        a, b = expected.get(name), tensors.get(name)
        if a is None or b is None or a.shape != b.shape:
            raise DataError(
                f"{folder / WEIGHTS_FILE} does not fit its card at {name}; save the adapter anew"
            )
    for router in routers:
        prefix = f"layers.{router.layer_idx}."
        own = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        router.load_state_dict(own)
