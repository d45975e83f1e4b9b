"""What all training runs are told, whatever they train: text, steps, schedules, what is kept."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self

from meta_attention.errors import ConfigError
from meta_attention.training.economy import check_holding
from meta_attention.training.schedule import Schedule

Precision = Literal["fp32", "bf16", "fp16"]

NO_WEIGHT = Schedule.constant(0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Settings that a run is begun with, and with which it goes on."""

    SCHEDULED: ClassVar[tuple[str, ...]] = ("kl_weight", "cost_weight")
    """Settings that may change in the course of training."""
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        {
            *("data", "eval_data", "max_bytes"),
            *("eval_every", "save_every", "log_every"),
            *("grad_accum", "gradient_checkpointing"),
        }
    )
    """A resumed run may change these: where the text lies (its content may not change), how often
    it reports, and how a step is computed, which changes results by rounding only (drawn routes
    aside: other parts of a batch draw others)."""

    # text
    data: tuple[str, ...] = ()
    """Files, folders, globs or hub names; none: Python's own manual. Not for task recall."""
    eval_data: tuple[str, ...] = ()
    """Text to evaluate on; none: a part of the data, held out."""
    max_bytes: int | None = None

    # training
    steps: int
    batch_size: int
    """Blocks per step, over all processes and accumulated parts."""
    grad_accum: int = 1
    """Parts a batch is computed in, one after the other."""
    lr: float
    warmup: int
    """Steps over which the learning rate rises; then it falls as a cosine to 0."""
    weight_decay: float = 0.1
    kl_weight: Schedule
    cost_weight: Schedule = NO_WEIGHT
    target_cost: float | None = None
    """What hard routes shall cost: a share of full attention's cost in the routed layers, counted
    as ``expert_costs`` has it. With ``"flops"`` it is the FLOPs of scores and values at the
    training length, without projections and controller. Steers the weight of the cost where it has
    one, else that of the KL."""
    hold: float = 0.0
    """Weight of the square of the share by which a batch costs less than the target. What makes
    routes cheap can only press less, never pull back."""
    argmax_from: float = 1.0
    """Share of training after which routes are those of evaluation, no longer drawn."""
    seed: int = 0
    precision: Precision = "fp32"
    gradient_checkpointing: bool = False

    # what is kept of it
    eval_every: int
    """Steps between evaluations; 0: none, and the last model counts as the best."""
    save_every: int
    """Steps between checkpoints; the best evaluated model is saved besides."""
    log_every: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "grad_accum", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.eval_every < 0:
            raise ConfigError(f"eval_every must be >= 0, got {self.eval_every}")
        if self.batch_size % self.grad_accum:
            raise ConfigError(
                f"batch_size must be a multiple of grad_accum, got {self.batch_size} and "
                f"{self.grad_accum}: a batch is computed in equal parts"
            )
        if self.lr is not None and not 0.0 < self.lr < float("inf"):
            raise ConfigError(f"lr must be > 0, got {self.lr}")
        if not 0 <= self.warmup <= self.steps:
            raise ConfigError(
                f"warmup must be between 0 and all {self.steps} steps, got {self.warmup}"
            )
        self._check_schedules()
        if self.target_cost is not None and not 0.0 < self.target_cost < 1.0:
            raise ConfigError(
                f"target_cost must be a share between 0 and 1, got {self.target_cost}"
            )
        check_holding(self.hold, self.argmax_from)
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise ConfigError(f"precision must be fp32, bf16 or fp16, got {self.precision!r}")

    def _check_schedules(self) -> None:
        for name in self.SCHEDULED:
            schedule: Schedule | None = getattr(self, name)
            if schedule is None:
                continue
            if schedule.in_steps and schedule.finish > self.steps:
                raise ConfigError(
                    f"{name} must reach its end within the {self.steps} steps of training, got "
                    f"{schedule}"
                )
            if name != "uncertainty_threshold" and min(schedule.values) < 0.0:
                raise ConfigError(f"{name} must be >= 0, got {schedule}")

    @property
    def keeps_best(self) -> bool:
        """Whether the best evaluated model is kept, and not the last."""
        return bool(self.eval_every)

    @property
    def loads_slowly(self) -> bool:
        """Whether blocks take so long to make that this is done while the device works."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as :meth:`from_dict` reads it."""
        return asdict(self) | {
            name: None if getattr(self, name) is None else str(getattr(self, name))
            for name in self.SCHEDULED
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Settings that were written as JSON."""
        known = {field.name for field in fields(cls)}
        kept = {name: _frozen(value) for name, value in values.items() if name in known}
        schedules = {
            name: Schedule.parse(str(kept[name]))
            for name in cls.SCHEDULED
            if kept.get(name) is not None
        }
        return cls(**kept | schedules)

    def differences(self, other: Self) -> dict[str, tuple[Any, Any]]:
        """Settings that differ and that a resumed run may not change: name -> (own, other's)."""
        own, others = self.to_dict(), other.to_dict()
        fixed = own.keys() - self.MAY_CHANGE
        if bool(self.eval_every) != bool(other.eval_every):
            # without evaluation no text is held out
            fixed.add("eval_every")
        return {n: (own[n], others[n]) for n in own if n in fixed and own[n] != others[n]}


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
