"""All that determines the training of a model, and how a command line writes some of it.

Every setting is a flag of ``meta-attention train`` by the same name.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from meta_attention.config import (
    ControllerName,
    DepthRouting,
    MetaAttentionConfig,
    ResidualName,
    RouteGradient,
    RouteGranularity,
    RoutingName,
    Signal,
    TrainingWeights,
)
from meta_attention.errors import ConfigError
from meta_attention.evaluation.tasks.spec import TaskSpec
from meta_attention.training.economy import check_settling
from meta_attention.training.schedule import Schedule
from meta_attention.training.settings import RunSettings

# settings that may change in the course of training
SCHEDULED = ("kl_weight", "uncertainty_threshold", "cost_weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(RunSettings):
    """All that determines a training run."""

    SCHEDULED: ClassVar[tuple[str, ...]] = SCHEDULED
    MAY_CHANGE: ClassVar[frozenset[str]] = RunSettings.MAY_CHANGE | {"compile"}

    recipe: str

    # text -> blocks
    task: str | None = None
    """A task with known need in place of text, by name and sizes; see ``TaskSpec``."""
    train_bytes: int | None = None
    """Train on this much of the text only, again and again; what is held out and the tokenizer stay
    those of the whole."""
    tokenizer: str
    """``"task"`` is the vocabulary of task recall, and goes with no other."""
    length: int
    """Tokens of a block, T."""
    isolate_documents: bool = False

    # model
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int | None = None
    window_size: int
    experts: tuple[str, ...] = ("full", "linear", "local")
    layer_experts: tuple[tuple[str, ...], ...] | None = None
    """Experts of each layer; a shorter list is repeated."""
    expert_costs: str | tuple[float, ...] = "flops"
    shared_projections: bool = True
    short_conv: int | None = None
    """Taps of a causal convolution over queries, keys and values."""
    depth_capacity: float | None = None
    """Mixture of Depths: share of the tokens that enter a block; None: all enter all blocks."""
    depth_layers: tuple[int, ...] | None = None
    """The blocks that tokens may pass by; default: every other one."""
    depth_routing: DepthRouting = "top_k"
    depth_weight: float = 1.0
    """Weight of what teaches who enters."""
    initializer_range: float = 0.02
    """Standard deviation of new weights."""
    controller: ControllerName = "bayesian"
    recurrence: int | None = None
    """Controllers also see when the last tokens, up to so many together, were seen before."""
    prior_strength: float = 1.0
    """The paper's beta_0."""
    prior_floor: float = 0.01
    """The paper's epsilon."""
    empirical_prior: bool = False
    """Estimate the strength of each layer's prior from the training text as training goes on."""
    start_expert: str | None = None
    """Expert that is believed in at first, in the layers that have it."""
    training_weights: TrainingWeights = "mean"
    route_gradient: RouteGradient = "all"
    route_granularity: RouteGranularity = "token"
    residual: ResidualName = "sum"
    """What sublayers read: the sum of outputs, or a softmax over them (Attention Residuals)."""
    residual_blocks: int = 8
    """Groups of residual ``"block_attention"``."""

    # training
    routing: RoutingName = "soft"
    uncertainty_signal: Signal = "mutual_information"
    uncertainty_threshold: Schedule | None = None
    """For gated routing; rising, it makes tokens hard in the course of training."""
    settle_drop: float = 0.02
    """The task loss has settled when it fell by less than this share over ``settle_steps``."""
    settle_steps: int | None = None
    """Steps whose mean is compared with that of as many before; none: a tenth of training."""
    compile: bool = False

    def __post_init__(self) -> None:
        # by name: the class that a dataclass with slots is made into is another one
        RunSettings.__post_init__(self)
        if self.train_bytes is not None and self.train_bytes < 1:
            raise ConfigError(f"train_bytes must be >= 1, got {self.train_bytes}")
        if self.empirical_prior and self.controller != "bayesian":
            raise ConfigError(
                "empirical_prior must have a prior to estimate, got a prior_free controller"
            )
        if self.hold > 0.0 and self.target_cost is None:
            raise ConfigError(
                f"hold must have a target_cost to hold the cost up to, got {self.hold} and none; "
                "give one, or leave hold out"
            )
        check_settling(self.settle_drop, self.settle_steps)
        self._check_task()

    @property
    def keeps_best(self) -> bool:
        # a task is learnt first and made cheap later: there the last model counts
        return bool(self.eval_every) and self.task is None

    @property
    def loads_slowly(self) -> bool:
        # sequences of this task are made one by one
        return self.tokenizer == "task"

    def _check_task(self) -> None:
        spec = None if self.task is None else TaskSpec.parse(self.task)
        if spec is not None and self.isolate_documents:
            raise ConfigError(
                f"isolate_documents must not be given with task {spec.name}: its sequences are one "
                "document each"
            )
        if spec is None or spec.is_text:
            if self.tokenizer == "task":
                raise ConfigError("tokenizer 'task' is the vocabulary of task recall; name another")
            return
        for name in ("data", "eval_data", "max_bytes", "train_bytes"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} must not be given with task recall, which makes its own tokens; leave "
                    "it out, or use task needle or multi_key, which are made of text"
                )
        if self.tokenizer != "task":
            raise ConfigError(
                f"tokenizer must not be given with task recall, got {self.tokenizer!r}: it has a "
                "vocabulary of its own; leave it out"
            )

    def model_config(self, **of_tokenizer: Any) -> MetaAttentionConfig:
        """The model of this run, for a vocabulary."""
        threshold = self.uncertainty_threshold
        return MetaAttentionConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            max_position_embeddings=self.length,
            window_size=self.window_size,
            experts=self.experts,
            layer_experts=self._repeated_layer_experts(),
            expert_costs=self.expert_costs,
            shared_projections=self.shared_projections,
            short_conv=self.short_conv,
            depth_capacity=self.depth_capacity,
            depth_layers=self.depth_layers,
            depth_routing=self.depth_routing,
            depth_weight=self.depth_weight,
            initializer_range=self.initializer_range,
            controller=self.controller,
            recurrence=self.recurrence,
            prior_strength=self.prior_strength,
            prior_floor=self.prior_floor,
            start_expert=self.start_expert,
            training_weights=self.training_weights,
            route_gradient=self.route_gradient,
            route_granularity=self.route_granularity,
            residual=self.residual,
            residual_blocks=self.residual_blocks,
            kl_weight=self.kl_weight.end,
            routing=self.routing,
            uncertainty_signal=self.uncertainty_signal,
            uncertainty_threshold=None if threshold is None else threshold.end,
            cost_weight=self.cost_weight.end,
            **of_tokenizer,
        )

    def _repeated_layer_experts(self) -> tuple[tuple[str, ...], ...] | None:
        if self.layer_experts is None:
            return None
        times, rest = divmod(self.layers, len(self.layer_experts))
        if rest:
            raise ConfigError(
                f"layer_experts must name {self.layers} layers or a pattern that repeats to as "
                f"many, got {len(self.layer_experts)}; give others, or experts for all layers"
            )
        return self.layer_experts * times


def parse_names(text: str) -> tuple[str, ...]:
    """``"full,local"`` -> its names."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ConfigError(f"names must be separated by single commas, got {text!r}")
    return names


def parse_depth_layers(text: str) -> tuple[int, ...]:
    """``"1,3"`` -> the indices of blocks."""
    indices = [index.strip() for index in text.split(",")]
    if not all(index.isdecimal() for index in indices):
        raise ConfigError(
            f"depth_layers must be indices of blocks, 0 or more, parted by commas, got {text!r}"
        )
    return tuple(map(int, indices))


def parse_layer_experts(text: str) -> tuple[tuple[str, ...], ...]:
    """``"local*2,full+local"`` -> the experts of each layer.

    Commas part layers, + parts the experts of one, and *N stands for N such layers in a row.
    """
    layers: list[tuple[str, ...]] = []
    for layer in parse_names(text):
        names, star, times = layer.partition("*")
        if star and not (times.strip().isdecimal() and int(times) > 0):
            raise ConfigError(
                "layer_experts must repeat a layer a whole number of times, such as 'local*5', "
                f"got {layer!r}"
            )
        layers += [parse_names(names.replace("+", ","))] * (int(times) if star else 1)
    return tuple(layers)


def parse_costs(text: str) -> str | tuple[float, ...]:
    """``"paper"``, ``"flops"``, or numbers separated by commas."""
    if text in ("paper", "flops"):
        return text
    try:
        return tuple(float(cost) for cost in text.split(","))
    except ValueError:
        raise ConfigError(
            f"expert_costs must be paper, flops or numbers separated by commas, got {text!r}"
        ) from None
