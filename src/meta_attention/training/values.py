"""Values after the fact: what experts are worth to a trained model, and the price for a cost.

The model stays as it is. Some routes of every text try any expert (``training_weights="explore"``),
and the gradient of the loss says by how much another would have been better: what controllers learn
to expect from the token. Nothing has to be pressed, and no capability can be lost. What the model
then spends is for a price to say, which can be found for any cost, and changed in use. With these
routes, which try nothing, the model may learn on.

Shapes: B sequences, T their length.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

from meta_attention.config import MetaAttentionConfig
from meta_attention.controller import ValueController
from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.layers import BayesianMetaAttentionLayer
from meta_attention.models import MetaAttentionForCausalLM
from meta_attention.routing import BEYOND, check_cost, search_price

WARMUP = 0.05  # of the steps
# share of the routes that try any expert: beside the dearest experts, and beside routes in use,
# where with many that do it would be another model than the one that is used
EXPLORED, EXPLORED_IN_USE = 0.5, 0.125
BETAS, MAX_NORM = (0.9, 0.999), 1.0
# of a model that learns on: its optimiser, the steps after which another price is found, and the
# share by which a cost may be below the one asked for
MODEL_BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
REPRICED_EVERY, NEARLY = 100, 0.01


def with_values(
    model: MetaAttentionForCausalLM,
    *,
    window_size: int,
    length: int,
    recurrence: int | None = 3,
    value_scale: float | None = 0.01,
    seed: int = 0,
) -> MetaAttentionForCausalLM:
    """The same model, its full layers given a choice: full attention or a window, by value.

    Until values are learnt it says what it said. Every key-value head of a token has a route.

    Args:
        model: Of static layers, of which some are full.
        window_size: What their tokens may take in place of full attention.
        length: Tokens of a text at which costs are counted.
        recurrence: As of ``MetaAttentionConfig``; without, little can be known of what is far back.
        value_scale: As of ``MetaAttentionConfig``; with None, small values are hardly told apart.
        seed: Of what the new controllers begin with.
    """
    config: MetaAttentionConfig = model.config
    layers = [config.experts_of(index) for index in range(config.num_hidden_layers)]
    if any(len(experts) > 1 for experts in layers) or ("full",) not in layers:
        raise ConfigError(
            "values are for a model whose layers are static, some of them full, got "
            f"{', '.join('+'.join(experts) for experts in dict.fromkeys(layers))}"
        )
    if not 0 < window_size < length:
        raise ConfigError(
            f"window_size must be from 1 to below the length of a text, {length}, got "
            f"{window_size}: full attention would cost no more than the window"
        )
    if not config.shared_projections:
        raise ConfigError(
            "values are for a model with shared_projections=True: experts with projections of "
            "their own have none yet for the window"
        )
    settings = config.to_dict() | {
        "layer_experts": [
            ["full", f"local:{window_size}"] if experts == ("full",) else list(experts)
            for experts in layers
        ],
        "expert_costs": "flops",
        "cost_length": length,
        "controller": "value",
        "price": 0.0,
        "recurrence": recurrence,
        "value_scale": value_scale,
        "start_expert": "full",
        "routing": "hard",
        "route_gradient": "all",
        "route_granularity": "kv_head",
        "training_weights": "mean",
        "kl_weight": 1.0,
        "cost_weight": 0.0,
        "uncertainty_threshold": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        routed = MetaAttentionForCausalLM(MetaAttentionConfig.from_dict(settings))
    routed.to(model.device).to(model.dtype)  # type: ignore[arg-type]
    found = routed.load_state_dict(model.state_dict(), strict=False)
    new = [name for name in found.missing_keys if not is_of_router(name)]
    assert not new, new
    assert not found.unexpected_keys, found.unexpected_keys
    routed.generation_config = copy.deepcopy(model.generation_config)
    return routed.train(model.training)


def is_of_router(name: str) -> bool:
    """Whether a parameter of this name is part of what chooses."""
    return ".controller." in name or ".recurrence." in name


def learn_values(
    model: MetaAttentionForCausalLM,
    batches: Iterable[Tensor],
    *,
    num_steps: int,
    lr: float = 3e-3,
    texts: Sequence[Tensor] = (),
    target_cost: float | None = None,
    explored_share: float | None = None,
    autocast: torch.dtype | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> None:
    """Teach controllers what experts are worth to a model that stays as it is.

    Some routes try any expert. What it is worth depends on what the others take. Until something
    is known, that is the dearest: at a price below zero everything is bought. With a target cost it
    is what they take in use, and few try something else: where heads do the same work, each is
    worth little beside all others, and much beside those that a price has left.

    Args:
        model: With ``controller="value"``; any of its routes may have been trained or not.
        batches: Token ids ``[B, T]``, one for each step.
        num_steps: How many of them to take.
        lr: Learning rate at its highest, after a short rise; it then falls to 0 as a cosine.
        texts: Token ids ``[B, T]`` on which a price is found for the target cost, at first and
            every ``REPRICED_EVERY`` steps.
        target_cost: Routes that try nothing are those of this cost, as of :func:`find_price`; for
            controllers that know something. None: the dearest experts. Afterwards the model has the
            last of these prices, which is not that of what was learnt since: find one.
        explored_share: How many routes try any expert; None: half of them beside the dearest
            experts, an eighth beside routes of a cost.
        autocast: Precision of the model's forward pass; None: that of its weights.
        on_step: Called after every step with its number and its figures: ``loss`` with the routes
            that were tried, and ``kl``, the normalisers of the scores.
    """
    parameters = router_parameters(model)
    _check_steps(num_steps, lr)
    _check_learnable(parameters, "routers")
    if target_cost is not None:
        check_cost(target_cost, *cost_range(model))
        if not any(ids.numel() for ids in texts):
            raise ConfigError("texts must have tokens to find a price on, where target_cost is set")
        if not knows_values(model):
            raise ConfigError(
                "target_cost is for controllers that know something, and these know nothing yet: "
                "let them learn beside the dearest experts first, without target_cost"
            )
    optimiser = torch.optim.AdamW(parameters, lr, betas=BETAS, weight_decay=0.0)
    done = 0
    if explored_share is not None and not 0.0 < explored_share <= 1.0:
        raise ConfigError(f"explored_share must be above 0 and at most 1, got {explored_share}")
    buys_all = target_cost is None
    with exploring(model, parameters, buys_all=buys_all, share=explored_share):
        for ids in islice(batches, num_steps):
            if target_cost is not None and done % REPRICED_EVERY == 0:
                _find_nearly(model, texts, target_cost, autocast)
            _set_rate(optimiser, lr, done, num_steps)
            figures = _step(model, ids, optimiser, parameters, autocast, of_model=False)
            done += 1
            if on_step is not None:
                on_step(done, figures)
        _check_done(done, num_steps)


def learn_on(
    model: MetaAttentionForCausalLM,
    batches: Iterable[Tensor],
    texts: Sequence[Tensor],
    target_cost: float,
    *,
    num_steps: int,
    lr: float = 3e-4,
    autocast: torch.dtype | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
) -> None:
    """Let the model itself learn on with its routes, whose cost is kept.

    Controllers stay as they are, so that they know what experts were worth to the model as it was:
    let them learn once more, then find a price. Cut off, weights and price are those of the last
    step.

    Args:
        model: With values that were learnt, its weights in float32.
        batches: Token ids ``[B, T]``, one for each step.
        texts: Token ids ``[B, T]`` on which a price is found at first and every
            ``REPRICED_EVERY`` steps.
        target_cost: As of :func:`find_price`.
        num_steps: How many batches to take.
        lr: Learning rate at its highest, after a short rise; it then falls to 0 as a cosine.
        autocast: Precision of the model's forward pass; None: that of its weights.
        on_step: Called after every step with its number and its figures: ``loss``, and ``kl``,
            which is 0.
    """
    _check_steps(num_steps, lr)
    routers = {id(p) for p in router_parameters(model)}
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    learning = {n: p for n, p in learning.items() if id(p) not in routers}
    parameters = list(learning.values())
    _check_learnable(parameters, "parameters beside the routers'")
    decayed = [p for name, p in learning.items() if p.dim() > 1 and not _is_free(name)]
    kept = {id(p) for p in decayed}
    optimiser = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if id(p) not in kept], "weight_decay": 0.0},
        ],
        lr,
        betas=MODEL_BETAS,
    )
    was_training, draw, done = model.training, model.config.training_weights, 0
    model.config.training_weights = "mean"
    try:
        for ids in islice(batches, num_steps):
            if done % REPRICED_EVERY == 0:
                _find_nearly(model, texts, target_cost, autocast)
            model.train()
            _set_rate(optimiser, lr, done, num_steps)
            figures = _step(model, ids, optimiser, parameters, autocast, of_model=True)
            done += 1
            if on_step is not None:
                on_step(done, figures)
    finally:
        model.train(was_training)
        model.config.training_weights = draw
        # nothing of routers has learnt
        model.zero_grad(set_to_none=True)
    _check_done(done, num_steps)


@torch.no_grad()
def find_price(
    model: MetaAttentionForCausalLM,
    batches: Sequence[Tensor],
    target_cost: float,
    *,
    tolerance: float = 0.0,
) -> float:
    """Set the price at which routed layers cost a share of full attention's; that price.

    Of what a dearer and a cheaper price give, the cheaper routes: the cost is the target's or less.

    Args:
        model: With values.
        batches: Token ids ``[B, T]``; text that the model's users would give it.
        target_cost: Mean over tokens and routed layers, by the costs of the experts.
        tolerance: Share of it by which the cost may be below, to end the search sooner.
    """
    check_cost(target_cost, *cost_range(model))
    before = model.config.price
    num_tokens = sum(ids.numel() for ids in batches)
    if not num_tokens:
        raise ConfigError("batches must have tokens to find a price on, got none")

    def cost_at(price: float) -> float:
        model.set_price(price)
        outs = ((ids, model(ids, use_cache=False, output_routed_cost=True)) for ids in batches)
        return sum(out.routed_cost.item() * ids.numel() for ids, out in outs) / num_tokens

    try:
        # not worth compiling for
        with evaluating(model), torch.compiler.set_stance("force_eager"):
            return search_price(cost_at, target_cost, tolerance=tolerance)
    except BaseException:
        model.set_price(before)
        raise


def _find_nearly(
    model: MetaAttentionForCausalLM,
    texts: Sequence[Tensor],
    target_cost: float,
    autocast: torch.dtype | None,
) -> None:
    """A price for the next steps."""
    with _autocast(model.device, autocast):
        find_price(model, texts, target_cost, tolerance=NEARLY)


def cost_range(model: MetaAttentionForCausalLM) -> tuple[float, float]:
    """The least and the most that routed layers of a model with values can cost."""
    config, ends = model.config, []
    value_controllers(model)
    for index, block in enumerate(model.model.layers):
        controller = block.attention.controller
        if isinstance(controller, ValueController):
            # who passes a block by costs nothing there
            share = (config.depth_capacity or 1.0) if config.may_skip(index) else 1.0
            ends.append((share * controller.costs.min(), share * controller.costs.max()))
    lowest, highest = torch.tensor(ends).mean(dim=0).tolist()
    return lowest, highest


def value_controllers(model: nn.Module) -> list[ValueController]:
    """Those of a model, at least one."""
    controllers = [m for m in model.modules() if isinstance(m, ValueController)]
    if not controllers:
        raise ConfigError("values need a model with controller='value'; this one has none")
    return controllers


def knows_values(model: nn.Module) -> bool:
    """Whether anything was learnt of values; of a model that :func:`with_values` made, not yet."""
    return any(controller.knows for controller in value_controllers(model))


def router_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Of controllers that know values, and of what these see beside hidden states."""
    value_controllers(model)
    layers = [m for m in model.modules() if isinstance(m, BayesianMetaAttentionLayer)]
    parts = [part for layer in layers for part in (layer.controller, layer.recurrence)]
    return [p for part in parts if part is not None for p in part.parameters()]


def _is_free(name: str) -> bool:
    """Whether a parameter is no better at 0 than elsewhere; as of MetaAttentionTrainer."""
    return ".rates." in name or ".residuals." in name


def _check_steps(num_steps: int, lr: float) -> None:
    if num_steps < 1:
        raise ConfigError(f"num_steps must be >= 1, got {num_steps}")
    if not 0.0 < lr < math.inf:
        raise ConfigError(f"lr must be above 0 and finite, got {lr}")


def _check_learnable(parameters: list[nn.Parameter], what: str) -> None:
    if not any(p.requires_grad for p in parameters):
        raise ConfigError(f"{what} must learn, but all of them are frozen; let them require a grad")
    halves = {p.dtype for p in parameters if torch.finfo(p.dtype).bits < 32}
    if halves:
        raise ConfigError(
            f"{what} must be of float32 to learn, got {', '.join(map(str, halves))}, in which most "
            "steps are too small to change anything; use model.float(), and autocast="
        )


def _check_done(done: int, num_steps: int) -> None:
    if done < num_steps:
        raise DataError(f"there must be a batch for each of {num_steps} steps, got {done}")


def _set_rate(optimiser: torch.optim.Optimizer, lr: float, done: int, num_steps: int) -> None:
    """Up in a straight line, then down to 0 as a cosine."""
    warmup = max(1, round(WARMUP * num_steps))
    progress = max(0, done - warmup) / max(1, num_steps - warmup)
    rate = min(1.0, (done + 1) / warmup) * 0.5 * (1.0 + math.cos(math.pi * progress))
    for group in optimiser.param_groups:
        group["lr"] = lr * rate


def _step(
    model: MetaAttentionForCausalLM,
    ids: Tensor,
    optimiser: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    autocast: torch.dtype | None,
    *,
    of_model: bool,
) -> dict[str, float]:
    """One update: of the model, or of its routers alone."""
    with _autocast(ids.device, autocast):
        out = model(ids, labels=ids, use_cache=False)
    figures = {"loss": out.task_loss.item(), "kl": out.kl.item()}
    if not math.isfinite(sum(figures.values())):
        raise ConfigError(f"loss and values must be finite, got {figures}; lower the lr")
    loss = out.task_loss + out.kl
    # to routers it would be a gain or a loss of nats, which it is not
    if of_model and out.depth_loss is not None:
        loss = loss + model.config.depth_weight * out.depth_loss
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    optimiser.step()
    return figures


def _autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


@contextmanager
def exploring(
    model: MetaAttentionForCausalLM,
    parameters: list[nn.Parameter],
    *,
    buys_all: bool,
    share: float | None = None,
) -> Iterator[None]:
    """Routes that try any expert, of a model in which nothing but these parameters learns."""
    learnt = {id(p) for p in parameters}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in learnt]
    config = model.config
    was_training, draw, usual = model.training, config.training_weights, config.explored_share
    prices, before = [c.price for c in value_controllers(model)], config.price
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        model.train()
        config.training_weights = "explore"
        config.explored_share = share or (EXPLORED if buys_all else EXPLORED_IN_USE)
        if buys_all:
            for price in prices:
                price.fill_(-BEYOND)
        yield
    except BaseException:
        config.price = before
        raise
    finally:
        for parameter in others:
            parameter.requires_grad_(True)
        model.train(was_training)
        config.training_weights, config.explored_share = draw, usual
        for price in prices:
            price.fill_(config.price)
