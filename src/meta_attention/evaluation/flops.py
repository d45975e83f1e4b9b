"""Floating-point operations of a forward, counted for the routes that were executed.

A multiplication with its addition counts as two, as everywhere. Counted are the matrix products:

    attention      scores and values of the keys that each listed row sees, and its gate if it has
                   one; a linear state's update by every token, and its reads by listed rows;
                   the step size of a state-space model, of every token
    projections    query, key, value and output, of every token
    controller     its MLP, of every token; the scores of a block that tokens may pass by
    feed-forward   its three matrices, of every token
    residuals      Attention Residuals: logits and sum of the sources each sublayer reads, of every
                   token
    head           hidden states to logits

Norms, softmax, rotary positions, short convolutions, activations, decay and skip of a state-space
model, the merge and the embedding are left out. The first line counts to the key: what an
implementation computes and masks away within a block is left out, and so is padding. The others run
on padding too, and count it. None of it is time.

In a block that tokens may pass by (Mixture of Depths), "every token" is every one that entered, and
these are all that attention sees there; only their scores are of all. A batch is packed to its
longest row: what the others are filled up with counts as little as what is masked away.

Shapes: B batch, T sequence, S = past + T, G route groups, E experts.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller.features import NUM_EXTRA_FEATURES
from meta_attention.depth import count_reads
from meta_attention.errors import ConfigError, ShapeError
from meta_attention.experts import (
    LINEAR_STATES,
    Expert,
    FullAttention,
    GatedFullAttention,
    LinearStateExpert,
    LocalAttention,
    RecurrentExpert,
    SoftmaxExpert,
    build_experts,
)
from meta_attention.ops.heads import check_mask
from meta_attention.ops.route_plan import QueryList, RoutePlan, plan_routes

LENGTHS = tuple(1024 * 2**n for n in range(8))  # 1k to 128k tokens

# softmax over what is in reach; a row of another expert counts as the mean over all positions
_COUNTED_BY_POSITION = (FullAttention, GatedFullAttention, LocalAttention)


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations by what they are for."""

    attention: float = 0.0
    projections: float = 0.0
    controller: float = 0.0
    feed_forward: float = 0.0
    head: float = 0.0
    residuals: float = 0.0

    @property
    def layer(self) -> float:
        """Attention with its projections and the controller."""
        return self.attention + self.projections + self.controller

    @property
    def model(self) -> float:
        """Everything."""
        return self.layer + self.feed_forward + self.head + self.residuals

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def per(self, count: int) -> "Flops":
        """Divided by a count, of tokens say."""
        return Flops(*(getattr(self, f.name) / count for f in fields(self)))


@dataclass(frozen=True, slots=True)
class CostRow:
    """What one sequence costs, and what it would in a plain model of full attention."""

    length: int
    routed: Flops
    full: Flops

    def to_dict(self) -> dict[str, float | dict[str, float]]:
        """Attention alone, whole attention layers, and the whole model."""
        costs = {
            name: {
                "gflop_per_token": getattr(self.routed, name) / self.length / 1e9,
                "tflop_per_sequence": getattr(self.routed, name) / 1e12,
                "relative_to_full": getattr(self.routed, name) / getattr(self.full, name),
            }
            for name in ("attention", "layer", "model")
        }
        return {"length": self.length, **costs}


def count_layer(
    config: MetaAttentionConfig,
    executed: RoutePlan | Tensor,
    *,
    layer_idx: int = 0,
    mask: Tensor | None = None,
    past: int = 0,
) -> Flops:
    """Operations of one layer's forward, summed over the batch.

    Args:
        config: Model configuration.
        executed: The query lists that were run, or routing weights ``[B, T, E]`` or
            ``[B, T, G, E]``, of which every one above zero is a row that was run. While training
            with ``route_gradient="all"`` all experts run whatever the weights say.
        layer_idx: Index of the layer in its model.
        mask: ``[B, S]``, 0 for padding: boolean, or the documents packed into a row, in rising
            order.
        past: Cached tokens before these.
    """
    plan = plan_of(executed, mask, past)
    B, _, E, T = plan.positions.shape
    check_mask(mask, B, past + T)
    if config.may_skip(layer_idx):
        if past > 0:
            raise ConfigError(
                f"layer {layer_idx} has the tokens that entered it only, and of the {past} cached "
                "ones it is not known which did; count a whole text at once"
            )
        return _count_entered(config, plan, layer_idx, mask)
    marks = mask
    if marks is None:
        marks = torch.ones(B, past + T, dtype=torch.bool, device=plan.positions.device)
    experts = _experts_of(config, layer_idx)
    if len(experts) != E:
        raise ShapeError(
            f"layer {layer_idx} must have lists for its {len(experts)} experts, got {E}"
        )
    return Flops(
        count_attention(experts, plan, marks),
        B * T * projection_flops(config, layer_idx),
        B * T * controller_flops(config, layer_idx),
    )


def count_attention(experts: Iterable[Expert], plan: RoutePlan, marks: Tensor) -> float:
    """Operations of the experts of a layer on their lists, under marks [B, S] as of a mask."""
    return sum(
        _attention_flops(expert, plan.list_of(index), marks) for index, expert in enumerate(experts)
    )


def count_model(
    config: MetaAttentionConfig,
    executed: Sequence[RoutePlan | Tensor],
    *,
    mask: Tensor | None = None,
    past: int = 0,
    logits_to_keep: int = 0,
) -> Flops:
    """Operations of a model's forward, summed over the batch.

    Args:
        config: Model configuration.
        executed: For each layer what :func:`count_layer` takes, such as the ``routing_weights`` of
            a model's output.
        mask: ``[B, S]``, 0 for padding, or documents; as there.
        past: Cached tokens before these.
        logits_to_keep: As the model was called; 0: logits of all tokens.
    """
    if len(executed) != config.num_hidden_layers:
        raise ShapeError(
            f"executed must have one entry for each of {config.num_hidden_layers} layers, "
            f"got {len(executed)}"
        )
    plans = [plan_of(lists, mask, past) for lists in executed]
    total = Flops()
    for layer_idx, plan in enumerate(plans):
        total += count_layer(config, plan, layer_idx=layer_idx, mask=mask, past=past)
        total += Flops(
            feed_forward=_tokens_of(config, plan, layer_idx) * _feed_forward_flops(config)
        )
    B, _, _, T = plans[0].positions.shape
    kept = min(logits_to_keep or T, T)
    return total + Flops(
        head=B * kept * _head_flops(config), residuals=B * T * _residual_flops(config)
    )


def count_full(config: MetaAttentionConfig, length: int) -> Flops:
    """Operations on one sequence of a plain model of its size: full attention in every block for
    every token, and a sum of residuals.

    Shares of it compare models whatever they are made of: what they add is never in the divisor.
    """
    full = _with_full_attention(config)
    return count_model(full, [torch.ones(1, length, 1)] * config.num_hidden_layers)


def _with_full_attention(config: MetaAttentionConfig) -> MetaAttentionConfig:
    """The same model with full attention alone, in every block and for every token, and a plain
    sum of residuals."""
    full = copy.copy(config)
    full.experts, full.layer_experts = ("full",), None
    full.depth_capacity = full.depth_layers = None
    full.residual = "sum"
    return full


def _count_entered(
    config: MetaAttentionConfig, plan: RoutePlan, layer_idx: int, mask: Tensor | None
) -> Flops:
    """Operations of a block's layer on the tokens that entered it: those of some list."""
    B, G, E, T = plan.positions.shape
    lists = torch.stack([plan.list_of(e).is_listed(T) for e in range(E)], dim=-1)  # [B, T, G, E]
    enters = lists.flatten(2).any(dim=-1)  # [B, T]
    order = (~enters).to(torch.uint8).argsort(dim=1, stable=True)[:, : _longest(enters)]
    packed = lists.gather(1, order[:, :, None, None].expand(-1, -1, G, E))
    marks = enters if mask is None else mask.masked_fill(~enters, 0)
    marks = marks.gather(1, order)
    attention = 0.0
    if packed.shape[1] > 0:
        own = plan_routes(packed.float(), mask=marks, is_exclusive=plan.is_exclusive)
        attention = count_attention(_experts_of(config, layer_idx), own, marks)
    number = enters.sum().item()
    return Flops(
        attention,
        number * projection_flops(config, layer_idx),
        number * controller_flops(config, layer_idx) + B * T * depth_router_flops(config),
    )


def _longest(enters: Tensor) -> int:
    return int(enters.sum(dim=1).max().item())


def _tokens_of(config: MetaAttentionConfig, plan: RoutePlan, layer_idx: int) -> float:
    """Tokens that go through a block, padding included unless it is one they may pass by."""
    B, _, E, T = plan.positions.shape
    if not config.may_skip(layer_idx):
        return B * T
    lists = torch.stack([plan.list_of(e).is_listed(T) for e in range(E)], dim=-1)
    return lists.flatten(2).any(dim=-1).sum().item()


def count_mix(config: MetaAttentionConfig, mix: Mapping[str, float], length: int) -> Flops:
    """Operations of a model on one sequence, its tokens shared out among experts as in ``mix``.

    Args:
        config: Model configuration; its layers must have the experts of the mix.
        mix: Share of the tokens each expert takes in every layer, spread evenly over positions; of
            those that enter, where tokens may pass by a block: these are ``depth_capacity`` of all.
        length: Tokens of the sequence.
    """
    check_mix(mix)
    # of a token, mean over the sequence
    attention = projections = controller = feed_forward = 0.0
    for layer_idx in range(config.num_hidden_layers):
        names = config.experts_of(layer_idx)
        missing = [name for name in mix if name not in names]
        if missing:
            raise ConfigError(
                f"a mix must share tokens among the experts of layer {layer_idx}, "
                f"{', '.join(names)}, got {missing[0]!r}"
            )
        entered, share = length, 1.0
        if config.may_skip(layer_idx):
            assert config.depth_capacity is not None
            entered = max(1, round(config.depth_capacity * length))
            share = entered / length
            controller += depth_router_flops(config)
        for name, expert in zip(names, _experts_of(config, layer_idx), strict=True):
            update = _update_flops(expert, entered)
            attention += share * (update + mix.get(name, 0.0) * (expert.flops(entered) - update))
        projections += share * projection_flops(config, layer_idx)
        controller += share * controller_flops(config, layer_idx)
        feed_forward += share * _feed_forward_flops(config)
    return Flops(
        length * attention,
        length * projections,
        length * controller,
        length * feed_forward,
        length * _head_flops(config),
        length * _residual_flops(config),
    )


def check_mix(mix: Mapping[str, float]) -> None:
    """Raise unless the shares are not negative and sum to 1."""
    for name, share in mix.items():
        if not 0.0 <= share < math.inf:
            raise ConfigError(f"the share of {name!r} in a mix must be >= 0, got {share}")
    total = math.fsum(mix.values())
    if abs(total - 1.0) > 1e-6:
        raise ConfigError(f"the shares of a mix must sum to 1, got {total:g}")


def cost_table(
    config: MetaAttentionConfig, mix: Mapping[str, float], lengths: Sequence[int] = LENGTHS
) -> list[CostRow]:
    """What a mix costs at several lengths, next to the same model with full attention only.

    That model has no controller, as its layers have nothing to choose, and no Attention Residuals.
    """
    full = _with_full_attention(config)
    return [
        CostRow(length, count_mix(config, mix, length), count_mix(full, {"full": 1.0}, length))
        for length in lengths
    ]


def plan_of(executed: RoutePlan | Tensor, mask: Tensor | None, past: int) -> RoutePlan:
    """Query lists, where weights are given those of every weight above zero."""
    if isinstance(executed, RoutePlan):
        return executed
    new_mask = None if mask is None else mask[:, past:]
    return plan_routes(executed, mask=new_mask, is_exclusive=False)


def _experts_of(config: MetaAttentionConfig, layer_idx: int) -> list[Expert]:
    with torch.device("meta"):
        return list(build_experts(config, layer_idx).values())


def _attention_flops(expert: Expert, listed: QueryList, marks: Tensor) -> float:
    """Operations of one expert on its list, under marks [B, S] as a mask has them."""
    B, G, T = listed.positions.shape
    S = marks.shape[1]
    # a group's list is for its share of the heads
    rows = listed.count.sum().item() / G
    if type(expert) not in _COUNTED_BY_POSITION:
        update = _update_flops(expert, S)
        tokens = (marks[:, S - T :] != 0).sum().item()
        return tokens * update + rows * (expert.flops(S) - update)

    is_listed = torch.arange(T, device=listed.count.device) < listed.count.unsqueeze(-1)
    # beyond its count a list may hold anything
    positions = listed.positions.long().masked_fill(~is_listed, 0)
    assert isinstance(expert, SoftmaxExpert)
    seen = keys_in_sight(marks, expert.window, expert.num_sinks, causal=expert.causal)[:, S - T :]
    keys = seen.unsqueeze(1).expand(B, G, T).gather(2, positions).masked_fill(~is_listed, 0)
    flops = expert.attention_flops(keys.sum().item() / G)
    if isinstance(expert, GatedFullAttention):
        flops += rows * 2.0 * expert.gate.weight.numel()
    return flops


def keys_in_sight(marks: Tensor, window: int | None, num_sinks: int, *, causal: bool) -> Tensor:
    """Keys [B, S] that each token sees, itself and sinks included; no window: at any distance."""
    B, S = marks.shape
    at = torch.arange(S, device=marks.device).expand(B, -1)
    first, last = torch.zeros_like(at), torch.full_like(at, S - 1)
    if marks.dtype != torch.bool:
        # a document goes on through padding until the next one begins
        documents = marks.cummax(dim=1).values
        differs = documents[:, 1:] != documents[:, :-1]
        first = torch.where(F.pad(differs, (1, 0)), at, 0).cummax(dim=1).values
        last = torch.where(F.pad(differs, (0, 1)), at, S - 1).flip(1).cummin(dim=1).values.flip(1)
    tokens_before = F.pad((marks != 0).cumsum(dim=1), (1, 0))  # [B, S + 1]
    before_document, before_end = (tokens_before.gather(1, x) for x in (first, last + 1))
    if window is not None:
        first, last = first.maximum(at - window), last.minimum(at + window)
    if causal:
        last = at
    before_first, before_last = (tokens_before.gather(1, x) for x in (first, last + 1))
    seen = before_last - before_first
    # sinks before the window, and after it: those of the document without those up to its end
    seen = seen + (before_first - before_document).clamp(max=num_sinks)
    if not causal:
        sinks = (before_end - before_document).clamp(max=num_sinks)
        seen = seen + (sinks - (before_last - before_document)).clamp(min=0)
    return seen


def _update_flops(expert: Expert, length: int) -> float:
    """Operations that every token costs, whatever its route."""
    if isinstance(expert, LinearStateExpert) and type(expert) in LINEAR_STATES:
        return expert.update_flops
    # how another state's operations divide into updates and reads is not known
    return expert.flops(length) if isinstance(expert, RecurrentExpert) else 0.0


def projection_flops(config: MetaAttentionConfig, layer_idx: int) -> float:
    """Operations of a token's projections in a layer."""
    # query and output, key and value
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    sets = 1 if config.shared_projections else len(config.experts_of(layer_idx))
    return 2.0 * config.hidden_size * heads * config.head_dim * sets


def controller_flops(config: MetaAttentionConfig, layer_idx: int) -> float:
    """Operations of a token in the controller of a layer."""
    num_experts = len(config.experts_of(layer_idx))
    if num_experts == 1:
        return 0.0
    inputs = config.hidden_size + NUM_EXTRA_FEATURES
    groups = config.num_key_value_heads if config.route_granularity == "kv_head" else 1
    seen = (config.recurrence or 0) * config.hidden_size  # added to what is seen
    return seen + 2.0 * config.controller_hidden_size * (inputs + groups * num_experts)


def depth_router_flops(config: MetaAttentionConfig) -> float:
    """Operations of a token's scores before a block that it may pass by."""
    # the gate's and, where it is another, that which decides
    is_predicted = config.depth_routing == "top_k" and config.depth_capacity != 1.0
    return 2.0 * config.hidden_size * (2 if is_predicted else 1)


def _feed_forward_flops(config: MetaAttentionConfig) -> float:
    """Of a token in one layer."""
    return 6.0 * config.hidden_size * config.intermediate_size


def _head_flops(config: MetaAttentionConfig) -> float:
    return 2.0 * config.hidden_size * config.vocab_size


def _residual_flops(config: MetaAttentionConfig) -> float:
    """Of all sublayers; a plain sum has no products."""
    return 0.0 if config.residual == "sum" else 4.0 * config.hidden_size * count_reads(config)
