"""One router's training, from a base and text to an adapter.

The folder holds ``run.json`` (what was asked for, on what, and what came of it) and
``metrics.jsonl`` as any run of ours, checkpoints of what learns while it is trained, and at the end
the adapter with its card.
"""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from meta_attention.adapt.adaptation import Routing
from meta_attention.adapt.adapters import CARD_FILE, sample_weights, save_adapter
from meta_attention.adapt.families import family_of
from meta_attention.adapt.lora import add_lora, has_lora, learns
from meta_attention.adapt.model import adapt
from meta_attention.adapt.router import Router, routers_of
from meta_attention.adapt.training.card import write_readme
from meta_attention.adapt.training.recall import RecallBlocks, narrowest_window
from meta_attention.adapt.training.settings import DEFAULT_LENGTH, RouterSettings
from meta_attention.adapt.training.trainer import RouterTrainer
from meta_attention.adapt.training.values import ValueTrainer
from meta_attention.errors import ConfigError, DataError
from meta_attention.training.checkpoints import clear_write_errors, list_checkpoints
from meta_attention.training.corpus import Corpus, read_corpus
from meta_attention.training.data import Blocks, check_same_text, hold_out
from meta_attention.training.logs import MetricsLog
from meta_attention.training.packing import pack
from meta_attention.training.run import (
    check_free,
    choose_checkpoint,
    go_on_with,
    read_run,
    read_settings,
    run_folder,
    training_arguments,
    versions,
    write_run,
)
from meta_attention.training.sampler import BlockSampler
from meta_attention.training.settings import NO_WEIGHT


def open_router_run(out: Path, overrides: Mapping[str, Any], *, resume: bool) -> RouterSettings:
    """Settings of a new run, or of the one that a folder holds.

    Args:
        out: Folder of the run.
        overrides: Settings that were given.
        resume: Go on with the run in ``out``; settings given anew must agree with it.
    """
    if resume:
        return go_on_with(read_settings(RouterSettings, out), overrides, out)
    check_free(out, CARD_FILE)
    return RouterSettings.of(overrides)


def train_router(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: RouterSettings,
    out: str | Path,
    *,
    blocks: Blocks | None = None,
    routes: Routing | None = None,
    resume: bool = False,
    callbacks: tuple[TrainerCallback, ...] = (),
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Train the routers of a pretrained model, measure and save them.

    The model is adapted as the settings say, unless it is adapted already: then it is trained as it
    is, and the settings of its routing are not looked at. It is trained in place, and left with the
    best routers that were found.

    Args:
        model: A causal language model of a known family.
        tokenizer: Its tokenizer.
        settings: All that is chosen.
        out: Folder of the run, and of the adapter.
        blocks: Text to train and to evaluate on, where it is not to be read as the settings say.
        routes: Routes of all tokens by layer, as ``routed_as`` takes them: these in place of the
            routers', which do not learn. What does is LoRA. The model stays routed by them; its
            adapter does not keep them.
        resume: Go on from the newest complete checkpoint in ``out``.
        callbacks: For Trainer, such as a progress bar.
        say: Called with a line about what a resumed run goes on from.

    Returns:
        What ``run.json`` then holds; ``metrics`` is what the adapter's card says was measured.
    """
    out = Path(out).resolve()
    if resume:
        saved = read_run(out)
        if saved.get("base_weights") != sample_weights(model):
            raise ConfigError(
                f"a resumed run must have the base it began with, but {settings.model} has other "
                "weights; name the same one"
            )
        if saved.get("finished"):
            say(f"{out} holds a finished run: nothing to do")
            return saved
    else:
        check_free(out, CARD_FILE)
    _check(model, settings, routes)
    shape = family_of(model.config).shape(model.config)
    length = _length(shape.max_position_embeddings, settings)
    settings = replace(
        settings,
        lr=settings.lr_for(shape.hidden_size),
        window_size=settings.window_for(length),
        experts=settings.experts_for(length),
    )
    args = training_arguments(settings, out)
    if args.world_size > 1:
        raise ConfigError("a router is trained in one process on one device; leave out torchrun")
    transformers.utils.logging.disable_progress_bar()
    if blocks is None:
        blocks = read_blocks(tokenizer, settings, length)
    BlockSampler(blocks.train, settings.batch_size, settings.seed)
    set_seed(settings.seed)
    if not any(isinstance(module, Router) for module in model.modules()):
        adapt(model, settings.adapt_config(length))
    is_value, adapted = settings.controller == "value", routers_of(model)[0].adaptation.config
    if is_value != (adapted.controller == "value"):
        raise ConfigError(
            "values are learnt by a model adapted with controller='value', with settings that have "
            "the same controller; give both, or neither"
        )
    if is_value and (adapted.training_weights, adapted.routing) != ("explore", "hard"):
        raise ConfigError(
            "values are learnt by hard routes with training_weights='explore', got "
            f"{adapted.routing} ones with {adapted.training_weights!r}; leave both out of adapt"
        )
    window, share = narrowest_window(model), settings.recall_share
    train = RecallBlocks(blocks.train, tokenizer, share=share, window=window, seed=settings.seed)
    recall = None
    if share and blocks.valid is not None:
        # the same for every seed, so that runs can be compared
        recall = RecallBlocks(blocks.valid, tokenizer, share=1.0, window=window)
    if settings.lora_rank and not has_lora(model):
        add_lora(model, settings.lora_rank)
    learns(model, routers=routes is None, lora=settings.lora_rank > 0)
    if routes is not None:
        settings = replace(settings, kl_weight=NO_WEIGHT, cost_weight=NO_WEIGHT, target_cost=None)

    weights = sample_weights(model)
    checkpoint = None
    if resume:
        check_same_text(saved, blocks)
        checkpoint = choose_checkpoint(out, args, say)
    with run_folder(out):
        kind = ValueTrainer if is_value else RouterTrainer
        trainer = kind(
            model,
            args,
            settings,
            routes=routes,
            train_dataset=train,
            eval_dataset=blocks.valid,
            recall=recall,
            callbacks=[MetricsLog(out), *callbacks],
        )
    # only now, when nothing is left to refuse, does the folder become a run
    record = _describe(settings, blocks, model, args, length) | {"base_weights": weights}
    with clear_write_errors("run.json", out):
        write_run(out, record)
    trainer.train_from(checkpoint)
    measured = _measure(trainer, length)
    trainer.restore_model()
    with clear_write_errors("the adapter", out):
        base = _public(settings.model) or None
        save_adapter(model, out, base=base, metadata=_metadata(record, measured))
        write_readme(out)
        record |= {"finished": True, "steps": trainer.state.global_step, "metrics": measured}
        write_run(out, record)
    trainer.close()
    # what they hold is in the adapter, and the folder is what is handed on
    for path in list_checkpoints(out):
        shutil.rmtree(path)
    return record


def read_blocks(
    tokenizer: PreTrainedTokenizerBase, settings: RouterSettings, length: int
) -> Blocks:
    """Text to train and to evaluate on, cut into blocks."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(
            "the base's tokenizer must have a tokenizer.json, but it is a "
            f"{type(tokenizer).__name__}"
        )
    corpus = read_corpus(settings.data, max_bytes=settings.max_bytes)
    if settings.eval_data:
        valid = read_corpus(settings.eval_data, max_bytes=settings.max_bytes)
    else:
        corpus, valid = hold_out(corpus)

    def packed(text: Corpus) -> Any:
        return pack(text, tokenizer, length)

    return Blocks(tokenizer, packed(corpus), packed(valid), corpus.name, valid.name)


def _length(longest: int, settings: RouterSettings) -> int:
    length = settings.length or min(DEFAULT_LENGTH, longest)
    if length > longest:
        raise ConfigError(
            f"length must be at most the {longest} positions of the base, got {length}; lower it"
        )
    return length


def _check(model: PreTrainedModel, settings: RouterSettings, routes: Routing | None) -> None:
    family = family_of(model.config)
    if not family.causal:
        raise ConfigError(
            f"a router is trained on predictions of the next token, but {family.model_type} models "
            "are bidirectional; give a causal language model"
        )
    if routes is not None and not settings.lora_rank:
        raise ConfigError("with given routes nothing learns but LoRA: give a lora_rank")
    if settings.experts is not None and len(settings.experts) < 2:
        raise ConfigError(
            f"experts must be at least two to choose from, got {', '.join(settings.experts)}"
        )


def _describe(
    settings: RouterSettings,
    blocks: Blocks,
    model: PreTrainedModel,
    args: TrainingArguments,
    length: int,
) -> dict[str, Any]:
    return {
        "kind": "adapter",
        "seed": settings.seed,
        "settings": settings.to_dict(),
        "length": length,
        **blocks.to_dict(),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "base_parameters": sum(p.numel() for p in model.parameters() if not p.requires_grad),
        "device": args.device.type,
        "versions": versions(),
        "finished": False,
    }


def _metadata(record: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """What the card of an adapter says of its training; not where anything lay."""
    settings = record["settings"]
    public = {
        name: settings[name]
        for name in settings
        if name not in ("model", "data", "eval_data", "max_bytes")
    }
    texts = {
        key: record[key] | {"name": ", ".join(map(_public, record[key]["name"].split(", ")))}
        for key in ("data", "eval_data")
    }
    return {"measured": dict(measured), **texts, "settings": public, "device": record["device"]}


def _public(name: str) -> str:
    """A name as others may read it: of files and folders only the last part."""
    return Path(name).resolve().name if name and Path(name).exists() else name


def _measure(trainer: RouterTrainer, length: int) -> dict[str, Any]:
    """What the adapter's card says: of the base and of the routed model, on held-out text."""
    # the target's price comes last, and stays
    offers = trainer.price_list() if isinstance(trainer, ValueTrainer) else None
    metrics = {
        name.removeprefix("best_"): value
        for name, value in trainer.evaluate(metric_key_prefix="best").items()
    }
    names = routers_of(trainer.model)[0].expert_names  # type: ignore[arg-type]
    layers = {
        str(index): {
            "share": {name: metrics[f"layer_{index}/share/{name}"] for name in names},
            "adaptivity": metrics[f"layer_{index}/adaptivity"],
        }
        for index in trainer.adaptation.layers
    }
    kept = (
        *("lm_loss", "base_loss", "divergence", "recall_divergence"),
        *("attention_share", "routed_cost", "bits_per_byte"),
        *("adaptivity", "routing_entropy", "kl", "expert_collapses", "prior_collapses"),
    )
    return {
        "length": length,
        "step": trainer.model_step,
        **{name: metrics[name] for name in kept if name in metrics},
        "loss_increase": metrics["lm_loss"] - metrics["base_loss"],
        "target_cost": trainer.target_cost,
        **({} if offers is None else {"price": trainer.adaptation.config.price, "offers": offers}),
        "layers": layers,
    }
