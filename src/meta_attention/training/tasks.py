"""Tasks with known need as a run sees them: sequences in place of packed text."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from meta_attention.errors import ConfigError
from meta_attention.evaluation.tasks import RecallTask, RetrievalTask, Task, TaskDataset, TaskSpec
from meta_attention.evaluation.tasks.retrieval import ALPHABET
from meta_attention.models import MetaAttentionForCausalLM
from meta_attention.training.corpus import Corpus, read_corpus
from meta_attention.training.data import Blocks, hold_out, read_texts, tokenizer_spec
from meta_attention.training.model_settings import Settings
from meta_attention.training.tokenizer import (
    Ids,
    build_tokenizer,
    build_words,
    encode_document,
    encode_documents,
)

# sequences a run is evaluated on
NUM_HELD_OUT = 128


def read_task_blocks(settings: Settings, saved: Path | None) -> Blocks:
    """Sequences to train on, a new one for every place in every batch, and held-out ones."""
    assert settings.task is not None
    spec = TaskSpec.parse(settings.task)
    sizes = (settings.length, settings.window_size, settings.layers)
    if spec.is_text:
        corpus, valid = read_texts(settings)
        known = Corpus(corpus.name, [*corpus.documents, ALPHABET])
        tokenizer = build_tokenizer(tokenizer_spec(settings, saved), known)
        task: Task = build_text_task(spec, *sizes, corpus, tokenizer)
        other = task if valid is None else build_text_task(spec, *sizes, valid, tokenizer)
        name = f"{spec}, in {corpus.name}"
        valid_name = None if valid is None else f"{spec}, in {valid.name}"
    else:
        task = other = recall = build_recall(spec, *sizes)
        tokenizer = build_words(recall.words)
        name, valid_name = str(spec), f"{spec}, held out"
    train = TaskDataset(task, settings.steps * settings.batch_size, settings.seed)
    if not settings.eval_every:
        return Blocks(tokenizer, train, None, name, None)
    held_out = TaskDataset(other, NUM_HELD_OUT, held_out=True)
    return Blocks(tokenizer, train, held_out, name, valid_name)


def held_out_task(
    model: MetaAttentionForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path,
    task: str,
    data: Sequence[str] = (),
    length: int | None = None,
    size: int | None = None,
) -> tuple[TaskSpec, TaskDataset]:
    """Sequences of a task for a trained model, of the sizes it was trained with unless given.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        checkpoint: Its folder; the record of its run, if there, has the sizes.
        task: Name, and sizes that shall differ.
        data: Text to hide facts in; none: what training holds out of Python's manual.
        length: Tokens of a sequence; default: as trained.
        size: Number of sequences; default: as training evaluates on.
    """
    spec, config = TaskSpec.parse(task), model.config
    trained_on = None
    if (checkpoint / "run.json").is_file():
        record = json.loads((checkpoint / "run.json").read_text("utf-8"))
        trained_on = record.get("settings", {}).get("task")
    if trained_on is not None and (trained := TaskSpec.parse(trained_on)).name == spec.name:
        spec = spec.or_sizes_of(trained)
    longest = config.max_position_embeddings
    if length is not None and length > longest:
        raise ConfigError(
            f"length must be at most the model's max_position_embeddings = {longest}, got {length}"
        )
    sizes = (length or longest, config.window_size, config.num_hidden_layers)
    if spec.is_text:
        assert isinstance(tokenizer, PreTrainedTokenizerFast)
        corpus = read_corpus(data) if data else hold_out(read_corpus())[1]
        built: Task = build_text_task(spec, *sizes, corpus, tokenizer)
    else:
        if data:
            raise ConfigError(
                "data must not be given with task recall, which makes its own tokens; leave it out"
            )
        built = recall = build_recall(spec, *sizes)
        if tokenizer.convert_tokens_to_ids(recall.words) != list(range(len(recall.words))):
            raise ConfigError(
                f"task {spec} must be asked of a model trained on the words of its vocabulary, but "
                f"{checkpoint} has another one; give its keys, values and noise"
            )
    return spec, TaskDataset(built, size or NUM_HELD_OUT, held_out=True)


def build_recall(spec: TaskSpec, length: int, window: int, layers: int) -> RecallTask:
    task = spec.build(length=length, window=window, layers=layers)
    assert isinstance(task, RecallTask)
    return task


def build_text_task(
    spec: TaskSpec,
    length: int,
    window: int,
    layers: int,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
) -> RetrievalTask:
    """A task whose sequences are hidden in a corpus."""
    boundary = np.array([tokenizer.eos_token_id])
    documents: list[Ids] = []
    for document in encode_documents(tokenizer, corpus.documents):
        documents += [document, boundary]
    task = spec.build(
        length=length,
        window=window,
        layers=layers,
        text=np.concatenate(documents),
        encode=lambda text: encode_document(tokenizer, text),
    )
    assert isinstance(task, RetrievalTask)
    return task
