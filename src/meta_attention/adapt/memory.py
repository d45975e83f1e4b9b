"""What a routed layer of another model remembers between calls.

Keys and values are in the cache of Transformers, which the base model has written before attention
runs. States of recurrent experts are kept beside them, in the same cache: what is reset, reordered
or selected there is so here.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from meta_attention.errors import CacheError
from meta_attention.layers.cache import open_state
from meta_attention.layers.decode_step import DecodeStep


class WithStates(CacheLayerMixin):
    """Laid over the class of a cache layer: the same, with states of recurrent experts."""

    states: dict[str, Tensor]
    num_seen: int  # tokens that the states are of

    def reset(self) -> None:
        super().reset()
        # dropped, not zeroed as in older Transformers, where length stayed
        if not self.is_compileable:
            self.keys = self.values = None
            self.is_initialized = False
        self.states, self.num_seen = {}, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise CacheError(
                "the cache cannot forget tokens: the state of a recurrent expert is of all of "
                "them; start a new cache, or adapt with softmax experts only"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._map(lambda x: x[indices.to(x.device)])

    def _map(self, select: Callable[[Tensor], Tensor]) -> None:
        self.states = {name: select(state) for name, state in self.states.items()}


@cache
def _with_states(cls: type[Any]) -> type[Any]:
    return type(
        f"{cls.__name__}WithStates", (WithStates, cls), {"is_croppable": False, "_layer_type": None}
    )


def self_attention_cache(past_key_values: object) -> Cache | None:
    """The cache of self-attention, from what a model hands to its attention modules."""
    if isinstance(past_key_values, EncoderDecoderCache):
        return past_key_values.self_attention_cache
    return past_key_values if isinstance(past_key_values, Cache) else None


class BaseMemory:
    """The cache of one layer, as the running of experts asks for it.

    Args:
        layer: The layer in the cache of Transformers, already written.
        keys: All keys it holds ``[B, K, S, P]``, those of the new tokens the last.
        values: Likewise.
        num_new: New tokens, T.
        has_states: Some expert is recurrent.
    """

    def __init__(
        self, layer: Any, keys: Tensor, values: Tensor, num_new: int, has_states: bool
    ) -> None:
        self.keys: Tensor | None = keys
        self.values: Tensor | None = values
        self._layer = layer
        self._has_states = has_states
        if not has_states:
            return
        if not isinstance(layer, WithStates):
            # the object stays: others hold it
            layer.__class__ = _with_states(type(layer))  # type: ignore[arg-type]
            layer.states, layer.num_seen = {}, 0
        past = keys.shape[2] - num_new
        if layer.num_seen != past:
            raise CacheError(
                f"the cache holds {past} tokens, of which the recurrent experts have seen "
                f"{layer.num_seen}: it was filled without routing; start a new cache"
            )

    @property
    def states(self) -> dict[str, Tensor]:
        return self._layer.states if self._has_states else {}

    def update(self, new_keys: Tensor, new_values: Tensor, /) -> tuple[Tensor, Tensor]:
        """All keys and values; the new ones are among them."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def update_newest(
        self, key_states: Tensor, value_states: Tensor, step: DecodeStep
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As :meth:`RoutedCacheLayer.update_newest`."""
        return *self.update(key_states, value_states), step.length, step.start

    def keep_state(self, name: str, state: Tensor) -> None:
        """Remember the state of a recurrent expert."""
        self.states[name] = state

    def open_state(self, name: str, zeros: Callable[[], Tensor]) -> Tensor:
        """The state of a linear expert, to be written in place."""
        return open_state(self.states, name, zeros)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that the states are of."""
        if self._has_states:
            self._layer.num_seen += num_tokens
