"""What the commands on a checkpoint share: loading it, and reading the text to run it on."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meta_attention.errors import BackendUnavailableError, ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from meta_attention.models import MetaAttentionForCausalLM


class Device(StrEnum):
    """Where to run."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """In which precision to run."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


CheckpointArgument = Annotated[
    Path, typer.Argument(help="folder with a saved model and its tokenizer", show_default=False)
]
OptionalCheckpointArgument = Annotated[
    Path | None,
    typer.Argument(help="folder with a saved model and its tokenizer", show_default=False),
]
AdapterOption = Annotated[
    Path | None,
    typer.Option(
        help="an adapted pretrained model in place of a checkpoint: folder written by "
        "'meta-attention adapt'",
        show_default=False,
    ),
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        help="the model that the adapter is for: folder or hub name  [default: what its card says]",
        show_default=False,
    ),
]
OtherBaseOption = Annotated[
    bool,
    typer.Option(
        "--allow-other-base",
        help="take the adapter also to a base of other weights than it was trained for, if the "
        "shapes fit",
    ),
]
DeviceOption = Annotated[Device, typer.Option(help="where to run; auto: a GPU if there is one")]
DtypeOption = Annotated[Dtype, typer.Option(help="precision; auto: as it was saved")]
TextOption = Annotated[str | None, typer.Option(help="the text itself")]
TextFileOption = Annotated[Path | None, typer.Option(help="file of UTF-8 text; - for stdin")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document")]


def load_checkpoint(
    path: Path, device: str = "auto", dtype: str = "auto"
) -> tuple["MetaAttentionForCausalLM", "PreTrainedTokenizerBase"]:
    """A routed model, in evaluation mode on its device, and its tokenizer.

    Args:
        path: Folder with a saved model and its tokenizer.
        device: ``"auto"`` (a GPU if there is one), ``"cpu"`` or ``"cuda"``.
        dtype: ``"auto"`` (as it was saved) or the name of one.
    """
    _check_folder(path)
    from transformers import AutoTokenizer

    from meta_attention.adapt.bases import TELL_WHAT_IS_MISSING, missing_weights
    from meta_attention.models import MetaAttentionForCausalLM

    device = _device(device)
    # what it would warn of is checked below
    be_quiet()
    try:
        loaded: Any = MetaAttentionForCausalLM.from_pretrained(
            path, dtype=str(dtype), local_files_only=True, **TELL_WHAT_IS_MISSING
        )
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    # every file of the folder has errors of its own
    except Exception as error:
        raise ConfigError(
            f"{path} must hold a whole checkpoint, model and tokenizer, got: {one_line(error)}"
        ) from error
    model, info = loaded
    if missing := missing_weights(info):
        raise ConfigError(
            f"{path} must hold every weight its config.json asks for, but {len(missing)} are "
            f"missing or of another shape, such as {missing[0]}; save the model again"
        )
    return model.to(device).eval(), tokenizer


def load_model(
    checkpoint: Path | None,
    adapter: Path | None,
    base: str | None,
    device: str = "auto",
    dtype: str = "auto",
    *,
    allow_other_base: bool = False,
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """A checkpoint, or a pretrained model with its adapter; as :func:`load_checkpoint`.

    Args:
        checkpoint: Folder with a saved model and its tokenizer.
        adapter: Folder of an adapter, in its place.
        base: The model that the adapter is for; None: what its card says.
        device: As there.
        dtype: Likewise.
        allow_other_base: Load the adapter also for a base of other weights.
    """
    if (checkpoint is None) == (adapter is None):
        raise ConfigError("exactly one of a checkpoint and --adapter must be given")
    if checkpoint is not None:
        if base is not None:
            raise ConfigError("--base is the model of an --adapter; leave it out")
        if allow_other_base:
            raise ConfigError("--allow-other-base is for an --adapter; leave it out")
        return load_checkpoint(checkpoint, device, dtype)
    assert adapter is not None
    from meta_attention.cli.compare import load_adapted

    return load_adapted(adapter, base, device, dtype, allow_other_base=allow_other_base)


def load_pretrained(name: str) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """A pretrained model as it was saved, on the CPU in evaluation mode, and its tokenizer.

    Args:
        name: A folder, a hub name, or one of the packaged models.
    """
    from meta_attention.adapt import load_base, load_tokenizer
    from meta_attention.errors import MetaAttentionError

    be_quiet()
    try:
        model = load_base(name, dtype="auto").eval()
        return model, load_tokenizer(name)
    except MetaAttentionError:
        raise
    # the hub, the network and every file format have errors of their own
    except Exception as error:
        raise DataError(
            f"{name!r} must be a causal language model with its tokenizer: a folder, a hub name or "
            f"a packaged model, got: {one_line(error)}"
        ) from error


def _device(name: str) -> str:
    import torch

    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise BackendUnavailableError("--device cuda needs a GPU that torch can see; use cpu")
    return ("cuda" if has_gpu else "cpu") if name == "auto" else name


def be_quiet() -> None:
    """Silence Transformers: what goes wrong is one line of ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def read_text(text: str | None, text_file: Path | None, *, option: str = "text") -> str:
    """The text that was given, directly or as a file.

    Args:
        text: Value of ``--text``.
        text_file: Value of ``--text-file``.
        option: Name of the option, for errors.
    """
    if (text is None) == (text_file is None):
        raise DataError(f"exactly one of --{option} and --{option}-file must be given")
    if text_file is not None:
        text = _read_file(text_file, f"--{option}-file")
    assert text is not None
    if not text:
        raise DataError(f"--{option} must not be empty; give some text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"--{option} must be UTF-8 text, got bytes that are not") from error
    return text


def _read_file(path: Path, option: str) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise DataError(f"{option} must be a file that can be read, got: {error}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{option} must be UTF-8 text, got byte 0x{data[error.start]:02x} at offset "
            f"{error.start} of {path}; convert it first"
        ) from error
    if not text:
        raise DataError(f"{option} must not be empty, got no text in {path}")
    return text


def _check_folder(path: Path) -> None:
    """Raise unless the folder holds a checkpoint of ours, before torch is loaded."""
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{path} has no config.json; a checkpoint is a folder written by 'meta-attention "
            "train' or save_pretrained"
        )
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} must be readable JSON, got: {one_line(error)}") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind != "meta_attention":
        raise ConfigError(
            f"{file} must have the model_type 'meta_attention', got {kind!r}: this command runs "
            "routed models only"
        )


def one_line(error: Exception) -> str:
    """An error of somebody else, as the end of one of ours."""
    return " ".join(f"{type(error).__name__}: {error}".split())
