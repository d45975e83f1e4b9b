"""What is compared: ways to route a pretrained model, and how each is put in force.

A variant is plain data, made from the base alone, from the sensitivity of its layers and heads, or
from a trained adapter.

Shapes: B batch, T sequence, G key-value heads that have routes of their own, E experts.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from study_adapt_data import AdaptCache, open_base
from torch import Tensor, nn
from transformers import PreTrainedModel

from meta_attention import adapt
from meta_attention.adapt import (
    AdaptConfig,
    Router,
    load_adapter,
    load_base,
    routed_as,
    routers_of,
)
from meta_attention.adapt.adaptation import Way
from meta_attention.adapt.adapters import CARD_FILE
from meta_attention.adapt.training.settings import COST_WEIGHT
from meta_attention.controller.controllers import MLPController
from meta_attention.errors import ConfigError, DataError
from meta_attention.evaluation.forcing import ForcedController, ForcedPosterior
from meta_attention.training.schedule import Schedule
from meta_attention.training.settings import NO_WEIGHT

ADAPTERS, SENSITIVITY = "adapters", "sensitivity.json"
FULL, LOCAL = 0, -1  # of the experts of every router here, the dearest first
# the target of the adapters whose thresholds are moved to other costs
MOVED_FROM = 0.25


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the study."""

    window_size: int = 256
    wide_window: int = 1024
    """Of the expert between full attention and the window, where there is one."""
    num_sinks: int = 4
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    """That are measured at; the last is what adapters are trained at."""
    static_counts: tuple[int, ...] = (1, 3, 6, 9, 12, 15)
    """How many of the most sensitive layers stay full."""
    static_heads: tuple[int, ...] = (4, 9, 14, 18, 23)
    """How many of the most sensitive key-value heads stay full."""
    every: tuple[int, ...] = (3, 6)
    """Every third layer stays full, every sixth."""
    costs: tuple[float, ...] = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
    """That thresholds are moved to, as shares of the base's attention FLOPs."""
    questions: int = 10
    """For each of five depths, length and kind."""
    several: int = 6
    """Facts of which one is asked for."""
    sequences: int = 48
    """That variants are measured on, at most."""
    sensitivity_sequences: int = 8
    head_sequences: int = 4
    """Likewise by head: there are more of them than layers."""
    calibration_sequences: int = 4
    """Sequences that thresholds are set on."""
    tokens_at_once: int = 32768
    """Of a batch, in evaluation."""
    passage: int = 96
    """Tokens whose routes are drawn."""
    prefill_batches: tuple[int, ...] = (1, 8)
    decode_batch: int = 32
    training: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every training."""

    @property
    def length(self) -> int:
        return max(self.lengths)

    def experts(self, *, is_wide: bool = False) -> tuple[str, ...]:
        return ("full", f"local:{self.wide_window}", "local") if is_wide else ("full", "local")


SCALES = {
    "full": Scale(),
    # the real model on a CPU, in an hour: to see that all is well, not to compare
    "small": Scale(
        wide_window=512,
        lengths=(512, 1024),
        static_counts=(3, 6),
        static_heads=(9,),
        every=(3,),
        costs=(0.6,),
        questions=1,
        sequences=2,
        sensitivity_sequences=1,
        head_sequences=1,
        calibration_sequences=1,
        tokens_at_once=1024,
        prefill_batches=(1,),
        decode_batch=2,
        training={"steps": 4, "batch_size": 1, "log_every": 1},
    ),
    # seconds on a CPU: for tests
    "tiny": Scale(
        window_size=8,
        wide_window=32,
        num_sinks=2,
        lengths=(272, 320),
        static_counts=(1,),
        static_heads=(1,),
        every=(2,),
        costs=(0.4,),
        questions=1,
        several=2,
        sensitivity_sequences=2,
        head_sequences=2,
        calibration_sequences=1,
        tokens_at_once=640,
        passage=16,
        prefill_batches=(1,),
        decode_batch=2,
        training={"steps": 2, "batch_size": 2, "log_every": 1, "controller_hidden_size": 8},
    ),
}

BY_HEAD, BY_TOKEN = {"route_granularity": "kv_head"}, {"route_granularity": "token"}
WIDE = BY_HEAD | {"is_wide": True}
FADING_KL = Schedule.parse("0->0.002->0@0.1:0.4:0.8")
# strength of a weak prior; the default is 1
WEAK = 0.1
# in place of a cost: the wide window everywhere
WINDOW = "window"
# what a training changes of the defaults of meta-attention adapt
TRAININGS: dict[str, dict[str, Any]] = {
    "token-0.25": BY_TOKEN | {"target_cost": 0.25},
    "kv-head-0.25": BY_HEAD | {"target_cost": 0.25},
    # three experts: full attention, a wide window and the window
    **{f"kv-head-wide-{cost:g}": WIDE | {"target_cost": cost} for cost in (0.15, 0.25)},
    # the KL goes to 0 again until routes are no longer drawn
    "fading-kv-head-wide-0.25": WIDE | {"target_cost": 0.25, "kl_weight": FADING_KL},
    # little of the prior in the beliefs, so that little evidence makes them sure
    "weak-kv-head-wide-0.25": WIDE | {"target_cost": 0.25, "prior_strength": WEAK},
    "prior-free-kv-head-wide-0.25": WIDE | {"target_cost": 0.25, "controller": "prior_free"},
    # pressed by the KL, as the paper would have it
    "kl-kv-head-wide-0.25": WIDE
    | {"target_cost": 0.25, "cost_weight": NO_WEIGHT, "kl_weight": COST_WEIGHT},
    # one expert for every head, whatever the token: the best static choice that can be learnt
    "blind-kv-head-wide-0.25": WIDE | {"target_cost": 0.25, "is_blind": True},
    "kv-head-wide-lora-0.25": WIDE | {"target_cost": 0.25, "lora_rank": 8},
    # the static choice whose cost is nearest to a quarter, and the wide window, with our LoRA
    "static-lora-0.25": BY_TOKEN | {"lora_rank": 8, "static_cost": 0.25},
    "window-wide-lora": BY_TOKEN | {"lora_rank": 8, "is_wide": True, "static_cost": WINDOW},
    # weights of both experts, mixed; evaluated with a threshold on them
    "soft": BY_TOKEN | {"target_cost": None, "routing": "soft"},
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to route, by the names of what it is made from."""

    name: str
    family: str
    """What it is compared as; those of ``study_adapt_report.FAMILIES``."""
    adapter: str | None = None
    """Name of the trained adapter it has."""
    layers: tuple[Way, ...] | None = None
    """Expert of every layer, or of each of its key-value heads, where routes are static."""
    num_sinks: int | None = None
    """Of the local expert, where it differs."""
    random: bool = False
    """Routes drawn with the shares of the experts that the adapter's layers and heads have."""
    cost: float | None = None
    """Share of the base's attention FLOPs that a threshold is set to."""

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


def static_variants(
    scale: Scale,
    sensitivity: Sequence[float] | None,
    num_layers: int,
    by_head: Sequence[Sequence[float]] | None = None,
) -> list[Variant]:
    """Variants that nothing was trained for; the best layers and heads need their sensitivity."""
    wide = scale.experts(is_wide=True)[1]
    found = [
        Variant("full", "base", layers=("full",) * num_layers),
        Variant("window", "window", layers=("local",) * num_layers),
        Variant(f"window-{scale.wide_window}", "window", layers=(wide,) * num_layers),
        Variant("window-no-sinks", "window", layers=("local",) * num_layers, num_sinks=0),
    ]
    found += [
        Variant(f"every-{n}", "every", layers=keep_full(num_layers, range(n - 1, num_layers, n)))
        for n in scale.every
    ]
    if sensitivity is not None:
        order = by_sensitivity(sensitivity)
        found += [
            Variant(f"static-{k}", "static", layers=keep_full(num_layers, order[:k]))
            for k in scale.static_counts
            if k < num_layers
        ]
    if by_head is not None:
        num_heads = sum(map(len, by_head))
        found += [
            Variant(f"static-heads-{k}", "static heads", layers=keep_heads_full(by_head, k))
            for k in scale.static_heads
            if k < num_heads
        ]
    return found


def derived_variants(scale: Scale, name: str) -> list[Variant]:
    """What is made of a trained adapter, itself first."""
    training = TRAININGS.get(name, {})
    if training.get("routing") == "soft":
        return [
            Variant(f"{name}-cut-{cost:g}", "soft cut", adapter=name, cost=cost)
            for cost in scale.costs
        ]
    if "static_cost" in training:
        # its routes are saved beside it
        return [Variant(name, "static + LoRA", adapter=name)]
    if training.get("is_blind"):
        return [Variant(name, "blind", adapter=name)]
    kind = "key-value head" if training.get("route_granularity") == "kv_head" else "token"
    kind = f"wide {kind}" if training.get("is_wide") else kind
    kind += ", by its KL" if "cost_weight" in training else ""
    kind += ", weak prior" if "prior_strength" in training else ""
    kind += ", fading KL" if training.get("kl_weight") == FADING_KL else ""
    is_prior_free = training.get("controller") == "prior_free"
    family = f"ours, {kind}"
    if is_prior_free:
        family = "prior-free"
    lora = " + LoRA" if training.get("lora_rank") else ""
    found = [Variant(name, family + lora, adapter=name)]
    if not is_prior_free and not lora:
        found.append(Variant(f"{name}-random", "random", adapter=name, random=True))
        if training.get("target_cost") == MOVED_FROM:
            found += [
                Variant(f"{name}-moved-{cost:g}", f"{family}, moved", adapter=name, cost=cost)
                for cost in scale.costs
            ]
    return found


def find_variants(out: Path, scale: Scale, num_layers: int) -> list[Variant]:
    """All that can be measured now: of the base, and of the adapters that are finished."""
    sensitivity, by_head = read_sensitivity(out), read_sensitivity(out, by_head=True)
    variants = static_variants(scale, sensitivity, num_layers, by_head)
    for name in finished_adapters(out):
        own = derived_variants(scale, name)
        routes = read_static_routes(out, name)
        variants += own if routes is None else [replace(v, layers=routes) for v in own]
    return variants


def finished_adapters(out: Path) -> list[str]:
    return sorted(path.parent.name for path in (out / ADAPTERS).glob(f"*/{CARD_FILE}"))


def read_sensitivity(out: Path, *, by_head: bool = False) -> Any:
    """Loss increase with one layer or head local at a time, or None before it was measured.

    By head it is a list for each layer.
    """
    path, name = out / SENSITIVITY, "loss_increase_by_head" if by_head else "loss_increase"
    return json.loads(path.read_text()).get(name) if path.is_file() else None


def read_static_routes(out: Path, name: str) -> tuple[str, ...] | None:
    """Routes that an adapter was trained under, where it has no router."""
    path = out / ADAPTERS / name / "routes.json"
    return tuple(json.loads(path.read_text())) if path.is_file() else None


def keep_full(num_layers: int, full: Sequence[int]) -> tuple[str, ...]:
    return tuple("full" if index in full else "local" for index in range(num_layers))


def keep_heads_full(by_head: Sequence[Sequence[float]], k: int) -> tuple[tuple[str, ...], ...]:
    """The k most sensitive heads full, whichever layers they are in."""
    heads = [(layer, head) for layer, row in enumerate(by_head) for head in range(len(row))]
    kept = sorted(heads, key=lambda at: -by_head[at[0]][at[1]])[:k]
    return tuple(
        tuple("full" if (layer, head) in kept else "local" for head in range(len(row)))
        for layer, row in enumerate(by_head)
    )


def by_sensitivity(sensitivity: Sequence[float]) -> list[int]:
    """Layers, the most sensitive first."""
    return sorted(range(len(sensitivity)), key=lambda index: -sensitivity[index])


def nearest_static(sensitivity: Sequence[float], cost: float, local_cost: float) -> tuple[str, ...]:
    """The most sensitive layers, as many as come nearest to a cost."""
    num_layers = len(sensitivity)
    costs = [(k + (num_layers - k) * local_cost) / num_layers for k in range(num_layers + 1)]
    k = min(range(num_layers + 1), key=lambda k: abs(costs[k] - cost))
    return keep_full(num_layers, by_sensitivity(sensitivity)[:k])


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """A GPU in bfloat16, or a CPU in float32."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.float32


def load_plain(cache: AdaptCache, base: Path | None) -> PreTrainedModel:
    """The base on its device, not adapted."""
    device, dtype = device_and_dtype()
    model = load_base(str(open_base(cache, base)), dtype=dtype)
    model.config._name_or_path = cache.base_name
    model.to(device)  # type: ignore[arg-type]
    return model.eval()


def load_variant(
    cache: AdaptCache, base: Path | None, out: Path, scale: Scale, source: str | AdaptConfig
) -> PreTrainedModel:
    """The base with an adapter, by its name, or with routers that are not trained."""
    model = load_plain(cache, base)
    if isinstance(source, str):
        return load_adapter(model, out / ADAPTERS / source)
    return adapt(model, source)


def source_of(variant: Variant, scale: Scale) -> str | AdaptConfig:
    """What :func:`load_variant` makes the model of a variant from."""
    if variant.adapter is not None:
        return variant.adapter
    ways = variant.layers or ()
    is_wide = scale.experts(is_wide=True)[1] in ways
    if all(isinstance(way, str) for way in ways):
        return adapt_config(scale, is_wide=is_wide)
    return adapt_config(scale, is_wide=is_wide, **BY_HEAD)


def adapt_config(scale: Scale, *, is_wide: bool = False, **changes: Any) -> AdaptConfig:
    return AdaptConfig(
        experts=scale.experts(is_wide=is_wide),
        window_size=scale.window_size,
        num_sinks=scale.num_sinks,
        cost_length=scale.length,
        **changes,
    )


@torch.no_grad()
def make_blind(model: nn.Module) -> None:
    """Hidden units of controllers that are the same for every token, and stay so in training."""
    for router in routers_of(model):
        controller = router.controller
        assert isinstance(controller, MLPController)
        first: Any = controller.mlp[0]
        nn.init.zeros_(first.weight)
        nn.init.ones_(first.bias)
        for parameter in first.parameters():
            parameter.requires_grad_(True).register_hook(torch.zeros_like)


class ShareController(ForcedController):
    """Draws experts with probabilities that are the same for every token."""

    def __init__(self, controller: nn.Module, shares: Tensor, seed: int) -> None:
        super().__init__(controller, FULL)
        self.shares, self.seed = shares, seed  # [E] or [G, E]

    def forward(self, x: Tensor, position_ids: Tensor) -> ForcedPosterior:
        shape = (*x.shape[:2], *self.groups, 1)
        generator = torch.Generator().manual_seed(self.seed)
        limits = self.shares.cumsum(dim=-1)[..., :-1]
        expert = (torch.rand(shape, generator=generator) >= limits).sum(dim=-1).to(x.device)
        return ForcedPosterior(F.one_hot(expert, len(self.costs)).float())


class ThresholdController(ForcedController):
    """Takes full attention where the belief in it is above a threshold.

    That is, the largest belief, discounted by cost: of two experts, both are the same.
    """

    def __init__(self, controller: nn.Module, threshold: float) -> None:
        super().__init__(controller, FULL)
        self.threshold = threshold

    def forward(self, x: Tensor, position_ids: Tensor) -> ForcedPosterior:
        costs = self.costs.to(x.device)
        saved = (costs - costs[LOCAL]) / (costs[FULL] - costs[LOCAL])  # 1 for full, 0 for local
        price = math.log(self.threshold / (1.0 - self.threshold))
        belief = self.controller(x, position_ids).mean.log() - price * saved
        return ForcedPosterior(F.one_hot(belief.argmax(dim=-1), len(self.costs)).float())


@contextmanager
def standing_in(model: nn.Module, make: Callable[[Router], nn.Module]) -> Iterator[None]:
    """Other controllers in all routers, for a while."""
    routers = routers_of(model)
    before = [router.controller for router in routers]
    try:
        for router in routers:
            router.controller = make(router)  # type: ignore[assignment]
        yield
    finally:
        for router, controller in zip(routers, before, strict=True):
            router.controller = controller


@contextmanager
def in_force(
    model: PreTrainedModel,
    variant: Variant,
    *,
    shares: Mapping[int, Any] | None = None,
    threshold: float | None = None,
) -> Iterator[None]:
    """Route as a variant does.

    Args:
        model: As :func:`load_variant` gives it.
        variant: What to put in force.
        shares: Of random routes: those of the experts by layer, or for each of its heads.
        threshold: On the belief in full attention, where the variant has a cost.
    """
    with ExitStack() as stack:
        if variant.layers is not None:
            stack.enter_context(routed_as(model, dict(enumerate(variant.layers))))
        if variant.num_sinks is not None:
            stack.enter_context(_with_sinks(model, variant.num_sinks))
        if variant.random:
            if shares is None:
                raise DataError(
                    f"{variant.name} needs the shares of {variant.adapter}; measure that first"
                )
            stack.enter_context(routed_as(model, "hard"))
            stack.enter_context(
                standing_in(
                    model,
                    lambda router: ShareController(
                        router.controller, torch.tensor(shares[router.layer_idx]), router.layer_idx
                    ),
                )
            )
        if variant.cost is not None:
            if threshold is None:
                raise ConfigError(f"{variant.name} needs a threshold; set one on held-out text")
            stack.enter_context(routed_as(model, "hard"))
            stack.enter_context(
                standing_in(model, lambda router: ThresholdController(router.controller, threshold))
            )
        yield


@contextmanager
def _with_sinks(model: nn.Module, num_sinks: int) -> Iterator[None]:
    everyone: list[Any] = [expert for router in routers_of(model) for expert in router.experts]
    experts = [expert for expert in everyone if expert.window is not None]
    before = [expert.num_sinks for expert in experts]
    try:
        for expert in experts:
            expert.num_sinks = num_sinks
        yield
    finally:
        for expert, number in zip(experts, before, strict=True):
            expert.num_sinks = number
