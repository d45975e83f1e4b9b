"""What is compared, as data: variants one word of config apart, and experiments made of them.

A variant is a name and the settings in which it differs from the paper's Tiny LM. An experiment is
a question and the variants that answer it. Variants of the same settings have the same name, so
that experiments share their runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from meta_attention.errors import ConfigError
from meta_attention.training.data import HOLDOUT
from meta_attention.training.model_settings import Settings
from meta_attention.training.recipes import ADAPTIVE, tiny
from meta_attention.training.schedule import Schedule
from meta_attention.training.settings import NO_WEIGHT

Layout = Literal["own", "shared"]
Probe = Literal["gradients"]

# text of the paper's benchmark
MAX_BYTES = 1_000_000
# what the recommended recipe is steered to, in operations of attention: between local attention
# alone and a static hybrid
TARGET_COST = 0.35
# late and steered; a higher one pulls so small a model back onto the prior
PRESSURE = Schedule(0.0, 0.01, 0.5, 0.75)
# the steered weight of a cost has no prior to be pulled onto
COST_PRESSURE = Schedule(0.0, 0.1, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to train the Tiny LM.

    Args:
        name: Of its runs' folders, and in every table.
        title: In a few words.
        changes: Settings that differ from the paper's.
        value: Where it stands on the axis of its experiment, if that has one.
        repeats: How often training shall go through its text; None: as it comes.
        probes: What is measured in training beside the usual.
    """

    name: str
    title: str
    changes: Mapping[str, Any]
    value: float | str | None = None
    repeats: int | None = None
    probes: tuple[Probe, ...] = ()

    @property
    def is_static(self) -> bool:
        """Whether no layer has a choice."""
        layers = self.changes.get("layer_experts") or [self.changes.get("experts", ("a", "b"))]
        return all(len(layer) == 1 for layer in layers)

    def in_layout(self, layout: Layout) -> "Variant":
        """With projections of each expert's own, as the paper has it, or shared ones.

        A layer of one expert has one set either way.
        """
        if layout == "own" or self.is_static:
            return self
        return replace(
            self,
            name=f"{self.name}-shared",
            title=f"{self.title}, shared projections",
            changes={**self.changes, "shared_projections": True},
        )

    def settings(self, base: Settings, seed: int) -> Settings:
        """All settings of one run."""
        settings = replace(base, seed=seed, **self.changes)
        if self.repeats is None:
            return settings
        # characters of ASCII are bytes; a twentieth is held out, and the same from all repeats
        seen = settings.steps * settings.batch_size * settings.length
        return replace(
            settings, train_bytes=-(-seen // self.repeats), max_bytes=round(seen / (1.0 - HOLDOUT))
        )


RECOMMENDED: dict[str, Any] = {
    **ADAPTIVE,
    "kl_weight": PRESSURE,
    "target_cost": TARGET_COST,
    # as counted at 64 tokens. By the paper's, linear attention is the cheapest: the prior pulls
    # tokens onto it, where local attention is cheaper and better
    "expert_costs": "flops",
}
PRIOR_FREE: dict[str, Any] = {"controller": "prior_free", "kl_weight": NO_WEIGHT}

VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("bayesian", "Bayesian as in the paper, KL weight 1", {}),
        Variant(
            "bayesian-sampled",
            "Bayesian, weights sampled in training",
            {"training_weights": "sample"},
        ),
        Variant("prior-free", "prior-free", PRIOR_FREE),
        Variant(
            "prior-free-cost",
            "prior-free, trained hard, steered to the recommended recipe's cost",
            {**RECOMMENDED, **PRIOR_FREE, "cost_weight": COST_PRESSURE},
        ),
        Variant("recommended", "Bayesian, our recipe: trained hard, KL late, steered", RECOMMENDED),
        Variant("full", "full attention only", {"experts": ("full",)}),
        Variant("local", "local attention only", {"experts": ("local",)}),
        Variant("linear", "linear attention only", {"experts": ("linear",)}),
        Variant(
            "hybrid",
            "static hybrid: a local layer, then a full one",
            {"layer_experts": (("local",), ("full",))},
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question, and the variants that answer it.

    Args:
        name: As it is asked for.
        question: In one sentence.
        variants: In the order of its table.
        axis: What its variants' values are, if they stand on an axis.
    """

    name: str
    question: str
    variants: tuple[Variant, ...]
    axis: str | None = None


def _sweep(
    name: str, question: str, axis: str, setting: str, values: Sequence[float], default: float
) -> Experiment:
    """The paper's variant with one setting at each of several values."""
    variants = []
    for value in values:
        if value == default:
            variants.append(replace(VARIANTS["bayesian"], value=value))
            continue
        changed = Schedule.constant(value) if setting == "kl_weight" else value
        variants.append(
            Variant(f"{name}-{value:g}", f"{axis} {value:g}", {setting: changed}, value)
        )
    return Experiment(name, question, tuple(variants), axis)


def _with_gradients(name: str) -> Variant:
    variant = VARIANTS[name]
    return replace(variant, name=f"{name}-gradients", probes=("gradients",))


_SSM: dict[str, Any] = {"experts": ("full", "ssm", "local")}
# of two blocks, the second may be passed by
_DEPTH: dict[str, Any] = {"depth_capacity": 0.5}
_RESIDUALS: dict[str, Any] = {"residual": "attention"}

_SCHEDULES = {
    "1": "bayesian",
    "0.1": "kl-weight-0.1",
    "0->1": "kl-schedule-rising",
    "0->1@0.5:0.75": "kl-schedule-late",
    "0->0.1@0.5:0.75": "kl-schedule-late-0.1",
    "1->0": "kl-schedule-falling",
}

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "ablation",
            "Does the Bayesian prior do what the paper says, and does it beat plain baselines?",
            tuple(VARIANTS.values()),
        ),
        _sweep(
            "kl-weight",
            "How much of the KL does it take to collapse the posterior onto the prior?",
            "KL weight",
            "kl_weight",
            (0.0, 0.001, 0.01, 0.1, 0.3, 1.0),
            1.0,
        ),
        _sweep(
            "prior-strength",
            "How sensitive is the paper's recipe to the strength of its prior?",
            "prior strength",
            "prior_strength",
            (0.1, 0.3, 1.0, 3.0, 10.0),
            1.0,
        ),
        _sweep(
            "prior-floor",
            "How sensitive is the paper's recipe to the floor of its prior?",
            "prior floor",
            "prior_floor",
            (0.001, 0.01, 0.1, 0.5),
            0.01,
        ),
        _sweep(
            "window",
            "How much does the reach of local attention matter?",
            "window",
            "window_size",
            (4, 8, 16, 32),
            8,
        ),
        Experiment(
            "threshold",
            "What do quality and cost become when the gate's threshold rises, by each uncertainty?",
            tuple(VARIANTS[name] for name in ("bayesian", "prior-free", "recommended")),
        ),
        Experiment(
            "gradient-variance",
            "How much noise does sampling the Dirichlet add to the controller's gradient?",
            tuple(map(_with_gradients, ("bayesian", "bayesian-sampled", "recommended"))),
        ),
        Experiment(
            "kl-schedule",
            "Does a schedule of the KL weight keep the posterior off the prior?",
            tuple(
                Variant(name, f"KL weight {text}", {"kl_weight": Schedule.parse(text)}, text)
                if name != "bayesian"
                else replace(VARIANTS[name], value=text)
                for text, name in _SCHEDULES.items()
            ),
        ),
        Experiment(
            "empirical-prior",
            "Does a prior whose strength each layer estimates from the text do better?",
            (
                VARIANTS["bayesian"],
                Variant("empirical-prior-1", "estimated, KL weight 1", {"empirical_prior": True}),
                Variant(
                    "kl-weight-0.1", "KL weight 0.1", {"kl_weight": Schedule.constant(0.1)}, 0.1
                ),
                Variant(
                    "empirical-prior-0.1",
                    "estimated, KL weight 0.1",
                    {"empirical_prior": True, "kl_weight": Schedule.constant(0.1)},
                ),
            ),
        ),
        Experiment(
            "repetition",
            "Does repeated text make routing entropy drop earlier, and all at once?",
            tuple(
                replace(
                    VARIANTS[name],
                    name=f"repetition-{name}-{repeats}",
                    title=f"{name}, text seen {repeats} times",
                    value=repeats,
                    repeats=repeats,
                )
                for name in ("bayesian", "prior-free")
                for repeats in (1, 2, 4, 8, 16, 32)
            ),
            "times the text is seen",
        ),
        Experiment(
            "composition",
            "What do other experts, passing blocks by and Attention Residuals add to our recipe?",
            (
                VARIANTS["recommended"],
                Variant("with-ssm", "ssm in place of linear", {**RECOMMENDED, **_SSM}),
                Variant(
                    "with-gated-full",
                    "gated_full in place of full",
                    {
                        **RECOMMENDED,
                        "experts": ("gated_full", "linear", "local"),
                        "start_expert": "gated_full",
                    },
                ),
                Variant("with-depth", "half of the tokens enter", {**RECOMMENDED, **_DEPTH}),
                Variant(
                    "with-depth-gate",
                    "all tokens enter, by a gate",
                    {**RECOMMENDED, "depth_capacity": 1.0},
                ),
                Variant("with-residuals", "Attention Residuals", {**RECOMMENDED, **_RESIDUALS}),
                Variant(
                    "with-all-three",
                    "ssm, half of the tokens enter, Attention Residuals",
                    {**RECOMMENDED, **_SSM, **_DEPTH, **_RESIDUALS},
                ),
                VARIANTS["full"],
                Variant(
                    "gated-full",
                    "gated full attention only",
                    {"experts": ("gated_full",), "expert_costs": "flops"},
                ),
                Variant("ssm", "ssm only", {"experts": ("ssm",), "expert_costs": "flops"}),
            ),
        ),
    )
}


def paper_base() -> Settings:
    """The paper's Tiny LM, as all variants have it."""
    return replace(tiny(), max_bytes=MAX_BYTES, eval_every=2000, save_every=500)


def short_base() -> Settings:
    """Half its width and batch, a third of its text, few steps: minutes on a CPU, and no result."""
    return replace(
        paper_base(),
        max_bytes=350_000,
        hidden_size=64,
        batch_size=16,
        steps=300,
        lr=3e-3,
        warmup=30,
        eval_every=300,
        save_every=150,
    )


def with_steps(base: Settings, steps: int) -> Settings:
    """The same for another number of steps; evaluated at the end, saved four times."""
    warmup = min(base.warmup, steps // 10)
    every = max(1, -(-steps // 4))
    return replace(base, steps=steps, warmup=warmup, eval_every=steps, save_every=every)


def find_variants(names: Sequence[str]) -> list[Variant]:
    """Variants of the ablation by name."""
    for name in names:
        if name not in VARIANTS:
            raise ConfigError(f"variant must be one of {', '.join(VARIANTS)}, got {name!r}")
    return [VARIANTS[name] for name in dict.fromkeys(names)]


def find_experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise ConfigError(f"experiment must be one of {', '.join(EXPERIMENTS)}, got {name!r}")
    return EXPERIMENTS[name]
