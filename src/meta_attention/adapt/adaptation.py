"""What all routers of a model share: settings, the padding of a call, and what was routed.

Shapes: B batch, T new tokens, S tokens so far.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meta_attention.adapt.config import AdaptConfig
from meta_attention.adapt.families import Family
from meta_attention.config import MetaAttentionConfig
from meta_attention.errors import CacheError, ConfigError
from meta_attention.layers import LayerOutput
from meta_attention.layers.decode_step import DecodeStep, Padding
from meta_attention.layers.projections import positions_of
from meta_attention.objective import mean_over_tokens

Way = str | tuple[str, ...]
"""A kind of routing, the name of an expert for all tokens, or such names by key-value head."""
Routing = str | Mapping[int, Way]
"""For all layers, or by the index of a layer."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which of the positions hold tokens: the same for all layers of a call."""

    mask: Tensor | None  # [B, S] boolean; None without padding
    is_padding: Tensor | None  # [B, T]
    position_ids: Tensor  # [B, T], from each row's first token
    step: DecodeStep | None  # where one token follows a cache
    ends_in_padding: bool = False  # some row does, after tokens

    @staticmethod
    def of(mask: Tensor | None, B: int, T: int, S: int, device: torch.device) -> "Layout":
        """Read the first S positions of a mask. Waits for the device where some may be padding."""
        past = S - T
        padding = None
        if mask is not None and not is_same_in_all_rows(mask):
            padding = Padding.of(mask[:, :S].bool())
        if padding is not None and padding.has_gaps and past > 0:
            raise CacheError(AFTER_PADDING)
        known = None if padding is None else padding.is_token
        step = None
        if T == 1 and past > 0:
            position = torch.full((1,), past, device=device)
            start = None if padding is None else padding.start
            is_token = None if known is None else known[:, -1]
            step = DecodeStep(position, position + 1, start, is_token)
        return Layout(
            known,
            None if known is None else ~known[:, past:],
            positions_of(known, B, T, past, device),
            step,
            padding is not None and padding.ends,
        )

    @staticmethod
    def of_step(mask: Tensor, length: Tensor, ends_in_padding: bool) -> "Layout":
        """Of the newest tokens, where the device alone knows how far a cache is filled.

        Asks the device nothing where a step is captured or compiled, or rows have no padding.

        Args:
            mask: ``[B, S]`` of all positions there is room for, False where nothing is yet.
            length: How many are filled ``[]``, the newest included.
            ends_in_padding: What is known of those before.
        """
        B, S = mask.shape
        length = length.reshape(1)
        position = length - 1
        if is_same_in_all_rows(mask):
            step = DecodeStep(position, length, None, None)
            return Layout(None, None, position.expand(B, 1), step)
        is_token = mask.index_select(1, position)  # [B, 1]
        # the first of the largest; a row without tokens is padding now, too. Not seen as bytes: the
        # compiler of older PyTorch cannot do that to booleans
        start = mask.to(torch.uint8).argmax(dim=1)
        goes_on = ends_in_padding  # as far as is known
        if may_wait(mask):
            at = torch.arange(S, device=mask.device)
            hole = ~mask & (at >= start.unsqueeze(1)) & (at <= position)
            hole &= mask.any(dim=1, keepdim=True)
            found = torch.stack([(hole & is_token).any(), hole.any()])
            goes_on, ends_in_padding = found.tolist()
        if goes_on:
            raise CacheError(AFTER_PADDING)
        step = DecodeStep(position, length, start, is_token.squeeze(1))
        return Layout(None, ~is_token, position - start.unsqueeze(1), step, ends_in_padding)


AFTER_PADDING = (
    "a row must not go on after padding: windows count positions; pad prompts on the left"
)


def is_same_in_all_rows(mask: Tensor) -> bool:
    """Whether a mask is one row for all, which has no padding: see ``make_mask``."""
    return mask.stride(0) == 0


def may_wait(x: Tensor) -> bool:
    """Whether the host may ask what is in a tensor: not where its work is recorded."""
    if torch.compiler.is_compiling():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def read_length(length: int | Tensor) -> int:
    """How far a cache is filled. Waits for the device where only that knows.

    What is compiled breaks up here, and goes on.
    """
    if isinstance(length, Tensor) and not (torch.compiler.is_compiling() or may_wait(length)):
        raise CacheError(
            "how far a static cache is filled is read on the host by prompts that follow others, "
            "by recurrent experts and by experts of your own; these cannot be captured, so call "
            "the model as it is, with an empty cache or softmax experts"
        )
    return int(length)


@dataclass
class Record:
    """Routing of the last call, layer by layer, and what the objective makes of it."""

    layers: dict[int, LayerOutput] = field(default_factory=dict)

    @property
    def kl(self) -> Tensor:
        """Of posteriors to the prior [] in nats, mean over adapted layers and tokens."""
        return self._mean([out.kl for out in self._outputs()])

    @property
    def projected_cost(self) -> Tensor:
        """Weight times cost of the experts [], mean over adapted layers and tokens."""
        return self._mean([out.projected_cost for out in self._outputs()])

    @property
    def routed_cost(self) -> Tensor:
        """Cost of the experts most believed in [], mean over adapted layers and tokens."""
        return self._mean([out.evaluated_cost for out in self._outputs()])

    @property
    def routing_entropy(self) -> Tensor:
        """Of expected weights, as a share of ln E [], mean over adapted layers and tokens."""
        return self._mean([out.routing_entropy for out in self._outputs()])

    def _outputs(self) -> list[LayerOutput]:
        if not self.layers:
            raise ConfigError("nothing was routed while this was recorded; call the model first")
        return [self.layers[index] for index in sorted(self.layers)]

    def _mean(self, values: list[Tensor]) -> Tensor:
        is_padding = self._outputs()[0].is_padding
        # layers may lie on several devices
        stacked = torch.stack([value.to(values[0].device) for value in values])
        return mean_over_tokens(stacked.mean(dim=0), None if is_padding is None else ~is_padding)


@dataclass
class Adaptation:
    """What all routers of a model share."""

    family: Family
    settings: AdaptConfig
    config: MetaAttentionConfig
    layers: tuple[int, ...]  # those that are adapted
    routing: Routing = ""  # in force instead of the config's
    record: Record | None = None
    _layout: tuple[Tensor | None, tuple[object, ...], Layout] | None = field(
        default=None, repr=False
    )
    _filled: tuple[Tensor, int] | None = field(default=None, repr=False)

    def routing_of(self, layer_idx: int) -> Way:
        """How a layer is routed now."""
        if isinstance(self.routing, str):
            return self.routing or self.config.routing
        return self.routing.get(layer_idx, self.config.routing)

    def layout(
        self,
        mask: Tensor | None,
        B: int,
        T: int,
        S: int,
        device: torch.device,
        length: Tensor | None = None,
        ends_in_padding: bool = False,
    ) -> Layout:
        """Read a mask once for all layers of a call, which are given the same object.

        With a ``length`` it is of a step, as :meth:`Layout.of_step` takes it.
        """
        # compiled, it is all one call
        mode = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        key = (B, T, S, device, mode, length is None)
        known = self._layout  # once: another thread may take it away
        if known is not None and known[0] is mask and known[1] == key:
            return known[2]
        if length is not None and mask is not None:
            found = Layout.of_step(mask, length, ends_in_padding)
        else:
            found = Layout.of(mask, B, T, S, device)
        self._layout = (mask, key, found)
        return found

    def count_filled(self, mask: Tensor, length: Tensor) -> int:
        """How far a static cache is filled, read once for all layers of a call."""
        known = self._filled
        if known is not None and known[0] is mask:
            return known[1]
        filled = read_length(length)
        self._filled = (mask, filled)
        return filled

    def begin(self, layer_idx: int) -> None:
        """Forget, before the first layer, what a call has left that did not get to its end."""
        if layer_idx == self.layers[0]:
            self._layout = self._filled = None

    def finish(self, layer_idx: int) -> None:
        """Forget what was read for all layers, after the last of them."""
        if layer_idx == self.layers[-1]:
            self._layout = self._filled = None
