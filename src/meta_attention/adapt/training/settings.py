"""All that determines the training of a router."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from meta_attention.adapt.config import AdaptConfig
from meta_attention.config import ControllerName, RouteGradient, RouteGranularity
from meta_attention.errors import ConfigError
from meta_attention.training.schedule import Schedule
from meta_attention.training.settings import NO_WEIGHT, RunSettings

LossName = Literal["distill", "lm", "both"]

# longest block by default: longer ones cost memory, and most texts are shorter
DEFAULT_LENGTH = 8192
# the window by default, and how many a block has at least: a quarter of the attention, which is
# asked for by default, must be within reach; with four sinks it is in blocks of 48 tokens and more
DEFAULT_WINDOW, WINDOWS_PER_BLOCK = 256, 32
# of the wide window of the default experts, in windows
WIDE = 4
# the base has the capability, so pressing may start early
COST_WEIGHT = Schedule(0.0, 0.02, 0.1, 0.4)
# small next to it: a KL that is strong enough to make routes cheap keeps them uncertain as well
KL_WEIGHT = Schedule(0.0, 0.002, 0.1, 0.4)
# of a byte model of width 96, three seeds: divergence 0.013 each; with 0.003 0.017, 0.031, 0.024
MAX_LR = 1e-2


# values are learnt beside a KL of weight 1, and nothing else moves them; no prior has a part in it
NOT_PRESSED: dict[str, Any] = {
    "prior_strength": 1.0,
    "prior_floor": 0.01,
    "kl_weight": Schedule.constant(1.0),
    "cost_weight": NO_WEIGHT,
    "hold": 0.0,
    "argmax_from": 1.0,
    "lora_rank": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings(RunSettings):
    """Settings of a router's training; those of :class:`RunSettings` have defaults here."""

    MAY_CHANGE: ClassVar[frozenset[str]] = RunSettings.MAY_CHANGE | {"model"}

    model: str = ""
    """Name or folder of the base; where it lies may change, its weights may not."""
    length: int | None = None
    """Tokens of a block; None: 8192, or what the base can take if that is less."""
    recall_share: float = 0.25
    """Share of the blocks that are changed so that what is far back must be found again; see
    :mod:`meta_attention.adapt.training.recall`."""

    # routing, as AdaptConfig has it
    experts: tuple[str, ...] | None = None
    """What heads choose among; None: full attention, the window, and a wide one between them where
    blocks are at least twice as long as that."""
    window_size: int | None = None
    """None: 256, or a 32nd of a block where that is less."""
    num_sinks: int = 4
    layers: tuple[int, ...] | None = None
    route_granularity: RouteGranularity = "kv_head"
    route_gradient: RouteGradient = "all"
    controller: ControllerName = "bayesian"
    controller_hidden_size: int = 64
    prior_strength: float = 1.0
    prior_floor: float = 0.01
    value_scale: float | None = 0.01

    # objective
    loss: LossName = "distill"
    """``"distill"``: divergence from the base's predictions. ``"lm"``: loss on the text.
    ``"both"``: their mean."""
    target_cost: float | None = 0.25
    """What routes are pressed to cost; where they go by value, what a price is found for."""
    hold: float = 1.0
    argmax_from: float = 0.8

    # LoRA, where it is asked for
    lora_rank: int = 0
    lora_lr: float = 2e-4

    kl_weight: Schedule = KL_WEIGHT
    cost_weight: Schedule = COST_WEIGHT
    """What the target steers; where it is 0, the target steers ``kl_weight``."""
    steps: int = 300
    batch_size: int = 4
    lr: float | None = None  # type: ignore[assignment]
    """Of routers; None: 0.01, or 2 / width of the base where that is less. Adam moves every weight
    of a controller by as much in a step, so what it makes of a token moves with the width."""
    warmup: int = 10
    weight_decay: float = 0.01
    eval_every: int = 100
    save_every: int = 100

    def __post_init__(self) -> None:
        # by name: the class that a dataclass with slots is made into is another one
        RunSettings.__post_init__(self)
        if self.loss not in get_args(LossName):
            raise ConfigError(f"loss must be distill, lm or both, got {self.loss!r}")
        if not 0.0 <= self.recall_share <= 1.0:
            raise ConfigError(
                f"recall_share must be a share of the blocks, from 0 to 1, got {self.recall_share}"
            )
        if self.lora_rank < 0:
            raise ConfigError(f"lora_rank must be >= 0, got {self.lora_rank}; 0: no LoRA")
        if not 0.0 < self.lora_lr < float("inf"):
            raise ConfigError(f"lora_lr must be > 0, got {self.lora_lr}")
        if self.length is not None and self.length < 2:
            raise ConfigError(f"length must be >= 2, got {self.length}: one token predicts nothing")
        if self.controller == "value":
            _check_values(self)
        if not self.eval_every:
            raise ConfigError("eval_every must be >= 1: an adapter says what was measured of it")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Settings that were given, and defaults that fit them.

        A shorter run has a warm-up of at most a tenth of it, and is evaluated and saved at its end;
        a prior-free controller has no KL; routes that learn from the chosen expert alone are drawn
        to the end; routes that go by value are not pressed.
        """
        given = dict(values)
        steps = given.get("steps", 0)
        if steps > 0:
            given.setdefault("warmup", min(10, steps // 10))
            given.setdefault("eval_every", min(100, steps))
            given.setdefault("save_every", min(100, steps))
        if given.get("route_gradient") == "chosen":
            given.setdefault("argmax_from", 1.0)
        if given.get("controller") == "prior_free":
            given["kl_weight"] = NO_WEIGHT
        if given.get("controller") == "value":
            given = NOT_PRESSED | given
        return cls(**given)

    def lr_for(self, width: int) -> float:
        """The learning rate, where none was given one that fits the width of the base."""
        return min(MAX_LR, 2.0 / width) if self.lr is None else self.lr

    def window_for(self, length: int) -> int:
        """The window, where none was given one that fits the length of a block."""
        if self.window_size is not None:
            return self.window_size
        return max(1, min(DEFAULT_WINDOW, length // WINDOWS_PER_BLOCK))

    def experts_for(self, length: int) -> tuple[str, ...]:
        """The experts, where none were given those that fit the length of a block."""
        if self.experts is not None:
            return self.experts
        wide = WIDE * self.window_for(length)
        return ("full", "local") if 2 * wide > length else ("full", f"local:{wide}", "local")

    def adapt_config(self, length: int) -> AdaptConfig:
        """How the base is routed; costs are counted at the training length."""
        experts = self.experts_for(length)
        return AdaptConfig(
            experts=experts,
            window_size=self.window_for(length),
            num_sinks=self.num_sinks,
            layers=self.layers,
            route_granularity=self.route_granularity,
            route_gradient=self.route_gradient,
            controller=self.controller,
            controller_hidden_size=self.controller_hidden_size,
            prior_strength=self.prior_strength,
            prior_floor=self.prior_floor,
            value_scale=self.value_scale,
            start_expert="full" if "full" in experts else None,
            cost_length=length,
        )


def _check_values(settings: RouterSettings) -> None:
    if settings.target_cost is None:
        raise ConfigError(
            "target_cost must be given with controller='value': it is what a price is found for, "
            "got None"
        )
    for name, expected in NOT_PRESSED.items():
        got = getattr(settings, name)
        if got != expected:
            raise ConfigError(
                f"{name} must be {expected} with controller='value', whose routes are not pressed "
                f"and have a price in place of a prior, got {got}; leave it out"
            )
