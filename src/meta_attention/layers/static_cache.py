"""A cache of fixed size, for CUDA graphs.

It is allocated by the first tokens and written in place from then on, at a length that is kept on
the device. So a decoding step always runs the same kernels on the same memory: it can be captured,
and replayed as the cache fills.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import CacheError, ConfigError, ShapeError
from meta_attention.experts import LINEAR_STATES, Expert, RecurrentExpert
from meta_attention.layers.cache import MetaAttentionCache, RoutedCacheLayer, conv_state_name
from meta_attention.layers.decode_step import DecodeStep, Padding
from meta_attention.layers.entered import EnteredRows
from meta_attention.layers.history import StaticTokenHistory

FIXED_ROWS = "a static cache keeps its number of rows; use a MetaAttentionCache to change it"


class StaticRoutedCacheLayer(RoutedCacheLayer):
    """Cache of one layer, allocated by its first tokens and written in place from then on.

    Windows, too, keep all positions.

    Args:
        experts: The experts of the layer by name.
        has_conv: A convolution makes queries, keys and values.
        max_cache_len: How many positions it has room for.
    """

    def __init__(self, experts: Mapping[str, Expert], has_conv: bool, max_cache_len: int) -> None:
        super().__init__(experts, has_conv)
        recurrent = [name for name, e in experts.items() if isinstance(e, RecurrentExpert)]
        # zeros are what these start from
        self.from_zeros = [name for name in recurrent if type(experts[name]) in LINEAR_STATES]
        self.from_zeros += [conv_state_name(index) for index in range(len(experts))]
        self.window = None
        self.is_croppable = not recurrent and not has_conv
        self.max_cache_len = max_cache_len

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        B, K, _, P = key_states.shape
        self.keys = key_states.new_zeros(B, K, self.max_cache_len, P)
        self.values = value_states.new_zeros(B, K, self.max_cache_len, P)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._allocated(key_states, value_states)
        stop = self.length + key_states.shape[2]
        keys[:, :, self.length : stop] = key_states
        values[:, :, self.length : stop] = value_states
        return keys[:, :, :stop], values[:, :, :stop]

    def update_newest(
        self, key_states: Tensor, value_states: Tensor, step: DecodeStep
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        keys, values = self._allocated(key_states, value_states)
        keys.index_copy_(2, step.position, key_states.to(keys.dtype))
        values.index_copy_(2, step.position, value_states.to(values.dtype))
        return keys, values, step.length, step.start

    def _allocated(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        _refuse_gradient(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def keep_state(self, name: str, state: Tensor) -> None:
        _refuse_gradient(state)
        if name in self.states:
            self.states[name].copy_(state)
        else:
            self.states[name] = state

    def open_state(self, name: str, zeros: Callable[[], Tensor]) -> Tensor:
        if name not in self.states:
            self.states[name] = zeros()
        return self.states[name]

    def mask_of(self, step: DecodeStep) -> Tensor | None:
        self.check_host_may_read(step)
        return super().mask_of(step)

    def check_host_may_read(self, step: DecodeStep) -> None:
        if step.position.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CacheError(
                "a layer with own projections, experts of your own or autocast reads the length of "
                "the cache on the host, so its step cannot be captured; call the model instead"
            )

    def get_max_length(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        # a captured step goes on reading and writing here; what lies past the length is not read
        for name in self.from_zeros:
            if name in self.states:
                self.states[name].zero_()
        self.states = {name: s for name, s in self.states.items() if name in self.from_zeros}
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        self.length += tokens_to_remove

    def _map(self, select: Callable[[Tensor], Tensor]) -> None:
        tensors = list(self.states.values())
        if self.keys is not None and self.values is not None:
            tensors += [x[:, :, : self.length] for x in (self.keys, self.values)]
        for tensor in tensors:
            tensor.copy_(select(tensor))


class StaticEnteredCacheLayer(StaticRoutedCacheLayer, EnteredRows):
    """Cache of fixed size of a layer that tokens may pass by; it has room as if all entered."""

    waits_for_host = False

    def __init__(self, experts: Mapping[str, Expert], has_conv: bool, max_cache_len: int) -> None:
        super().__init__(experts, has_conv, max_cache_len)
        self.has_window = False
        self.is_croppable = False

    @property
    def width(self) -> int:
        # how many entered is known on the device only
        return self.length if self.is_initialized else 0

    def make_room(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._allocated(keys, values)

    def count(self, num_entered: Tensor | None, num_tokens: int) -> None:
        self.advance(num_tokens)
        if num_entered is not None:
            self.counts_of(num_entered.shape[0], num_entered.device).add_(num_entered)

    def reset(self) -> None:
        super().reset()
        if self.counts is not None:
            self.counts.zero_()

    def _map(self, select: Callable[[Tensor], Tensor]) -> None:
        super()._map(select)
        if self.counts is not None:
            self.counts.copy_(select(self.counts))


class MetaAttentionStaticCache(MetaAttentionCache):
    """Cache of fixed size, for CUDA graphs: nothing of it moves, and its length is on the device.

    Its rows are those of the first call. A step of one token without a mask reads nothing on the
    host; :class:`~meta_attention.CapturedStep` captures one. Whoever replays a step of their own
    counts its tokens by :meth:`advance`. For inference only.

    Args:
        config: Configuration of the model it is for.
        max_cache_len: How many positions it has room for.
    """

    def __init__(self, config: MetaAttentionConfig, max_cache_len: int) -> None:
        if max_cache_len < 1:
            raise ConfigError(f"max_cache_len must be >= 1, got {max_cache_len}")
        self.capacity = max_cache_len
        super().__init__(config)
        self.length: Tensor | None = None  # [1] positions filled
        self.start: Tensor | None = None  # [B] first position that is not padding

    def _make_layer(
        self, experts: Mapping[str, Expert], has_conv: bool, may_skip: bool
    ) -> RoutedCacheLayer:
        make = StaticEnteredCacheLayer if may_skip else StaticRoutedCacheLayer
        return make(experts, has_conv, self.capacity)

    def _make_history(self, num_lengths: int) -> StaticTokenHistory:
        return StaticTokenHistory(num_lengths, self.capacity)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that a captured step writes, which the host does not see."""
        if self.padding is not None and (self.padding.ends or self.padding.has_gaps):
            raise CacheError(
                "a captured step knows of padding before a row's tokens only; pad prompts on the "
                "left, or call the model itself"
            )
        self._check_room(None, self.get_seq_length() + num_tokens)
        for layer in self.layers:
            layer.advance(num_tokens)

    def finish(self, T: int) -> None:
        assert self.length is not None
        self.length.add_(T)

    def _check_room(self, B: int | None, length: int) -> None:
        super()._check_room(B, length)
        if length > self.capacity:
            raise CacheError(
                f"the cache has room for max_cache_len = {self.capacity} positions, got {length} "
                "tokens; build a larger one, or reset it to start anew"
            )
        if B is not None and self.start is not None and self.start.shape[0] != B:
            raise ShapeError(
                f"a static cache keeps its number of rows, B = {self.start.shape[0]}, got {B}; "
                "build one for each batch size"
            )

    def _keep_padding(self, padding: Padding | None, B: int, device: torch.device) -> None:
        if self.start is None:
            self.length = torch.zeros(1, dtype=torch.long, device=device)
            self.start = torch.zeros(B, dtype=torch.long, device=device)
        # written only when it changes: a captured step must not write what was true of one prompt
        if padding is None and self.padding is not None:
            self.start.zero_()
        elif padding is not None and padding is not self.padding:
            self.start.copy_(padding.start)
        super()._keep_padding(padding, B, device)

    def _make_step(self, device: torch.device, is_token: Tensor | None) -> DecodeStep:
        assert self.length is not None
        return DecodeStep(self.length, self.length + 1, self.start, is_token)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.length is not None:
            self.length.add_(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        if self.length is not None and self.start is not None:
            self.length.zero_()
            self.start.zero_()

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise CacheError(FIXED_ROWS)

    def batch_select_indices(self, indices: Tensor) -> None:
        raise CacheError(FIXED_ROWS)


def _refuse_gradient(x: Tensor) -> None:
    if x.requires_grad:
        raise CacheError(
            "a static cache holds no gradients; run the model under torch.no_grad(), or use a "
            "MetaAttentionCache"
        )
