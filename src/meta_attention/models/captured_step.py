"""A decoding step in a CUDA graph: launched as one, however many kernels it has."""

import torch
from torch import Tensor

from meta_attention.errors import BackendUnavailableError, CacheError, ShapeError
from meta_attention.layers import MetaAttentionStaticCache
from meta_attention.models.modeling_meta_attention import MetaAttentionForCausalLM


class CapturedStep:
    """One token for every row, captured once and replayed for every token that follows.

    Made before the prompt, while the cache is empty; the prompt is a call of the model::

        cache = MetaAttentionStaticCache(model.config, max_cache_len=4096)
        step = CapturedStep(model, cache, batch_size=8)
        logits = model(prompt, attention_mask=mask, past_key_values=cache).logits[:, -1:]
        while not done:
            logits = step(logits.argmax(dim=-1))

    ``cache.reset()`` makes it ready for the next prompts, of as many rows.

    Args:
        model: A model on a CUDA device, in evaluation mode.
        cache: An empty cache of it; the step keeps writing to this one.
        batch_size: Rows of the batch.
    """

    def __init__(
        self, model: MetaAttentionForCausalLM, cache: MetaAttentionStaticCache, batch_size: int
    ) -> None:
        if model.device.type != "cuda":
            raise BackendUnavailableError(
                f"a step is captured on a CUDA device, the model is on {model.device}; call the "
                "model itself, with the same cache"
            )
        if cache.get_seq_length() > 0:
            raise CacheError(
                f"a step is captured with an empty cache, got {cache.get_seq_length()} tokens; "
                "capture it before the prompt, or reset the cache"
            )
        self.cache = cache
        self.input_ids = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)

        def run() -> Tensor:
            with torch.no_grad():
                logits: Tensor = model(self.input_ids, past_key_values=cache, use_cache=True).logits
            return logits

        # graphs are captured on the current device
        with torch.cuda.device(model.device):
            # allocate the cache and compile the kernels, on a stream of its own as graphs ask
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                run()
                cache.reset()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = run()
        # capturing has counted a token that nobody wrote
        cache.reset()

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Logits ``[B, 1, V]`` of the next tokens ``[B, 1]``; valid until the next call."""
        if input_ids.shape != self.input_ids.shape:
            raise ShapeError(
                f"input_ids must be [B, 1] = {list(self.input_ids.shape)}, "
                f"got {list(input_ids.shape)}"
            )
        self.cache.advance(1)
        with torch.cuda.device_of(self.input_ids):
            self.input_ids.copy_(input_ids)
            self.graph.replay()
        return self.logits
