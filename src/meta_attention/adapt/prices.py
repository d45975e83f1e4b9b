"""What an adapted model of values spends: a price, which is set, or found for a cost.

A router with ``controller="value"`` knows what attention is worth to a token. What it may cost is
not learnt, so it can be another for every use of a model, without training.

Shapes: B batch, T sequence.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from meta_attention.adapt.router import Router, collect_routing, routers_of
from meta_attention.errors import ConfigError
from meta_attention.routing import check_cost, search_price


def set_price(model: nn.Module, price: float) -> None:
    """Let full attention cost so many nats in all adapted layers from now on.

    An adapter that is saved has the price, too.

    Args:
        model: Adapted with ``controller="value"``.
        price: What full attention must be worth to a token to be taken; cheaper experts cost their
            share of it. A lower one buys more attention.
    """
    if isinstance(price, bool) or not isinstance(price, (int, float)) or not math.isfinite(price):
        raise ConfigError(f"price must be a finite number, got {price!r}")
    price = float(price)
    routers = _value_routers(model)
    adaptation = routers[0].adaptation
    adaptation.settings = replace(adaptation.settings, price=price)
    adaptation.config.price = price
    for router in routers:
        router.controller.price.fill_(price)


@torch.no_grad()
def find_price(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    target_cost: float,
    *,
    tolerance: float = 0.005,
) -> float:
    """Set the price at which adapted layers cost a share of full attention's; that price.

    Args:
        model: Adapted with ``controller="value"``, its router trained.
        batches: Token ids ``[B, T]``; text that the model's users would give it.
        target_cost: Mean over tokens and adapted layers, by the costs of the experts.
        tolerance: Share of it by which the cost may be below, to end the search sooner.
    """
    check_cost(target_cost, *cost_range(model))
    before = routers_of(model)[0].adaptation.config.price
    num_tokens = sum(ids.numel() for ids in batches)
    if not num_tokens:
        raise ConfigError("batches must have tokens to find a price on, got none")

    def cost_at(price: float) -> float:
        set_price(model, price)
        total = 0.0
        for ids in batches:
            with collect_routing(model) as record:
                model.base_model(input_ids=ids, use_cache=False)
            total += record.routed_cost.item() * ids.numel()
        return total / num_tokens

    try:
        with _in_use(model):
            return search_price(cost_at, target_cost, tolerance=tolerance)
    except BaseException:
        set_price(model, before)
        raise


def cost_range(model: nn.Module) -> tuple[float, float]:
    """The least and the most that adapted layers can cost."""
    costs = torch.stack([router.controller.costs.cpu() for router in _value_routers(model)])
    return costs.min(dim=1).values.mean().item(), costs.max(dim=1).values.mean().item()


def _value_routers(model: nn.Module) -> list[Router]:
    routers = routers_of(model)
    controller = routers[0].adaptation.config.controller
    if controller != "value":
        raise ConfigError(
            f"a price is for a model adapted with controller='value', got {controller!r}: what "
            "others cost is learnt, so train one for another target_cost"
        )
    return routers


@contextmanager
def _in_use(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards the modes that modules had, which may not be the same for all."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
