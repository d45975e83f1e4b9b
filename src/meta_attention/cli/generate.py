"""``meta-attention generate``: let a checkpoint write."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meta_attention.cli.checkpoint import (
    AdapterOption,
    BaseOption,
    Device,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    OptionalCheckpointArgument,
    OtherBaseOption,
    TextFileOption,
    load_model,
    read_text,
)
from meta_attention.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EXAMPLES = """\b
examples:
  meta-attention generate runs/tiny --prompt "The cat sat" --stream
  meta-attention generate runs/tiny --prompt-file start.txt --greedy --max-new-tokens 200
  meta-attention generate runs/tiny --prompt "The cat" --temperature 0.8 --top-p 0.9 --seed 1
  meta-attention generate runs/tiny --prompt "The cat" --num-beams 4 --json | jq -r .text
  meta-attention generate --adapter adapters/books --prompt "The lighthouse" --greedy
  meta-attention generate --adapter adapters/mine --base ./my-model --prompt "The lighthouse"
  meta-attention generate --adapter adapters/mine --base ./my-finetune --allow-other-base
"""

DEFAULT_NEW_TOKENS = 128


def generate(
    checkpoint: OptionalCheckpointArgument = None,
    prompt: Annotated[
        str | None, typer.Option(help="text to go on from; without one, a new document")
    ] = None,
    prompt_file: TextFileOption = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="tokens to write at most  [default: 128, or what there is room for]"
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="above 1 wilder, below 1 tamer  [default: 1]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="only the likeliest, of this mass")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="only this many likeliest")] = None,
    num_beams: Annotated[int, typer.Option(min=1, help="beam search when above 1")] = 1,
    greedy: Annotated[bool, typer.Option("--greedy", help="always the likeliest token")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="makes sampling repeatable")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="print while writing")] = False,
    adapter: AdapterOption = None,
    base: BaseOption = None,
    allow_other_base: OtherBaseOption = False,
    device: DeviceOption = Device.auto,
    dtype: DtypeOption = Dtype.auto,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt. Samples, unless --greedy or --num-beams is given."""
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    _check_options(sampling, num_beams, greedy, stream, as_json)
    text = None
    if prompt is not None or prompt_file is not None:
        text = read_text(prompt, prompt_file, option="prompt")
    model, tokenizer = load_model(
        checkpoint, adapter, base, device, dtype, allow_other_base=allow_other_base
    )

    # torch and transformers load here, so that --help stays instant
    import torch
    from transformers import GenerationConfig, TextStreamer, set_seed

    ids = _encode(model, tokenizer, text)
    config = GenerationConfig(
        **_new_tokens(model, ids, max_new_tokens),
        **_special_tokens(model, tokenizer),
        num_beams=num_beams,
        do_sample=not greedy and num_beams == 1,
    )
    if config.do_sample:
        # spelt out, because Transformers would keep the 50 likeliest only
        given = {name: value for name, value in sampling.items() if value is not None}
        config.update(**{"temperature": 1.0, "top_p": 1.0, "top_k": 0} | given)
    if seed is not None:
        set_seed(seed)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True) if stream else None
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]  # a method of those that generate
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            streamer=streamer,
        )
    tokens = output[0, ids.shape[1] :].tolist()
    written = str(tokenizer.decode(tokens, skip_special_tokens=True))
    if as_json:
        print(json.dumps({"prompt": text or "", "text": written, "tokens": tokens}, indent=2))
    elif not stream:
        print((text or "") + written)


def _check_options(
    sampling: dict[str, float | int | None],
    num_beams: int,
    greedy: bool,
    stream: bool,
    as_json: bool,
) -> None:
    given = [name for name, value in sampling.items() if value is not None]
    if given and (greedy or num_beams > 1):
        other = "--greedy" if greedy else "--num-beams"
        raise ConfigError(
            f"{other} does not sample; leave out --{given[0].replace('_', '-')} or {other}"
        )
    if 0.0 in (sampling["temperature"], sampling["top_p"]):
        raise ConfigError("--temperature and --top-p must be above 0; use --greedy instead")
    if sampling["temperature"] is not None and sampling["temperature"] < 1e-3:
        raise ConfigError("--temperature must be at least 0.001; use --greedy instead")
    if stream and as_json:
        raise ConfigError("--json prints one document at the end; leave out --stream or --json")
    if stream and num_beams > 1:
        raise ConfigError("a beam may change to the end; leave out --stream or --num-beams")


def _encode(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", text: str | None
) -> "Tensor":
    """Tokens [1, T] on the model's device; without a text, the one that begins a document."""
    import torch

    if text is not None:
        ids = tokenizer(text, verbose=False)["input_ids"]
    elif tokenizer.bos_token_id is None:
        raise DataError("--prompt must be given: the tokenizer has no token that begins a text")
    else:
        ids = [tokenizer.bos_token_id]
    return torch.tensor([ids], device=model.device)


def _new_tokens(
    model: "PreTrainedModel", ids: "Tensor", max_new_tokens: int | None
) -> dict[str, int]:
    """How many tokens to write, which must fit behind the prompt."""
    longest, used = model.config.max_position_embeddings, ids.shape[1]
    room = longest - used
    if room < 1:
        raise DataError(
            f"the prompt must leave room within max_position_embeddings = {longest}, got {used} "
            "tokens; shorten it"
        )
    if max_new_tokens is not None and max_new_tokens > room:
        raise ConfigError(
            f"--max-new-tokens must be at most {room}, got {max_new_tokens}: the prompt has {used} "
            f"tokens and max_position_embeddings is {longest}"
        )
    return {"max_new_tokens": max_new_tokens or min(DEFAULT_NEW_TOKENS, room)}


def _special_tokens(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, Any]:
    """Where to stop and what to pad with: the model's own, else the tokenizer's."""
    own = model.generation_config
    end = tokenizer.eos_token_id if own.eos_token_id is None else own.eos_token_id
    pad = own.pad_token_id
    if pad is None:
        pad = tokenizer.pad_token_id
    if pad is None:
        pad = end[0] if isinstance(end, list) else end
    return {"eos_token_id": end, "pad_token_id": pad}
