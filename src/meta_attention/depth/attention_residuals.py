"""Attention Residuals (arXiv:2603.15031): sublayers choose what they read of those before them.

A sublayer is the attention or the feed-forward half of a block. In place of the sum of the
embedding and all earlier outputs it reads a softmax over them, token by token, by a query of its
own that is learned:

    input[l] = count * sum_i softmax_i(query[l] . source[i] / rms(source[i])) source[i]

The sources of the full variant are the embedding and every output. In the block variant outputs
are summed in groups, and a sublayer reads the embedding, the sums of finished groups, and what its
own group has summed up so far. With a group for every output the two are the same, so there is one
implementation. Queries start at zero, which makes the softmax a mean.

``count`` makes that mean the plain sum. The paper leaves it out, since every input goes through an
RMS norm, which takes any factor out again, but for its eps: that is not small next to the mean of
many small sources.

Sources are of a token: nothing of them outlives a forward, and a cache does not know of them.

A token that passes a block by (Mixture of Depths) adds nothing to the sum of a group. An output of
its own, as in the full variant, is then a source of zeros, and so is a group that it passed by
altogether. Its logit is 0, and it has no direction: the weights of the other sources become
smaller by one factor, which the norms take out, but for their eps.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from meta_attention.config import Impl, MetaAttentionConfig
from meta_attention.depth.mixture_of_depths import DepthOutput, MixtureOfDepthsBlock
from meta_attention.depth.packing import Entered
from meta_attention.errors import ConfigError
from meta_attention.layers import LayerOutput, MetaAttentionCache, MetaTransformerBlock
from meta_attention.layers.attention import Rotation
from meta_attention.layers.decode_step import DecodeStep
from meta_attention.ops.depth_attention import DepthRow, open_sources
from meta_attention.precision import KeepFloat32

Half = Literal["attention", "feed_forward"]


class HalvedBlock(MetaTransformerBlock):
    """A block whose halves are called one at a time, each without its residual.

    Both are calls of the module, so whatever wraps those works on each: gradient checkpointing
    keeps the input of each half, FSDP gathers the weights for each.
    """

    def forward(  # type: ignore[override]  # one half has no routing to tell of
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: MetaAttentionCache | None = None,
        rotation: Rotation | None = None,
        step: DecodeStep | None = None,
        recurrence: Tensor | None = None,
        half: Half = "attention",
    ) -> LayerOutput | Tensor:
        """The output of one half ``[B, T, D]``, that of attention with its routing."""
        if half == "feed_forward":
            return self.feed_forward(x)
        arguments = (attention_mask, position_ids, document_ids, past_key_values, rotation, step)
        return self.attend(x, *arguments, recurrence)


class HalvedMixtureOfDepthsBlock(MixtureOfDepthsBlock):
    """A block that tokens may pass by, its halves called one at a time: Mixture of Depths as well.

    Who enters is chosen by what the attention half reads, and holds for both halves. What these put
    out is gated, and zero for tokens that pass by.
    """

    def forward(  # type: ignore[override]  # one half has no routing to tell of
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        past_key_values: MetaAttentionCache | None = None,
        rotation: Rotation | None = None,
        step: DecodeStep | None = None,
        recurrence: Tensor | None = None,
        half: Half = "attention",
        entered: Entered | None = None,
    ) -> DepthOutput | Tensor:
        """The output of one half ``[B, T, D]``, that of attention with its routing.

        Args:
            entered: For the feed-forward half, what came with the output of the other.
        """
        if half == "feed_forward":
            assert entered is not None
            rows = entered.take(x)
            return entered.spread(None if rows is None else self.feed_forward(rows), x)
        entered = self.choose(x, attention_mask, document_ids, past_key_values, step)
        arguments = (attention_mask, position_ids, document_ids, past_key_values, rotation, step)
        attended = self.attend_entered(entered.take(x), entered, *arguments, recurrence)
        output = entered.spread(None if attended is None else attended.output, x)
        return self.describe(output, attended, entered)


class AttentionResiduals(KeepFloat32):
    """The queries of all sublayers, float32 in any model.

    Args:
        config: Model configuration.
    """

    def __init__(self, config: MetaAttentionConfig) -> None:
        super().__init__()
        num_sublayers = 2 * config.num_hidden_layers
        self.ends = group_ends(config)
        self.eps = config.rms_norm_eps
        self.impl: Impl = config.impl
        # one for each sublayer and one for the final norm; the first has one source to choose from
        self.queries = nn.Parameter(torch.empty(num_sublayers + 1, config.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the plain sum."""
        nn.init.zeros_(self.queries)

    def start(self, embedding: Tensor) -> "ResidualStream":
        """Begin a forward with the embedding ``[B, T, D]``."""
        return ResidualStream(self, embedding)


class ResidualStream:
    """What one forward has written so far, and the group that is being summed.

    Args:
        residuals: The queries.
        embedding: The first source ``[B, T, D]``.
    """

    def __init__(self, residuals: AttentionResiduals, embedding: Tensor) -> None:
        # one gradient for all of them, not one as large for each
        self.queries = residuals.queries.unbind()
        # after the last group there is nothing but the final norm to read
        self.ends = [*residuals.ends, residuals.ends[-1] + 1]
        self.embedding = embedding
        self.sources = open_sources(
            embedding, len(self.ends), eps=residuals.eps, impl=residuals.impl
        )
        # the group so far: what is summed, and the output after it, [B, T, D] each
        self.parts: list[Tensor] = []
        self.rows: list[DepthRow] = []  # of the next sublayers
        self.sublayer = 0
        self.group = 0

    def read(self) -> Tensor:
        """Input ``[B, T, D]`` of the next sublayer, and after the last of the final norm."""
        at = self.sublayer
        if at == 0:
            return self.embedding
        if not self.rows:
            # finished groups do not change within a group: for all of its sublayers at once
            end = min(self.ends[self.group], at + self.sources.max_rows)
            self.rows = self.sources.attend(torch.stack(self.queries[at:end]))
        mixed, partial = self.sources.join(self.rows.pop(0), *self.parts)
        self.parts = [] if partial is None else [partial]
        return mixed

    def write(self, output: Tensor) -> None:
        """Take the output ``[B, T, D]`` of the sublayer that was read for."""
        self.parts.append(output)
        self.sublayer += 1
        if self.sublayer == self.ends[self.group]:
            self.sources.add(*self.parts)
            self.parts = []
            self.group += 1

    def through(self, block: nn.Module, x: Tensor, *arguments: object) -> LayerOutput:
        """Both halves of a block, the first of which reads ``x``; then read for the next one.

        Args:
            block: A :class:`HalvedBlock` or a :class:`HalvedMixtureOfDepthsBlock`.
            x: What :meth:`read` gave for it.
            arguments: The others of its ``forward``.

        Returns:
            The routing of the block, with the input of the next one as ``output``.
        """
        attended = block(x, *arguments)
        self.write(attended.output)
        # handed over, not kept by the block, which may be called again before its backward
        choice = {"entered": attended.entered} if isinstance(attended, DepthOutput) else {}
        self.write(block(self.read(), half="feed_forward", **choice))
        return replace(attended, output=self.read())


def check_one_device(modules: Iterable[nn.Module]) -> None:
    """Raise where Accelerate has spread modules over devices; it moves what one hands to the next.

    What a sublayer reads was written by all before it, which are not moved.
    """
    hooks = [getattr(module, "_hf_hook", None) for module in modules]
    given = [getattr(hook, "execution_device", None) for hook in hooks if hook is not None]
    devices = sorted({str(torch.device(device)) for device in given if device is not None})
    if len(devices) > 1:
        raise ConfigError(
            f"a model with Attention Residuals must be on one device, got {' and '.join(devices)}: "
            'its blocks read those before them; load it with a device_map such as "cuda:0"'
        )


def count_reads(config: MetaAttentionConfig) -> int:
    """Sources that all sublayers of a token read together, and the final norm; nothing at first."""
    ends, reads = group_ends(config), 0
    for sublayer in range(1, ends[-1] + 1):
        finished = sum(end <= sublayer for end in ends)
        reads += 1 + finished + (sublayer not in ends)
    return reads


def group_ends(config: MetaAttentionConfig) -> list[int]:
    """The sublayer after each group, of which the full variant has one for each sublayer."""
    num_sublayers = 2 * config.num_hidden_layers
    groups = num_sublayers if config.residual == "attention" else config.residual_blocks
    return [num_sublayers * (group + 1) // groups for group in range(groups)]
