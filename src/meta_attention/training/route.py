"""A trained checkpoint given routes: values are learnt, prices found, both measured on other text.

Shapes: B sequences, T their length.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from meta_attention.errors import ConfigError
from meta_attention.evaluation.flops import Flops, count_full, count_model
from meta_attention.evaluation.forcing import force_routes
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.models import MetaAttentionForCausalLM
from meta_attention.routing import check_cost
from meta_attention.training.by_head import experts_by_head
from meta_attention.training.corpus import Corpus
from meta_attention.training.data import hold_out
from meta_attention.training.packing import PackedDataset, pack, spread_blocks
from meta_attention.training.values import (
    cost_range,
    find_price,
    knows_values,
    learn_on,
    learn_values,
    with_values,
)

# costs that a price list has, beside the one asked for
LISTED_COSTS = (0.2, 0.3, 0.45, 0.6, 0.8)
LENGTH, WINDOW_SHARE, RECURRENCE = 512, 8, 3
# of the steps in which values are learnt, how many are beside routes of the cost asked for
OWN_SHARE = 1 / 3
# share by which a cost may be below what was asked for
TOLERANCE = 0.005
# tokens on which prices are found, and on which they are judged
PRICING_TOKENS, JUDGED_TOKENS = 1 << 15, 1 << 16
# while something is learnt, prices are found again and again, each on every eighth batch
PRICING_STRIDE = 8


@dataclass(frozen=True, slots=True)
class Offer:
    """What a model does at a price, on text that nothing was learnt from."""

    target_cost: float | None  # asked for; None: the model as it was
    price: float | None  # nats
    loss: float  # nats a token
    attention_flops: float
    """Executed, as a share of full attention in all layers."""
    routed_cost: float | None
    """Executed in the routed layers, by the costs of experts."""
    is_by_head: bool = False
    """Without routes by token: every head has one expert, whatever the token."""


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """How a checkpoint is given routes.

    Args:
        target_cost: Share of full attention's cost that routed layers shall have.
        window_size: What tokens may take in place of full attention; None: an eighth of the length,
            or as the checkpoint has it.
        length: Tokens of a text; None: 512, or what the model can take.
        steps: In which values are learnt, in the last third beside routes of the target's cost, or
            in all of them if the checkpoint has learnt some; 0: they are those of the checkpoint.
        batch_size: Texts of a step.
        lr: Learning rate at its highest.
        recurrence: As of ``MetaAttentionConfig``, 0: without; None: 3, or as the checkpoint has it.
        seed: Of new controllers, of the order of texts and of what is tried.
        train_steps: In which the model itself learns on with these routes; 0: it stays as it is.
            Values are learnt once more then, in half as many steps as before.
        train_lr: Learning rate of that at its highest.
    """

    target_cost: float = 0.35
    window_size: int | None = None
    length: int | None = None
    steps: int = 600
    batch_size: int = 4
    lr: float = 3e-3
    recurrence: int | None = None
    seed: int = 0
    train_steps: int = 0
    train_lr: float = 3e-4

    @property
    def num_steps(self) -> int:
        """All of them: of values, of the model, and of values once more."""
        again = max(1, self.steps // 2) if self.train_steps else 0
        return self.steps + self.train_steps + again


def route_checkpoint(
    model: MetaAttentionForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    corpus: Corpus,
    settings: RouteSettings,
    *,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> tuple[MetaAttentionForCausalLM, list[Offer]]:
    """The model with routes, at the price of what was asked for; and its price list.

    The first offer is the model as it was, the second what was asked for. Then what heads do at
    about that cost that each keep one expert, unless the model has learnt on with routes by token.

    Args:
        model: Static, some of its layers full; or one that knows values.
        tokenizer: Its own.
        corpus: Text like that of its users; a part of it is held out to judge.
        settings: What to do.
        on_step: As of :func:`learn_values`, counted through to ``settings.num_steps``.
    """
    longest = model.config.max_position_embeddings
    length = settings.length or min(LENGTH, longest)
    if length > longest:
        raise ConfigError(
            f"length must be at most {longest}, the positions of the model, got {length}"
        )
    learnt, judged = (pack(part, tokenizer, length) for part in hold_out(corpus))
    routed = model
    has_values = model.config.controller == "value"
    # a checkpoint may have been saved before its values were learnt
    knows = has_values and knows_values(model)
    if not settings.steps and not knows:
        raise ConfigError("steps must be above 0 where a checkpoint has no values yet")
    if has_values:
        for name in ("window_size", "recurrence"):
            if getattr(settings, name) is not None:
                raise ConfigError(f"{name} must not be given where a checkpoint has values already")
    else:
        routed = with_values(
            model,
            window_size=settings.window_size or max(1, length // WINDOW_SHARE),
            length=length,
            recurrence=RECURRENCE if settings.recurrence is None else settings.recurrence or None,
            seed=settings.seed,
        )
    if settings.batch_size < 1 or settings.train_steps < 0:
        raise ConfigError(
            "batch_size must be >= 1 and train_steps >= 0, got "
            f"{settings.batch_size} and {settings.train_steps}"
        )
    if settings.train_steps and not settings.steps:
        raise ConfigError("train_steps needs steps above 0: what a model has become must be learnt")
    if not 0.0 < settings.train_lr < math.inf:
        raise ConfigError(f"train_lr must be above 0 and finite, got {settings.train_lr}")
    check_cost(settings.target_cost, *cost_range(routed))
    before = judge(model, judged, None, model.config.price if has_values else None)
    device = model.device
    num_blocks = max(1, PRICING_TOKENS // length)
    texts = list(spread_blocks(learnt, num_blocks, settings.batch_size, device))
    if settings.steps:
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            batches = _batches(learnt, settings.batch_size, device)
            few = texts[::PRICING_STRIDE]
            _learn(routed, batches, few, settings, on_step, knows=knows)
    offers = []
    # what was asked for comes last, so that its price stays
    others = [cost for cost in LISTED_COSTS if cost != settings.target_cost]
    for cost in (*_possible(routed, others), settings.target_cost):
        offers.append(
            judge(routed, judged, cost, find_price(routed, texts, cost, tolerance=TOLERANCE))
        )
    asked_for = offers.pop()
    by_head: list[Offer] = []
    # what passes a block by is known to the model alone, and weights that learnt on know of routes
    if not settings.train_steps and routed.config.depth_capacity is None:
        for choice in experts_by_head(routed, texts, settings.target_cost):
            with force_routes(routed, choice):
                found = judge(routed, judged, settings.target_cost, None)
            by_head.append(replace(found, is_by_head=True))
    return routed, [before, asked_for, *by_head, *offers]


def _learn(
    model: MetaAttentionForCausalLM,
    batches: Iterator[Tensor],
    texts: Sequence[Tensor],
    settings: RouteSettings,
    on_step: Callable[[int, dict[str, float]], None] | None,
    *,
    knows: bool,
) -> None:
    """Values; and where the model learns on with them, values of what it has become.

    Args:
        model: With routes.
        batches: As many as it takes.
        texts: On which prices are found.
        settings: What to do.
        on_step: As of :func:`route_checkpoint`.
        knows: Something is known of values already.
    """
    done = 0

    def count(step: int, figures: dict[str, float]) -> None:
        if on_step is not None:
            on_step(done + step, figures)

    def learn(num_steps: int, target_cost: float | None = None) -> None:
        nonlocal done
        learn_values(
            model,
            batches,
            num_steps=num_steps,
            lr=settings.lr,
            texts=texts,
            target_cost=target_cost,
            on_step=count,
        )
        done += num_steps

    if knows:
        learn(settings.steps, settings.target_cost)
    else:
        learn_beside(settings.steps, settings.target_cost, learn)
    if not settings.train_steps:
        return
    learn_on(
        model,
        batches,
        texts,
        settings.target_cost,
        num_steps=settings.train_steps,
        lr=settings.train_lr,
        on_step=count,
    )
    done += settings.train_steps
    learn(settings.num_steps - done, settings.target_cost)


def learn_beside(
    num_steps: int, target_cost: float, learn: Callable[[int, float | None], None]
) -> None:
    """Values of which nothing is known: beside all that could be bought, then beside what is.

    Args:
        num_steps: In all.
        target_cost: Of what is bought then.
        learn: Takes steps beside routes of a cost, or, with None, beside the dearest experts.
    """
    own = round(OWN_SHARE * num_steps)
    learn(num_steps - own, None)
    if own:
        learn(own, target_cost)


@torch.no_grad()
def judge(
    model: MetaAttentionForCausalLM,
    text: PackedDataset,
    target_cost: float | None,
    price: float | None,
) -> Offer:
    """What a model does on a text, as it is."""
    config, length = model.config, text.length
    nats = routed = 0.0
    executed, num_sequences = Flops(), 0
    num_blocks = max(1, JUDGED_TOKENS // length)
    has_choice = any(len(config.experts_of(i)) > 1 for i in range(config.num_hidden_layers))
    with evaluating(model):
        for ids in spread_blocks(text, num_blocks, 4, model.device):
            out = model(ids, use_cache=False, output_routing=True, output_routed_cost=has_choice)
            logits = out.logits[:, :-1].flatten(0, 1).float()
            nats += F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum").item()
            executed += count_model(config, out.routing_weights)
            num_sequences += len(ids)
            routed += out.routed_cost.item() * len(ids) if has_choice else 0.0
    share = executed.per(num_sequences).attention / count_full(config, length).attention
    return Offer(
        target_cost,
        price,
        nats / (num_sequences * (length - 1)),
        share,
        routed / num_sequences if has_choice else None,
    )


def record_of(
    settings: RouteSettings, model: MetaAttentionForCausalLM, offers: Sequence[Offer]
) -> dict[str, Any]:
    """As JSON has it: what was asked for, what the model is, and what it does at each price."""
    config = model.config
    layers = [list(config.experts_of(index)) for index in range(config.num_hidden_layers)]
    routed = {"layer_experts": layers, "recurrence": config.recurrence, "price": config.price}
    return {
        "settings": asdict(settings),
        "model": routed | {"cost_length": config.cost_length},
        "offers": [asdict(offer) for offer in offers],
    }


def _possible(model: MetaAttentionForCausalLM, costs: Sequence[float]) -> list[float]:
    lowest, highest = cost_range(model)
    return [cost for cost in costs if lowest < cost <= highest]


def _batches(text: PackedDataset, size: int, device: torch.device) -> Iterator[Tensor]:
    """Blocks [B, T] in any order, over and over."""
    while True:
        order = torch.randperm(len(text))
        order = order.repeat(-(-size // len(order)))  # where there are fewer than a batch takes
        for chosen in order.split(size):
            yield torch.stack([text[int(i)]["input_ids"] for i in chosen]).to(device)
