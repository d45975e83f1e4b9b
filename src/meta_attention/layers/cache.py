"""What a layer remembers between calls: keys and values for some experts, a state for others.

Every token writes its keys and values and updates every state, whatever its route: a later token
may take any expert, and decoding equals one pass over the whole text.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import CacheError, ShapeError
from meta_attention.experts import Expert, RecurrentExpert, build_experts
from meta_attention.ops.heads import check_mask


class RoutedCacheLayer(DynamicLayer):
    """Cache of one layer.

    Args:
        experts: The experts of the layer. Keys and values are kept when any of them reads them,
            and only as far back as the farthest-reaching one looks.
    """

    def __init__(self, experts: Sequence[Expert]) -> None:
        super().__init__()
        reaches = [e.reach for e in experts if not isinstance(e, RecurrentExpert)]
        self.has_window = any(reach is not None for reach in reaches)
        self.window = None if None in reaches else max((r for r in reaches if r), default=0)
        self.is_croppable = self.window is None and len(reaches) == len(experts)
        self.states: dict[str, Tensor] = {}
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, T, P]; return all that the new tokens may look at."""
        keys, values = super().update(key_states, value_states)
        if self.window is not None:
            self.keys = keys[:, :, max(keys.shape[2] - self.window, 0) :]
            self.values = values[:, :, max(values.shape[2] - self.window, 0) :]
        return keys, values

    def advance(self, num_tokens: int) -> None:
        """Count tokens that were written."""
        self.length += num_tokens

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def reset(self) -> None:
        # dropped, not zeroed as in older Transformers: keys grow by concatenation
        self.keys = self.values = None
        self.is_initialized = False
        self.states.clear()
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; ``tokens_to_remove`` is negative, as in Transformers."""
        super().crop(tokens_to_remove)
        self.length += tokens_to_remove

    def _map(self, select: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values = select(self.keys), select(self.values)
        self.states = {name: select(state) for name, state in self.states.items()}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda x: x[indices.to(x.device)])


class MetaAttentionCache(Cache):
    """Cache of a model: one :class:`RoutedCacheLayer` per layer, and which positions are padding.

    Args:
        config: Configuration of the model it is for.
    """

    def __init__(self, config: MetaAttentionConfig) -> None:
        with torch.device("meta"):
            experts = [build_experts(config, i) for i in range(config.num_hidden_layers)]
        self.layers: list[RoutedCacheLayer]  # type: ignore[assignment]
        super().__init__(layers=[RoutedCacheLayer(list(e.values())) for e in experts])
        self.max_length = config.max_position_embeddings
        self.is_token: Tensor | None = None  # [B, S] boolean; None: no padding so far

    def extend_mask(self, attention_mask: Tensor | None, B: int, T: int) -> Tensor | None:
        """Mask [B, past + T] of all tokens, from that of all tokens or of the new ones only."""
        past = self.get_seq_length()
        if past + T > self.max_length:
            raise ShapeError(
                f"the sequence must fit max_position_embeddings = {self.max_length}, got "
                f"{past + T} tokens; shorten it or build the model with a larger value"
            )
        new = attention_mask
        if new is not None and new.shape not in ((B, T), (B, past + T)):
            raise ShapeError(
                f"attention_mask must be [B, T] = [{B}, {T}] or, with the {past} cached tokens, "
                f"[{B}, {past + T}], got {list(new.shape)}"
            )
        if past and (new is None or new.shape[1] == T):
            old = self.is_token
            if new is None and old is None:
                return None
            known = new if new is not None else old
            assert known is not None
            old = known.new_ones(B, past) if old is None else old
            new = known.new_ones(B, T) if new is None else new
            new = torch.cat([old.bool(), new.bool()], dim=1)
        if new is None:
            return None
        check_mask(new, B, past + T)
        new = new.bool()
        self._check_gaps(new)
        self.is_token = new
        return new

    def _check_gaps(self, is_token: Tensor) -> None:
        """Refuse padding between two tokens where a window would count it."""
        if not any(layer.has_window for layer in self.layers):
            return
        follows = is_token.cumsum(dim=1)[:, :-1] > 0
        if bool((is_token[:, 1:] & ~is_token[:, :-1] & follows).any()):
            raise CacheError(
                "a row must not go on after padding where an expert has a window, which counts "
                "positions; pad prompts on the left"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, in every layer or in none."""
        if tokens_to_remove > 0 or -tokens_to_remove > self.get_seq_length():
            raise CacheError(
                f"crop takes minus the number of tokens to forget, at most "
                f"{self.get_seq_length()}, got {tokens_to_remove}"
            )
        if tokens_to_remove == 0:
            return
        for index, layer in enumerate(self.layers):
            if not layer.is_croppable:
                raise CacheError(
                    f"the cache of layer {index} cannot forget tokens: its state sums all of "
                    "them, or its window has dropped what came before; start a new cache"
                )
        super().crop(tokens_to_remove)
        if self.is_token is not None:
            self.is_token = self.is_token[:, :tokens_to_remove]

    def reset(self) -> None:
        super().reset()
        self.is_token = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        if self.is_token is not None:
            self.is_token = self.is_token.index_select(0, beam_idx.to(self.is_token.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        if self.is_token is not None:
            self.is_token = self.is_token.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.is_token is not None:
            self.is_token = self.is_token[indices.to(self.is_token.device)]
