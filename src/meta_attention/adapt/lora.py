"""LoRA through PEFT: small changes to the attention projections, trained along with the router.

PEFT puts them into the model in place, so the model stays of its class. The base is what it was
while :func:`without_lora` holds.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from meta_attention.adapt.families import family_of
from meta_attention.adapt.router import Router, routers_of
from meta_attention.errors import BackendUnavailableError, ConfigError, DataError

LORA_FOLDER = "lora"  # in an adapter's, as PEFT saves it
CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"


def require_peft(what: str) -> None:
    """Raise unless PEFT is installed; ``what`` asks for it."""
    if find_spec("peft") is None:
        raise BackendUnavailableError(
            f"{what} needs the package peft; run: pip install 'meta-attention[adapters]'"
        )


def add_lora(model: PreTrainedModel, rank: int) -> None:
    """Give the projections of every adapted attention module a LoRA of this rank."""
    require_peft("LoRA")
    from peft import LoraConfig

    targets = projections_of(model)
    if not targets:
        raise ConfigError(
            f"LoRA changes projections of attention, but {type(model).__name__} has none that "
            "PEFT knows; train without it"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=targets,
        # GPT-2 keeps its matrices the other way round
        fan_in_fan_out=isinstance(model.get_submodule(targets[0]), Conv1D),
    )
    model.add_adapter(config, NAME)


def projections_of(model: PreTrainedModel) -> list[str]:
    """Names of the linear maps in adapted attention modules, those of routers left out."""
    layers = {router.layer_idx for router in routers_of(model)}
    modules = family_of(model.config).attention_modules(model)
    adapted = {id(module) for index, module in enumerate(modules) if index in layers}
    return [
        f"{name}.{inner}"
        for name, module in model.named_modules()
        if id(module) in adapted
        for inner, part in module.named_modules()
        if isinstance(part, nn.Linear | Conv1D) and not inner.startswith("router")
    ]


def has_lora(model: nn.Module) -> bool:
    """Whether PEFT has put anything into a model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def lora_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What LoRA learns."""
    return [p for name, p in model.named_parameters() if ".lora_" in name]


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """The projections as the base has them, for a while."""
    if not has_lora(model):
        yield
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    changed = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    before = [m._disable_adapters for m in changed]
    for module in changed:
        # not enable_adapters, which would also change what learns
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, was in zip(changed, before, strict=True):
            module._disable_adapters = was


def learns(model: nn.Module, *, routers: bool, lora: bool) -> None:
    """Let routers, LoRA or both learn, and nothing else."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Router):
            for parameter in module.parameters():
                parameter.requires_grad_(routers)
    for parameter in lora_parameters(model):
        parameter.requires_grad_(lora)


def save_lora(model: PreTrainedModel, folder: Path, base: str | None) -> None:
    """Write it as PEFT does: ``adapter_config.json`` and ``adapter_model.safetensors``.

    By itself it is an adapter of PEFT for the model called ``base``.
    """
    own = folder / LORA_FOLDER
    own.mkdir(exist_ok=True)
    tensors = {name: x.detach().cpu().contiguous() for name, x in _tensors(model).items()}
    save_file(tensors, own / TENSOR_FILE, metadata={"format": "pt"})
    configs: Any = model.peft_config
    config = copy.copy(configs[NAME])
    # not where it happens to lie
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(own))


def check_lora(model: PreTrainedModel, folder: Path) -> None:
    """Raise unless the files that :func:`save_lora` wrote can be read and fit, PEFT being there.

    The model stays as it is: PEFT changes an empty one of its kind, to see what it would look for.
    """
    from peft import PeftConfig

    own = folder / LORA_FOLDER
    try:
        json.loads((own / CONFIG_FILE).read_text("utf-8"))
        there = load_file(own / TENSOR_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(
            f"the LoRA in {own} cannot be read ({error}); copy or save the adapter anew"
        ) from None
    try:
        with torch.device("meta"):
            empty = type(model)(copy.deepcopy(model.config))
        empty.add_adapter(PeftConfig.from_pretrained(str(own)), NAME)
    # whatever PEFT makes of what a config may say
    except Exception as error:
        raise DataError(
            f"{own / CONFIG_FILE} does not fit the model ({' '.join(str(error).split())}); copy or "
            "save the adapter anew"
        ) from None
    expected = _tensors(empty)
    # a LoRA of one's own with all biases has those of routers, too, which are not there yet
    names = {name for name in expected.keys() | there.keys() if ".router." not in name}
    for name in sorted(names):
        a, b = expected.get(name), there.get(name)
        if a is None or b is None or a.shape != b.shape:
            raise DataError(
                f"{own / TENSOR_FILE} does not fit its {CONFIG_FILE} at {name}; copy or save the "
                "adapter anew"
            )


def load_lora(model: PreTrainedModel, folder: Path) -> None:
    """Put in what :func:`save_lora` wrote; PEFT must be there."""
    model.load_adapter(str(folder / LORA_FOLDER), adapter_name=NAME)


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What LoRA learns, under the names that its file has."""
    from peft import get_peft_model_state_dict

    # told that no token was added, PEFT does not look for the base to compare vocabularies
    state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    return {f"base_model.model.{name}": tensor for name, tensor in state.items()}
