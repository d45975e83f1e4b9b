"""What the study compares, as data: sizes of models, and where each variant attends how."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from meta_attention.config import (
    ControllerName,
    MetaAttentionConfig,
    ResidualName,
    RouteGradient,
    RouteGranularity,
    TrainingWeights,
)
from meta_attention.errors import ConfigError
from meta_attention.training.economy import WINDOW
from meta_attention.training.schedule import Schedule

# local*16 has sixteen times the window of local
EXPERTS = {
    "F": ("full",),
    "G": ("gated_full",),
    "L": ("local",),
    "M": ("local*16",),
    "N": ("local*32",),
    "O": ("local*64",),
    "R": ("full", "linear", "local"),
    "S": ("full", "local"),
    "V": ("full", "local*16"),
    "W": ("full", "local*16", "local"),
    "X": ("full", "ssm", "local"),
}
# what a beginning on full attention has no parameters for
NEW_PARAMETERS = {"gated_full", "ssm"}


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a model, its training and its evaluation: the same for all variants."""

    length: int  # of training, T
    window_size: int
    hidden_size: int
    intermediate_size: int
    layers: int  # a multiple of 6, so that every pattern repeats
    heads: int
    kv_heads: int
    batch_size: int
    steps: int
    lr: float
    eval_tokens: int  # of each corpus
    longest: int  # tokens of the longest evaluated sequence, >= length
    save_every: int
    # share of the steps after which layers are routed; by then models have come to read far, and
    # those that are pressed earlier do not
    routed_from: float = 0.6
    ramp: float = 0.1  # share of the steps in which the pressure rises to these weights
    kl_weight: float = 0.02
    cost_weight: float = 0.2
    tilted_kl: float = 0.1  # share of kl_weight that tilted variants keep
    router_lr: float = 3.0  # of controllers, which begin late, as a multiple of lr
    hold: float = 1.0  # weight of falling below the target; see Economy.below_target
    short_conv: int = 3  # taps of the convolution before attention, 0 for none
    argmax_from: float = 1.0  # share of the steps after which routes are no longer drawn
    value_steps: float = 0.3  # more steps, as a share, in which values are learnt and nothing else
    value_lr: float = 3e-3
    repeat: int = 1  # train on 1/repeat of the text, so that equal steps see it more often

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ConfigError(f"repeat must be >= 1, got {self.repeat}")

    @property
    def first_steps(self) -> int:
        """How many steps pass before layers are routed: whole windows of the log."""
        return round(self.routed_from * self.steps / WINDOW) * WINDOW

    @classmethod
    def of_run(cls, settings: dict[str, Any]) -> "Scale":
        """Settings of a run, which may be from before one was added: then it was at its default.

        But for the convolution, which runs without a word of it do not have.
        """
        return cls(**{"short_conv": 0} | settings)

    def with_changes(self, changes: list[str]) -> "Scale":
        """With ``NAME=VALUE`` from a command line."""
        types = {field.name: field.type for field in fields(self)}
        values: dict[str, Any] = {}
        for change in changes:
            name, _, value = change.partition("=")
            if name not in types:
                raise ConfigError(f"a setting must be one of {', '.join(types)}, got {name!r}")
            try:
                values[name] = types[name](value)  # type: ignore[operator]
            except ValueError as error:
                raise ConfigError(f"{name} must be a number, got {value!r}") from error
        return replace(self, **values)


SCALES = {
    # seconds on a CPU: for tests
    "tiny": Scale(
        length=64,
        window_size=8,
        hidden_size=32,
        intermediate_size=64,
        layers=6,
        heads=2,
        kv_heads=2,
        batch_size=2,
        steps=3,
        lr=1e-3,
        eval_tokens=256,
        longest=64,
        save_every=2,
    ),
    # 0.5M parameters, minutes on a core of a CPU; the vocabulary should be small, too
    "mini": Scale(
        length=512,
        window_size=4,
        hidden_size=64,
        intermediate_size=256,
        layers=6,
        heads=4,
        kv_heads=4,
        batch_size=4,
        steps=2000,
        lr=6e-3,
        eval_tokens=1 << 17,
        longest=512,
        save_every=500,
        argmax_from=0.8,
    ),
    # 7.4M parameters; models of this size and training read little beyond 256 tokens, so that a
    # wide window would leave nothing for full attention to do. Gemma 3 has the same share of its
    # longest context: 1024 of 131072
    "small": Scale(
        length=2048,
        window_size=16,
        hidden_size=256,
        intermediate_size=1024,
        layers=6,
        heads=4,
        kv_heads=4,
        batch_size=8,
        steps=3000,
        lr=2e-3,
        eval_tokens=1 << 19,
        longest=2048,
        save_every=5000,
        argmax_from=0.8,
    ),
    # 30M parameters
    "medium": Scale(
        length=4096,
        window_size=32,
        hidden_size=512,
        intermediate_size=1024,
        layers=12,
        heads=8,
        kv_heads=4,
        batch_size=8,
        steps=2000,
        lr=1e-3,
        eval_tokens=1 << 19,
        longest=16384,
        save_every=500,
        argmax_from=0.8,
    ),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """How the layers of a model attend, and what makes its routes cheap.

    Args:
        pattern: A letter per layer, repeated, of ``EXPERTS``: F full, L local, R routed among the
            paper's three experts, S among the two of softmax, and so on.
        controller: Of the routed layers; a prior-free one is pressed by its cost, the other by the
            KL.
        target: Share of full attention's cost that routed layers are steered to.
        granularity: What has a route of its own.
        gradient: ``"chosen"`` trains with the kernels of hard routing, ``"all"`` runs all experts.
        draw: What routes are made from in training.
        widen: Windows are this many times as wide as those of the other variants.
        is_early: As it is from the first step on, without a beginning on full attention.
        is_blind: Controllers do not see tokens: what they learn is one route for a layer, or for
            each of its heads.
        is_fixed: Experts of heads are chosen once, where others begin to route, as the best ones
            that cost no more than the target: a static model whose heads differ.
        priced: Name of a static variant that is trained to its end, without a thought of routes;
            what experts are worth to it is learnt then, while it stays as it is, and the price is
            set that makes it cost what is asked for.
        value_share: Of the scale's steps to learn values, how many it takes.
        trains_on: Values are learnt where other variants begin to route, and the model learns on
            with routes by value; what they are worth then is learnt once more at the end.
        is_shuffled: While it learns on, tokens have the routes of others of their text: as many as
            by value for each head, in other places.
        value_scale: Nats above which values are told apart in relation to their size.
        around_own: Once something is known of values, they are learnt beside routes of the target's
            cost, and no longer beside the dearest experts.
        is_rule: Nothing is learnt to choose: full attention where the last two tokens stood
            together before, beyond the middle window, and that window elsewhere. With a target,
            heads differ, and following the rule is one more expert that a head may have.
        is_tilted: A Bayesian controller is pressed by its cost, too, and the KL keeps a small
            weight. For weights of a softmax that is a prior tilted against what is dear, which may
            be as strong as it must without making routes uncertain.
        kl_course: What becomes of that KL: ``"kept"`` to the end; ``"fading"`` straight to 0 until
            routes are no longer drawn; ``"none"`` from the start, a prior that counts for nothing.
        prior_strength: Scale of the prior, which is part of every belief.
        recurrence: Controllers see when a token was last seen, in runs of up to so many.
        depth_capacity: Share of tokens that enter every other block.
        residual: What blocks read of those before them.
    """

    pattern: str
    controller: ControllerName = "bayesian"
    target: float | None = None
    granularity: RouteGranularity = "token"
    gradient: RouteGradient = "all"
    draw: TrainingWeights = "one_hot"
    widen: int = 1
    is_early: bool = False
    is_blind: bool = False
    is_fixed: bool = False
    is_rule: bool = False
    priced: str | None = None
    value_share: float = 1.0
    trains_on: bool = False
    is_shuffled: bool = False
    value_scale: float | None = None
    around_own: bool = False
    is_tilted: bool = False
    kl_course: Literal["kept", "fading", "none"] = "kept"
    prior_strength: float = 1.0
    recurrence: int | None = None
    depth_capacity: float | None = None
    residual: ResidualName = "sum"

    @property
    def has_beginning(self) -> bool:
        """Whether it goes on from a model of full attention."""
        experts = {name for letter in self.pattern for name in EXPERTS[letter]}
        is_plain = self.depth_capacity is None and self.residual == "sum"
        return is_plain and not self.is_early and not experts & NEW_PARAMETERS

    @property
    def is_routed(self) -> bool:
        """Whether tokens are routed apart, by something learnt or by a rule."""
        return not self.is_fixed and any(len(EXPERTS[letter]) > 1 for letter in self.pattern)

    @property
    def presses_cost(self) -> bool:
        """Whether routes are made cheap by the weight of their cost, not of the KL."""
        return self.controller == "prior_free" or self.is_tilted

    def pressure(self, scale: Scale) -> Schedule:
        """Schedule of the weight that makes routes cheap."""
        if not self.is_routed or self.is_rule or self.priced:
            return Schedule.constant(0.0)
        weight = scale.cost_weight if self.presses_cost else scale.kl_weight
        begin = scale.first_steps / scale.steps
        return Schedule.parse(f"0->{weight}@{begin}:{begin + scale.ramp}")

    def kl_weight(self, scale: Scale, step: int) -> float:
        """Of a KL beside a cost, before it rises with the pressure: the share that is kept."""
        kept = scale.tilted_kl * scale.kl_weight
        if self.kl_course == "kept":
            return kept
        if self.kl_course == "none":
            return 0.0
        risen = scale.first_steps / scale.steps + scale.ramp
        left = (scale.argmax_from - step / scale.steps) / max(scale.argmax_from - risen, 1e-9)
        return kept * min(1.0, max(0.0, left))

    @property
    def beginning(self) -> "Variant":
        """What it is until layers are routed."""
        pattern = "".join("L" if letter == "L" else "F" for letter in self.pattern)
        return Variant(pattern, widen=self.widen)

    @property
    def name(self) -> str:
        """Of a beginning."""
        return self.pattern + (f"-x{self.widen}" if self.widen > 1 else "")

    def work(self) -> float:
        """How long a step takes, roughly, to start long runs first."""
        costs = {"full": 3.0, "linear": 2.0}
        total = 0.0
        for letter in self.pattern:
            work = [costs.get(name, 1.0) for name in EXPERTS[letter]]
            total += sum(work) if self.gradient == "all" else min(3.0, sum(work))
        return total / len(self.pattern)

    def model_config(self, scale: Scale, vocab_size: int) -> MetaAttentionConfig:
        pattern = self.pattern * (scale.layers // len(self.pattern))
        return MetaAttentionConfig(
            vocab_size=vocab_size,
            hidden_size=scale.hidden_size,
            intermediate_size=scale.intermediate_size,
            num_hidden_layers=scale.layers,
            num_attention_heads=scale.heads,
            num_key_value_heads=scale.kv_heads,
            max_position_embeddings=scale.longest,
            tie_word_embeddings=True,
            short_conv=scale.short_conv or None,
            layer_experts=[
                [_in_tokens(name, scale.window_size) for name in EXPERTS[letter]]
                for letter in pattern
            ],
            expert_costs="flops",
            cost_length=scale.length,
            window_size=self.widen * scale.window_size,
            controller=self.controller,
            prior_strength=self.prior_strength,
            value_scale=self.value_scale,
            recurrence=self.recurrence,
            start_expert="full" if self.is_routed else None,
            training_weights=self.draw,
            route_gradient=self.gradient,
            route_granularity=self.granularity,
            routing="hard",
            depth_capacity=self.depth_capacity,
            residual=self.residual,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_run(cls, routing: dict[str, Any]) -> "Variant":
        """Of a run, which may be from before a field was added: then it was at its default."""
        return cls(**routing)


def _in_tokens(name: str, window: int) -> str:
    """``"local*16"`` -> ``"local:256"`` where the window is 16."""
    base, _, times = name.partition("*")
    return f"{base}:{int(times) * window}" if times else base


# what others are compared with, seed by seed
REFERENCE = "hybrid-1-5"
# in a group of layers the full one has layers after it, which can use what it found
HYBRID = "LLLFLL"
# of the routed layers; in all layers, or in the full layers of the hybrid
TARGETS = {
    "all": (0.1, 0.2, 0.4),
    "global": (0.2, 0.4, 0.6),
    "wide": (0.15, 0.3, 0.45, 0.6),
    "half": (0.3, 0.45),
}
# without linear attention, which made every trial worse; "wide" has a middle between all and little
ROUTED_PATTERNS = {
    "all": "S",
    "global": HYBRID.replace("F", "S"),
    "wide": HYBRID.replace("F", "W"),
    # the full layers of the 1:1 hybrid, which has the lowest loss of the static ones
    "half": "LW",
}


def _priced(
    base: str, target: float, granularity: RouteGranularity = "kv_head", recurrence: int | None = 3
) -> Variant:
    pattern = {"hybrid-1-5": HYBRID, "hybrid-1-1": "LF"}[base].replace("F", "V")
    return Variant(
        pattern, "value", target, granularity, draw="mean", priced=base, recurrence=recurrence
    )


def _fixed_heads(pattern: str, cost: float) -> Variant:
    return Variant(pattern, "prior_free", target=cost, granularity="kv_head", is_fixed=True)


def _ruled_heads(pattern: str, cost: float) -> Variant:
    return Variant(
        pattern, "prior_free", target=cost, granularity="kv_head", is_rule=True, recurrence=2
    )


VARIANTS: dict[str, Variant] = {
    "full": Variant("F"),
    "gated-full": Variant("G"),
    "local": Variant("L"),
    "local-x4": Variant("L", widen=4),
    "local-x8": Variant("L", widen=8),
    "hybrid-1-1": Variant("LF"),
    "hybrid-1-2": Variant("LFL"),
    "hybrid-1-5": Variant(HYBRID),
    "hybrid-1-5-last": Variant("LLLLLF"),  # where Gemma 3 has its full layers
    # its full layer narrowed when others are routed, and from the first step
    "hybrid-1-5-x16-late": Variant(HYBRID.replace("F", "M")),
    "hybrid-1-5-x32-late": Variant(HYBRID.replace("F", "N")),
    "hybrid-1-5-x64-late": Variant(HYBRID.replace("F", "O")),
    "hybrid-1-5-x16": Variant(HYBRID.replace("F", "M"), is_early=True),
    "hybrid-1-5-x32": Variant(HYBRID.replace("F", "N"), is_early=True),
    "hybrid-1-1-x16-late": Variant("LM"),
    "hybrid-1-1-x32-late": Variant("LN"),
    # heads of its full layers differ: the best experts for them that cost no more
    "hybrid-1-5-heads-0.45": _fixed_heads(HYBRID.replace("F", "W"), 0.45),
    "hybrid-1-5-heads-0.62": _fixed_heads(HYBRID.replace("F", "W"), 0.62),
    "hybrid-1-1-heads-0.45": _fixed_heads("LW", 0.45),
    # chosen by token, but not by anything learnt
    "rule-wide": Variant(HYBRID.replace("F", "W"), "prior_free", is_rule=True, recurrence=2),
    # and by heads: of all experts for them, following the rule among these, the best
    "rule-1-5-heads-0.45": _ruled_heads(HYBRID.replace("F", "W"), 0.45),
    # where a head may be full and another follow the rule
    "rule-1-5-heads-0.5": _ruled_heads(HYBRID.replace("F", "W"), 0.5),
    "rule-1-1-heads-0.45": _ruled_heads("LW", 0.45),
    "prior-free-all-0.2": Variant("S", "prior_free", target=0.2),
    "prior-free-global-0.4": Variant(HYBRID.replace("F", "S"), "prior_free", target=0.4),
    "prior-free-wide-0.3": Variant(HYBRID.replace("F", "W"), "prior_free", target=0.3),
    "prior-free-wide-kv_head-0.45": Variant(
        HYBRID.replace("F", "W"), "prior_free", target=0.45, granularity="kv_head"
    ),
    "prior-free-half-kv_head-0.45": Variant("LW", "prior_free", target=0.45, granularity="kv_head"),
    # by what experts are worth to a trained hybrid, at a price
    "value-1-5-0.25": _priced("hybrid-1-5", 0.25),
    "value-1-5-0.35": _priced("hybrid-1-5", 0.35),
    "value-1-5-0.45": _priced("hybrid-1-5", 0.45),
    "value-1-5-0.6": _priced("hybrid-1-5", 0.6),
    "value-1-5-token-0.45": _priced("hybrid-1-5", 0.45, "token"),
    "value-1-5-0.45-unseen": _priced("hybrid-1-5", 0.45, recurrence=None),
    "value-1-1-0.35": _priced("hybrid-1-1", 0.35),
    "value-1-1-0.45": _priced("hybrid-1-1", 0.45),
} | {
    f"bayes-{where}-{granularity}-{target}": Variant(
        ROUTED_PATTERNS[where], target=target, granularity=granularity
    )
    for where, targets in TARGETS.items()
    for granularity in ("token", "kv_head")
    for target in targets
}
# by name only, not part of "all": a variant with endings, such as
# bayes-all-token-0.2-linear-sparse; of static ones
STATIC_ENDINGS: dict[str, Callable[[Variant], Variant]] = {
    "depth": lambda v: replace(v, depth_capacity=0.5),
    "residuals": lambda v: replace(v, residual="block_attention"),
}
# and of routed ones
ENDINGS: dict[str, Callable[[Variant], Variant]] = STATIC_ENDINGS | {
    # the paper's three experts
    "linear": lambda v: replace(v, pattern=v.pattern.replace("S", "R")),
    "ssm": lambda v: replace(v, pattern=v.pattern.replace("S", "X")),
    # training saves time too, as only chosen experts run
    "sparse": lambda v: replace(v, gradient="chosen"),
    "thompson": lambda v: replace(v, draw="sample"),
    "argmax": lambda v: replace(v, draw="mean"),
    "tilted": lambda v: replace(v, is_tilted=True),
    "fading": lambda v: replace(v, is_tilted=True, kl_course="fading"),
    "flat": lambda v: replace(v, is_tilted=True, kl_course="none"),
    "weak": lambda v: replace(v, prior_strength=0.1),
    # controllers know whether there is something to find
    "recurrence": lambda v: replace(v, recurrence=3),
    # values in a twentieth of the steps of a training, not in three tenths
    "brief": lambda v: replace(v, value_share=1 / 6),
    # the narrow window is a choice, too
    "wide": lambda v: replace(v, pattern=v.pattern.replace("V", "W")),
    # small values apart as finely as large ones
    "scaled": lambda v: replace(v, value_scale=0.01),
    "on": lambda v: replace(v, trains_on=True),
    # values beside the routes that a model has, not beside all that it could have
    "own": lambda v: replace(v, around_own=True),
    # is it these routes that a model learns from?
    "shuffled": lambda v: replace(v, is_shuffled=True),
    "early": lambda v: replace(v, is_early=True),
    # is it the token that matters, or the head?
    "blind": lambda v: replace(v, is_blind=True),
}
VALUE_ENDINGS = {"brief", "wide", "scaled", "on", "own", "shuffled"}


def find_variant(name: str) -> Variant:
    base, endings = base_and_endings(name)
    variant = VARIANTS[base]
    for ending in endings:
        variant = ENDINGS[ending](variant)
    return variant


def base_and_endings(name: str) -> tuple[str, list[str]]:
    """``"bayes-all-token-0.2-sparse"`` -> that without its ending, and ``["sparse"]``."""
    base: str = name
    endings: list[str] = []
    while base not in VARIANTS:
        ending = next((ending for ending in ENDINGS if base.endswith(f"-{ending}")), None)
        if ending is None:
            raise ConfigError(
                f"variant must be one of {', '.join(VARIANTS)}, or a routed one with "
                f"{', '.join(f'-{ending}' for ending in ENDINGS)}, got {name!r}"
            )
        base = base.removesuffix(f"-{ending}")
        endings.insert(0, ending)
    allowed = VALUE_ENDINGS if VARIANTS[base].priced else set(ENDINGS) - VALUE_ENDINGS
    if set(endings) - allowed:
        raise ConfigError(
            f"{', '.join(f'-{ending}' for ending in sorted(VALUE_ENDINGS))} may follow variants "
            f"that learn values, and nothing else may, got {name!r}"
        )
    if "shuffled" in endings and "on" not in endings:
        raise ConfigError(f"-shuffled is for variants that learn on, with -on, got {name!r}")
    if not VARIANTS[base].is_routed and set(endings) - set(STATIC_ENDINGS):
        raise ConfigError(
            f"variant {base} has no routes, so only {', '.join(STATIC_ENDINGS)} may follow it, got "
            f"{name!r}"
        )
    return base, endings


def place_of(name: str) -> tuple[int, list[str]]:
    """Where a variant stands in tables: as listed above, endings after their base."""
    base, endings = base_and_endings(name)
    return list(VARIANTS).index(base), endings
