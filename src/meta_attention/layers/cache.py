"""What a layer remembers between calls: keys and values for some experts, a state for others.

Every token writes its keys and values and updates every state, whatever its route: a later token
may take any expert, and decoding equals one pass over the whole text.

The cache here grows with the text; ``static_cache.py`` has one of fixed size.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import CacheError, ShapeError
from meta_attention.experts import Expert, RecurrentExpert, SoftmaxExpert, build_experts
from meta_attention.layers.decode_step import DecodeStep, Padding
from meta_attention.layers.entered import EnteredRows
from meta_attention.layers.history import TokenHistory
from meta_attention.ops.heads import check_mask


class LayerMemory(Protocol):
    """What the running of experts asks of the cache of a layer."""

    keys: Tensor | None
    values: Tensor | None

    @property
    def states(self) -> dict[str, Tensor]:
        """States of recurrent experts by name."""

    def update(self, key_states: Tensor, value_states: Tensor, /) -> tuple[Tensor, Tensor]:
        """Add keys and values [B, heads, T, P]; return all that the new tokens may look at."""

    def update_newest(
        self, key_states: Tensor, value_states: Tensor, step: DecodeStep
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See :meth:`RoutedCacheLayer.update_newest`."""

    def keep_state(self, name: str, state: Tensor) -> None:
        """Remember the state of a recurrent expert."""

    def open_state(self, name: str, zeros: Callable[[], Tensor]) -> Tensor:
        """The state of a linear expert, to be written in place."""

    def advance(self, num_tokens: int) -> None:
        """Count tokens that were written."""


def open_state(states: dict[str, Tensor], name: str, zeros: Callable[[], Tensor]) -> Tensor:
    """The state of that name, to be written in place; kept in ``states``."""
    state = states.get(name)
    if state is None:
        states[name] = state = zeros()
    elif state.requires_grad or state.is_inference() != torch.is_inference_mode_enabled():
        # it belongs to a graph, or to a mode, that does not allow it
        states[name] = state = state.detach().clone()
    return state


def conv_state_name(index: int) -> str:
    """Where a cache keeps the last inputs of the convolution of a set of projections."""
    return f"short_conv.{index}"


class RoutedCacheLayer(DynamicLayer):
    """Cache of one layer, which grows with the text.

    Args:
        experts: The experts of the layer by name. Keys and values are kept when any of them reads
            them, and only as far back as the farthest-reaching one looks; with sinks, all.
        has_conv: A convolution makes queries, keys and values; its last inputs are states, too.
    """

    def __init__(self, experts: Mapping[str, Expert], has_conv: bool = False) -> None:
        super().__init__()
        reaches = [e.reach for e in experts.values() if not isinstance(e, RecurrentExpert)]
        windows = [e.window for e in experts.values() if isinstance(e, SoftmaxExpert)]
        # which counts positions, padding included; with sinks it reaches farther than itself
        self.has_window = has_conv or any(n is not None for n in (*reaches, *windows))
        self.window = None if None in reaches else max((r for r in reaches if r), default=0)
        has_states = has_conv or len(reaches) < len(experts)
        self.is_croppable = self.window is None and not has_states
        self.states: dict[str, Tensor] = {}
        self.length = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, T, P]; return all that the new tokens may look at."""
        if self.is_initialized:
            keys, values = super().update(key_states, value_states)
        else:
            # a prompt is kept as it is: to append it to nothing would copy it
            self.lazy_initialization(key_states, value_states)
            keys, values = self.keys, self.values = key_states, value_states
        if self.window is not None:
            self.keys, self.values = (self._newest(x, self.window) for x in (keys, values))
        return keys, values

    def _newest(self, x: Tensor, window: int) -> Tensor:
        newest = x[:, :, max(x.shape[2] - window, 0) :]
        # a view of a long prompt would hold all of it in memory
        return newest.clone() if x.shape[2] > 2 * window else newest

    def update_newest(
        self, key_states: Tensor, value_states: Tensor, step: DecodeStep
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Add the newest keys and values [B, heads, 1, P].

        Returns:
            Keys and values [B, heads, S, P]; how many positions of them are filled [1]; the first
            of each row that is not padding [B].
        """
        keys, values = self.update(key_states, value_states)
        dropped = self.length + 1 - keys.shape[2]
        if dropped == 0:
            return keys, values, step.length, step.start
        start = None if step.start is None else (step.start - dropped).clamp(min=0)
        return keys, values, step.length - dropped, start

    def keep_state(self, name: str, state: Tensor) -> None:
        """Remember the state of a recurrent expert."""
        self.states[name] = state

    def open_state(self, name: str, zeros: Callable[[], Tensor]) -> Tensor:
        """The state of a linear expert, to be written in place."""
        return open_state(self.states, name, zeros)

    def mask_of(self, step: DecodeStep) -> Tensor | None:
        """Mask [B, S] of all positions, for a layer that works on all of them."""
        return step.mask(self.length + 1)

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


class EnteredCacheLayer(RoutedCacheLayer, EnteredRows):
    """Cache of a layer that tokens may pass by; it grows by a step that some row enters."""

    def __init__(self, experts: Mapping[str, Expert], has_conv: bool = False) -> None:
        super().__init__(experts, has_conv)
        # windows count tokens that entered, so padding in between is like any token that passes by
        self.has_window = False
        self.is_croppable = False

    @property
    def width(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def make_room(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys, values
        else:
            self.keys = torch.cat([self.keys, keys], dim=2)
            self.values = torch.cat([self.values, values], dim=2)
        return self.keys, self.values

    def count(self, num_entered: Tensor | None, num_tokens: int) -> None:
        self.advance(num_tokens)
        if num_entered is None:
            return
        self.counts = self.counts_of(num_entered.shape[0], num_entered.device) + num_entered
        if self.keys is None or self.values is None or self.window is None:
            return
        if self.width > self.window:
            # the newest of each row
            first = (self.counts - self.window).clamp(min=0).unsqueeze(1)
            at = first + torch.arange(self.window, device=first.device)
            index = at[:, None, :, None]
            self.keys, self.values = (
                x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))
                for x in (self.keys, self.values)
            )
            self.counts = self.counts.clamp(max=self.window)

    def reset(self) -> None:
        super().reset()
        self.counts = None

    def _map(self, select: Callable[[Tensor], Tensor]) -> None:
        super()._map(select)
        self.counts = None if self.counts is None else select(self.counts)


class MetaAttentionCache(Cache):
    """Cache of a model: one :class:`RoutedCacheLayer` per layer, and which positions are padding.

    Args:
        config: Configuration of the model it is for.
    """

    def __init__(self, config: MetaAttentionConfig) -> None:
        with torch.device("meta"):
            experts = [build_experts(config, i) for i in range(config.num_hidden_layers)]
        self.layers: list[RoutedCacheLayer]  # type: ignore[assignment]
        has_conv = config.short_conv is not None
        super().__init__(
            layers=[
                self._make_layer(e, has_conv, config.may_skip(i)) for i, e in enumerate(experts)
            ]
        )
        self.max_length = config.max_position_embeddings
        self.padding: Padding | None = None
        self.history = None if config.recurrence is None else self._make_history(config.recurrence)

    def _make_layer(
        self, experts: Mapping[str, Expert], has_conv: bool, may_skip: bool
    ) -> RoutedCacheLayer:
        make = EnteredCacheLayer if may_skip else RoutedCacheLayer
        return make(experts, has_conv)

    def _make_history(self, num_lengths: int) -> TokenHistory:
        return TokenHistory(num_lengths)

    def prepare(
        self, attention_mask: Tensor | None, B: int, T: int, device: torch.device
    ) -> tuple[Tensor | None, DecodeStep | None]:
        """Make room for T tokens.

        Waits for the device where there is a mask, to see what it holds.

        Args:
            attention_mask: Of all tokens ``[B, past + T]`` or of the new ones only ``[B, T]``;
                None: the new ones are no padding.
            B: Rows of the batch.
            T: New tokens of each.
            device: Where they are.

        Returns:
            A step where there is one new token and no row goes on after padding, otherwise the
            mask ``[B, past + T]``, None if there is no padding.
        """
        past = self.get_seq_length()
        self._check_room(B, past + T)
        if attention_mask is not None:
            padding = Padding.of(self._whole_mask(attention_mask, B, T))
        else:
            padding = self.padding
            # one more token in each row says nothing new, unless some follow padding
            if padding is not None and (T > 1 or padding.ends or padding.has_gaps):
                padding = padding.extend_to(past + T)
        has_gaps = padding is not None and padding.has_gaps
        if has_gaps and any(layer.has_window for layer in self.layers):
            raise CacheError(
                "a row must not go on after padding where an expert has a window or heads a "
                "convolution, which count positions; pad prompts on the left"
            )
        self._keep_padding(padding, B, device)
        if T > 1 or has_gaps:
            return None if padding is None else padding.is_token, None
        is_token = None
        if attention_mask is not None and padding is not None:
            is_token = padding.is_token[:, -1]
        return None, self._make_step(device, is_token)

    def finish(self, T: int) -> None:
        """Count T tokens that all layers have written."""

    def _check_room(self, B: int | None, length: int) -> None:
        if length > self.max_length:
            raise ShapeError(
                f"the sequence must fit max_position_embeddings = {self.max_length}, got "
                f"{length} tokens; shorten it or build the model with a larger value"
            )

    def _whole_mask(self, attention_mask: Tensor, B: int, T: int) -> Tensor:
        """Mask [B, past + T], from itself or from that of the new tokens."""
        past = self.get_seq_length()
        if attention_mask.shape not in ((B, T), (B, past + T)):
            raise ShapeError(
                f"attention_mask must be [B, T] = [{B}, {T}] or, with the {past} cached tokens, "
                f"[{B}, {past + T}], got {list(attention_mask.shape)}"
            )
        check_mask(attention_mask, *attention_mask.shape)
        new = attention_mask.bool()
        if new.shape[1] == past + T:
            return new
        known = self.padding
        old = new.new_ones(B, past) if known is None else known.extend_to(past).is_token
        return torch.cat([old, new], dim=1)

    def _keep_padding(self, padding: Padding | None, B: int, device: torch.device) -> None:
        self.padding = padding

    def _make_step(self, device: torch.device, is_token: Tensor | None) -> DecodeStep:
        past = self.get_seq_length()
        position = torch.full((1,), past, device=device)
        start = None if self.padding is None else self.padding.start
        return DecodeStep(position, position + 1, start, is_token)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens, in every layer or in none."""
        past = self.get_seq_length()
        if tokens_to_remove > 0 or -tokens_to_remove > past:
            raise CacheError(
                f"crop takes minus the number of tokens to forget, at most {past}, "
                f"got {tokens_to_remove}"
            )
        if tokens_to_remove == 0:
            return
        for index, layer in enumerate(self.layers):
            if not layer.is_croppable:
                raise CacheError(
                    f"the cache of layer {index} cannot forget tokens: its state is of all of "
                    "them, its window has dropped what came before, or some have passed it by; "
                    "start a new cache"
                )
        super().crop(tokens_to_remove)
        self._map_padding(lambda is_token: is_token[:, :tokens_to_remove], past)

    def reset(self) -> None:
        super().reset()
        self.padding = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._map_rows(lambda x: x[indices.to(x.device)])

    def _map_rows(self, select: Callable[[Tensor], Tensor]) -> None:
        if self.history is not None:
            self.history.map_rows(select)
        known = self.padding
        if known is None:
            return
        if known.has_gaps or known.ends:
            # the rows that do so may be gone
            self._map_padding(select, self.get_seq_length())
        else:
            # nothing the host knows has changed, and beams come here at every step
            rows = Padding(select(known.is_token), select(known.start), False, False)
            self._keep_padding(rows, rows.start.shape[0], rows.start.device)

    def _map_padding(self, select: Callable[[Tensor], Tensor], length: int) -> None:
        """Change the mask of ``length`` positions, and read it anew."""
        if self.padding is None:
            return
        is_token = select(self.padding.extend_to(length).is_token)
        padding = Padding.of(is_token) if is_token.shape[1] else None
        self._keep_padding(padding, is_token.shape[0], is_token.device)
