"""Named training runs: a recipe is a function that returns all settings of one.

Every setting is a flag of ``meta-attention train`` by the same name. A recipe gives each a value;
the flags given override it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
from meta_attention.training.settings import NO_WEIGHT as NO_WEIGHT
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


# Hard routes that adapt. Capability first: a model starts on full attention, and nothing presses it
# until it can do its task. Economy second: then a weight rises, as far as the target asks. Routes
# are drawn, so that no expert is forgotten, and all experts run in training: the gradient of the
# chosen one alone is unbiased, too, but so noisy that 300 steps of the demo end 0.26 nats higher.
#
# On text that weight is the cost's, and the KL has a tenth at most: one that presses also keeps
# routes uncertain, which costs more than it saves (docs/results.md: five seeds, 7.4M parameters).
# Tasks whose need is known are pressed by the KL: that is how they were measured.
ADAPTIVE: dict[str, Any] = {
    "routing": "hard",
    "training_weights": "one_hot",
    "route_gradient": "all",
    "start_expert": "full",
}


def tiny() -> Settings:
    """The paper's Tiny LM: characters, D=128, 2 layers, T=64; its KL weight is 1 throughout."""
    return Settings(
        recipe="tiny",
        tokenizer="characters",
        length=64,
        hidden_size=128,
        layers=2,
        heads=4,
        window_size=8,
        expert_costs="paper",
        shared_projections=False,
        steps=2000,
        batch_size=32,
        lr=1e-3,
        warmup=100,
        kl_weight=Schedule.constant(1.0),
        eval_every=500,
        save_every=500,
    )


def bytes_small() -> Settings:
    """About 5M parameters on bytes, T=1024, one layer in six routed; minutes on a GPU.

    What has beaten a static hybrid on text (docs/results.md): its full layer is routed, head by
    head, among all, a wide window and the window. Routed in all layers, per token, models of this
    kind were worse at the same cost.
    """
    window, wide = ("local",), "local:256"
    return Settings(
        recipe="bytes-small",
        tokenizer="bytes",
        length=1024,
        hidden_size=256,
        layers=6,
        heads=4,
        window_size=32,
        layer_experts=(window, window, window, ("full", wide, "local"), window, window),
        route_granularity="kv_head",
        steps=2400,
        batch_size=32,
        lr=1e-3,
        warmup=100,
        **ADAPTIVE,
        cost_weight=Schedule(0.0, 0.1, 0.5, 0.75),
        # gone before routes are taken: kept to the end it leaves beliefs unsure, at a price
        kl_weight=Schedule(0.0, 0.0, 0.5, 0.8, peak=0.01, turn=0.65),
        target_cost=0.45,
        hold=1.0,
        argmax_from=0.8,
        precision="bf16",
        eval_every=400,
        save_every=400,
    )


def demo() -> Settings:
    """A small model on Python's manual; less than a minute on a CPU."""
    return Settings(
        recipe="demo",
        tokenizer="characters",
        length=128,
        hidden_size=64,
        layers=2,
        heads=4,
        window_size=16,
        steps=300,
        batch_size=16,
        lr=3e-3,
        warmup=30,
        **ADAPTIVE,
        cost_weight=Schedule(0.0, 0.01, 0.5, 0.75),
        # 0.1 pulls so small a model back onto the prior: adaptivity 0.02 nats instead of 0.07
        kl_weight=Schedule(0.0, 0.001, 0.5, 0.75),
        target_cost=0.4,
        # without these two, routes of so short a run leave full attention before anything presses:
        # 0.25 to 0.27 of its cost and 0.006 to 0.016 nats better (three seeds), but hardly routed
        hold=1.0,
        argmax_from=0.8,
        eval_every=100,
        save_every=100,
    )


def recall() -> Settings:
    """Associative recall, where need is known: 128 pairs, T=512; minutes on a GPU."""
    return Settings(
        recipe="recall",
        task="recall",
        tokenizer="task",
        length=512,
        hidden_size=64,
        layers=2,
        heads=2,
        window_size=16,
        # counted at this length, linear attention would be the dearer of the two cheap ones
        expert_costs="paper",
        # with it one layer can store a value under its key; without, two have to find out together
        # that one shall look a token back, and in 1,500 steps with 16 pairs they did not
        short_conv=3,
        # 1 / sqrt(D); at 0.02 it takes longer
        initializer_range=0.125,
        steps=6000,
        batch_size=32,
        lr=3e-3,
        warmup=100,
        weight_decay=0.01,
        **ADAPTIVE,
        # at 0.1 all keys stay on full attention, also those that are stored and ask for nothing;
        # at 0.5 one seed of five lost all recalls again
        kl_weight=Schedule(0.0, 0.3, 0.4, 0.6),
        eval_every=500,
        save_every=500,
    )


def needle() -> Settings:
    """A code hidden in 512 characters of text, T=512; a model as that of recall."""
    return replace(
        recall(),
        recipe="needle",
        task="needle",
        tokenizer="characters",
        steps=4000,
        kl_weight=Schedule(0.0, 0.1, 0.5, 0.75),
    )


RECIPES: dict[str, Callable[[], Settings]] = {
    "demo": demo,
    "tiny": tiny,
    "bytes-small": bytes_small,
    "recall": recall,
    "needle": needle,
}


def default_recipe(task: str | None) -> str:
    """The recipe of a run for which none is named."""
    if task is None:
        return "demo"
    return "needle" if TaskSpec.parse(task).is_text else "recall"


def build_settings(recipe: str, overrides: Mapping[str, Any]) -> Settings:
    """A recipe with some of its settings replaced.

    What a setting that was given leaves without a meaning goes with it, unless it was given too: a
    shorter run than the recipe's has a warm-up of at most a tenth of it; experts for all layers
    replace those per layer; without full attention nothing starts on it; where nothing is routed,
    or softly, there is no target and nothing is held up to it; routes that learn from the chosen
    expert alone are drawn to the end; experts with projections of their own are chosen per token;
    what presses a prior-free controller is its cost, when the KL would have; and a KL weight that
    is given alone presses in place of the recipe's cost, as the KL does where routes are not hard;
    a KL that goes again before routes are taken goes with that moment, and stays where no cost
    presses beside it.
    A task of text takes the place of one with a vocabulary of its own, or the other way round,
    together with a tokenizer. In shorter blocks, the windows of a recipe that has
    several are narrower.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    settings, changed = RECIPES[recipe](), dict(overrides)
    if "steps" in changed and changed["steps"] > 0:
        changed.setdefault("warmup", min(settings.warmup, changed["steps"] // 10))
    if "layer_experts" not in changed:
        if "experts" in changed:
            changed["layer_experts"] = None
        else:
            changed |= _fit_windows(settings, changed)
    if changed.get("controller") == "prior_free" and settings.cost_weight.end == 0.0:
        changed.setdefault("cost_weight", settings.kl_weight)
    is_hard = changed.get("routing", settings.routing) == "hard"
    has_prior = changed.get("controller", settings.controller) == "bayesian"
    is_swapped = has_prior and ("kl_weight" in changed or not is_hard)
    if is_swapped and settings.cost_weight.end > 0.0 and "cost_weight" not in changed:
        changed.setdefault("kl_weight", settings.cost_weight)
        changed["cost_weight"] = NO_WEIGHT
    if changed.get("routing") == "soft" and settings.training_weights == "one_hot":
        changed.setdefault("training_weights", "mean")
    by_layer = changed.get("layer_experts", settings.layer_experts)
    layers = by_layer or [changed.get("experts", settings.experts)]
    if "start_expert" not in changed and settings.start_expert not in chain(*layers):
        changed["start_expert"] = None
    is_static = all(len(layer) == 1 for layer in layers)
    if is_static or not is_hard:
        changed.setdefault("target_cost", None)
    if changed.get("target_cost", settings.target_cost) is None:
        changed.setdefault("hold", 0.0)
    if changed.get("route_gradient") == "chosen":
        changed.setdefault("argmax_from", 1.0)
    if settings.kl_weight.peak is not None and "kl_weight" not in changed:
        changed["kl_weight"] = _fit_peak(settings, changed)
    if changed.get("shared_projections") is False:
        changed.setdefault("route_granularity", "token")
    if changed.get("task") is not None:
        own = "task" if not TaskSpec.parse(changed["task"]).is_text else "characters"
        if "task" in (own, settings.tokenizer):
            changed.setdefault("tokenizer", own)
    built = replace(settings, **changed)
    _check_effect(built, overrides)
    _check_windows(layers, built)
    return built


def _fit_peak(settings: Settings, changed: Mapping[str, Any]) -> Schedule:
    """The KL of a recipe that lets it go again, where what it goes with was changed."""
    kl, taken = settings.kl_weight, changed.get("argmax_from", settings.argmax_from)
    assert kl.peak is not None
    if not any(changed.get("cost_weight", settings.cost_weight).values):
        return Schedule(kl.start, kl.peak, kl.begin, kl.turn or kl.finish)
    if taken <= kl.begin:
        return NO_WEIGHT
    return replace(kl, finish=taken, turn=(kl.begin + taken) / 2)


def _check_effect(settings: Settings, given: Mapping[str, Any]) -> None:
    """Refuse what was given and would do nothing: who gave it wants what it is a part of."""
    for name in ("depth_routing", "depth_weight"):
        if name in given and settings.depth_capacity is None:
            raise ConfigError(
                f"{name} is of Mixture of Depths and needs a depth_capacity, the share of tokens "
                "that enter; set it or leave it out"
            )
    if "residual_blocks" in given and settings.residual != "block_attention":
        raise ConfigError(
            "residual_blocks are those of residual='block_attention', got "
            f"residual={settings.residual!r}; set that or leave them out"
        )


def _fit_windows(settings: Settings, changed: Mapping[str, Any]) -> dict[str, Any]:
    """Windows of a recipe that has several, in shorter blocks than its own.

    They keep their share of a block, and so does what they cost of full attention. Where the
    window was given, those that would be no wider are left out.
    """
    length, layers = changed.get("length", settings.length), settings.layer_experts or ()
    has_several = any(":" in name for name in chain(*layers))
    if not has_several or length >= settings.length:
        return {}

    def fit(window: int) -> int:
        return max(1, window * length // settings.length)

    window = changed.get("window_size", fit(settings.window_size))

    def fit_expert(name: str) -> tuple[str, ...]:
        base, is_wide, wide = name.partition(":")
        if not is_wide:
            return (name,)
        return (f"{base}:{fit(int(wide))}",) if fit(int(wide)) > window else ()

    fitted = tuple(tuple(chain(*map(fit_expert, layer))) for layer in layers)
    return {"window_size": window, "layer_experts": fitted}


def _check_windows(layers: Sequence[Sequence[str]], settings: Settings) -> None:
    """Raise where a layer has a choice, and in it a window that every token of a block is in."""
    for name in chain(*(layer for layer in layers if len(layer) > 1)):
        base, _, wide = name.partition(":")
        window = int(wide) if wide.isdecimal() else settings.window_size
        if base == "local" and window >= settings.length - 1:
            raise ConfigError(
                f"the windows of routed layers must be shorter than a block, got {name} of "
                f"{window} tokens in blocks of {settings.length}: that is full attention by "
                "another name; make it narrower, or length larger"
            )


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
