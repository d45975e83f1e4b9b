"""What one model of the study knows of its own routes, in figures.

Shapes: N sequences, T their length; figures are of the T - 1 positions that predict a token.
"""

import json
import platform
import time
from itertools import pairwise
from typing import Any

import torch
from study_classes import TokenTable, explained_by_token, routes_by_token, share_of_full
from study_data import Cache
from study_evaluation import autocast
from study_reading import (
    Predictions,
    Reading,
    Run,
    code,
    full_routes,
    in_domain,
    permutations,
    predict,
    predict_all,
    read,
    shuffled,
)
from study_run import RESULT
from torch import Tensor

from meta_attention import MetaAttentionForCausalLM
from meta_attention.evaluation.beliefs import watch_beliefs
from meta_attention.evaluation.calibration import expected_calibration_error
from meta_attention.evaluation.detection import mean_interval, measure_auroc, quantile_classes
from meta_attention.evaluation.forcing import RouteJudge, attention_layers
from meta_attention.evaluation.perplexity import evaluating
from meta_attention.evaluation.routing import routed_as

HURTS, TOP = 0.1, 0.1  # nats by which hard routing hurts; share of tokens it hurts most
TIE = 1e-3  # nats; experts that see the same differ by rounding
STRATA = 10
MIN_BATCH = 1 << 13  # tokens
SHARP = 0.05  # of the steps
PASSED_BY = (
    "tokens pass blocks by: what needs a route of every token is None, and of a block that a token "
    "passed by, its signals are those of the prior"
)
Figures = dict[str, Any]


class Measurement:
    """One model on the study's validation text.

    Args:
        run: The run.
        cache: Its text.
        device: Where.
        num_tokens: Of each corpus.
        num_resamples: Draws of sequences behind every interval.
        seed: Of these draws and of everything shuffled.
    """

    def __init__(
        self,
        run: Run,
        cache: Cache,
        device: str,
        *,
        num_tokens: int,
        num_resamples: int,
        seed: int = 0,
    ) -> None:
        self.run, self.cache, self.seed = run, cache, seed
        self.num_resamples = num_resamples
        self.length = run.scale.length
        # no gradients are kept, so that short sequences may go together
        self.batch_size = max(run.scale.batch_size, MIN_BATCH // self.length)
        self.model: MetaAttentionForCausalLM = run.load(device)
        self.texts = in_domain(cache, self.length, num_tokens, device)
        self.ids = torch.cat(list(self.texts.values()))

    def measure(self) -> Figures:
        begin = time.perf_counter()
        with evaluating(self.model):
            reading = read(self.model, self.ids, self.batch_size)
            is_routed = bool(reading.routes)
            with routed_as(self.model, "soft"):
                soft = predict_all(self.model, self.ids, self.batch_size)
            figures: Figures = {
                "num_sequences": len(self.ids),
                "num_tokens": reading.predictions.loss.numel(),
                "length": self.length,
                "loss": {
                    "hard": reading.predictions.loss.mean().item(),
                    "soft": soft.loss.mean().item(),
                },
                "calibration": self.calibration(reading.predictions, soft, is_routed),
                "shift": self.shift(reading),
                "emergence": emergence(self.run.metrics, self.run.scale.steps),
            }
            if is_routed:
                harm = reading.predictions.loss - soft.loss
                figures["hurts"] = {"soft": self.hurts(reading, harm), "full": None}
                figures["loss"]["full"] = None
                figures |= dict.fromkeys(("classes", "explained", "adaptive"))
                layers = attention_layers(self.model)
                config = self.model.config
                is_passed_by = any(config.may_skip(layers[i].layer_idx) for i in reading.routes)
                figures["note"] = PASSED_BY if is_passed_by else None
                if not is_passed_by:
                    self.add_routes(figures, reading)
        settings = self.run.settings
        trained = json.loads((self.run.folder / RESULT).read_text())
        return {
            **{name: settings[name] for name in ("variant", "seed", "scale")},
            "repeat": self.run.scale.repeat,
            "controller": self._controller(settings["routing"]) if is_routed else "static",
            # of the whole validation text, as the study has them
            "validation_loss": trained["hard"]["loss"],
            "train_loss": trained["train_loss"],
            "adaptivity": trained["hard"]["routing"]["adaptivity"],
            **figures,
            "num_resamples": self.num_resamples,
            "device": torch.cuda.get_device_name() if self.ids.is_cuda else "cpu",
            "torch": torch.__version__,
            "python": platform.python_version(),  # whose library is the code
            "seconds": time.perf_counter() - begin,
        }

    def add_routes(self, figures: Figures, reading: Reading) -> None:
        """What needs a route of every token in every routed layer."""
        everywhere = full_routes(self.model, reading.routes)
        full = predict_all(self.model, self.ids, self.batch_size, everywhere).loss
        table = TokenTable(self.cache, str(self.model.device))
        families = table.families(reading, self.run.scale.window_size)
        figures["loss"]["full"] = full.mean().item()
        figures["hurts"]["full"] = self.hurts(reading, reading.predictions.loss - full)
        figures["classes"] = share_of_full(self.model, reading, families)
        figures["explained"] = explained_by_token(reading)
        figures["adaptive"] = self.adaptive(reading)

    def hurts(self, reading: Reading, harm: Tensor) -> Figures:
        """Do signals know where routes cost nats? ``harm`` is what they cost [N, T - 1]."""
        cut = harm.flatten().kthvalue(max(1, round((1.0 - TOP) * harm.numel()))).values
        definitions = {f"above {HURTS}": harm > HURTS, f"top {TOP:.0%}": harm > cut}
        mean, low, high = mean_interval(harm, num_resamples=self.num_resamples, seed=self.seed)
        strata = quantile_classes(reading.predictions.entropy, STRATA)
        return {
            "mean": {"value": mean, "low": low, "high": high},
            "definitions": {
                name: {
                    "share": is_hurt.float().mean().item(),
                    **self.detect(
                        all_layers(reading.signals),
                        {k: v for k, v in baselines(reading).items() if k != "loss"},
                        is_hurt,
                        strata,
                    ),
                }
                for name, is_hurt in definitions.items()
            },
        }

    def shift(self, reading: Reading) -> Figures:
        """Do signals know a foreign text, and what the model's own predictions do not?"""
        foreign = {
            "code": code(self.cache, self.length, len(self.ids)).to(self.ids.device),
            "shuffled": shuffled(self.ids, self.seed),
        }
        pairs = {
            name: (reading, read(self.model, ids, self.batch_size)) for name, ids in foreign.items()
        }
        if len(self.texts) > 1:
            # the milder shift: text of another kind, of which the model has also seen much
            (first, one), (second, other), *_ = self.texts.items()
            pairs[f"{second} against {first}"] = (
                reading.of(slice(len(one))),
                reading.of(slice(len(one), len(one) + len(other))),
            )
        result: Figures = {}
        for name, (known, strange) in pairs.items():
            signals = _joined(all_layers(known.signals), all_layers(strange.signals))
            plain = _joined(baselines(known), baselines(strange))
            is_strange = torch.arange(len(known.ids) + len(strange.ids)) >= len(known.ids)
            is_strange = is_strange.to(self.ids.device).unsqueeze(1)
            result[name] = {"sequences": [len(known.ids), len(strange.ids)]}
            result[name]["loss"] = [r.predictions.loss.mean().item() for r in (known, strange)]
            for level in ("token", "sequence"):
                if level == "sequence":
                    signals, plain = _sequence_means(signals), _sequence_means(plain)
                entropy = plain["predictive entropy"]
                result[name][level] = self.detect(
                    signals,
                    plain,
                    is_strange.expand_as(entropy),
                    # sequences are too few to compare within tenths
                    quantile_classes(entropy, STRATA) if level == "token" else None,
                )
        return result

    def detect(
        self,
        signals: dict[str, dict[str, Tensor]],
        plain: dict[str, Tensor],
        is_positive: Tensor,
        strata: Tensor | None,
    ) -> Figures:
        """AUROC of signals and of what needs no router; and among tokens of like entropy."""

        def measured(scores: Tensor, within: Tensor | None = None) -> dict[str, float | None]:
            return measure_auroc(
                scores,
                is_positive,
                strata=within,
                num_resamples=self.num_resamples,
                seed=self.seed,
            ).to_dict()

        result: Figures = {
            "signals": {
                name: {layer: measured(scores) for layer, scores in layers.items()}
                for name, layers in signals.items()
            },
            "baselines": {name: measured(scores) for name, scores in plain.items()},
        }
        if strata is not None:
            result["beyond_entropy"] = {
                name: {layer: measured(layers[layer], strata) for layer in ("max", "mean")}
                for name, layers in signals.items()
            }
        return result

    def _controller(self, routing: Figures) -> str:
        """What chooses: of a model whose heads keep their experts, nothing does."""
        return "fixed" if routing.get("is_fixed") else str(routing["controller"])

    def calibration(self, hard: Predictions, soft: Predictions, is_routed: bool) -> Figures:
        """Calibration error of predictions, and of "the top expert is the best"."""
        result: Figures = {
            "ece": {
                name: expected_calibration_error(made.confidence, made.is_correct)
                for name, made in (("hard", hard), ("soft", soft))
            },
            "routing": None,
        }
        return result | {"routing": self.judge().verdict().to_dict()} if is_routed else result

    def judge(self) -> RouteJudge:
        """Every expert of every layer forced in turn."""
        judge = RouteJudge(self.model, tie=TIE)
        for batch in self.ids.split(self.batch_size):

            def rescore(batch: Tensor = batch) -> Tensor:
                return predict(self.model, batch).loss.flatten()

            with watch_beliefs(self.model) as beliefs, autocast(str(batch.device)):
                out = self.model.model(
                    batch, use_cache=False, output_losses=False, output_routing=True
                )
            # hard, so that they say who has a route at all, but not how sure of it one is
            weights = [weight[:, :-1].flatten(0, 1) for weight in out.routing_weights]
            for layer, posterior in beliefs.items():
                has_passed = weights[layer].sum(dim=-1, keepdim=True) == 0.0
                belief = posterior.mean[:, :-1].flatten(0, 1)
                weights[layer] = belief.masked_fill(has_passed, 0.0)
            judge.add(rescore(), weights, rescore)
        return judge

    def adaptive(self, reading: Reading) -> Figures:
        """What it costs when tokens take the routes of other tokens."""
        everywhere = full_routes(self.model, reading.routes)
        result: Figures = {}
        for name, swap in swapped_routes(self.model, reading, self.seed).items():
            loss = predict_all(self.model, self.ids, self.batch_size, swap).loss
            mean, low, high = mean_interval(
                loss - reading.predictions.loss, num_resamples=self.num_resamples, seed=self.seed
            )
            full = [(swap[layer] == everywhere[layer]).float().mean() for layer in everywhere]
            result[name] = {
                "loss": loss.mean().item(),
                "cost": {"value": mean, "low": low, "high": high},  # nats above its own routes
                "full": torch.stack(full).mean().item() if full else None,
            }
        return result


def swapped_routes(
    model: MetaAttentionForCausalLM, reading: Reading, seed: int
) -> dict[str, dict[int, Tensor]]:
    """Routes of other tokens, in all layers of the same one, by how much these have in common."""
    routes, ids = reading.routes, reading.ids
    order = permutations(ids, seed)
    row = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    generator = torch.Generator().manual_seed(seed + 1)
    anyone = torch.randint(ids.numel(), ids.shape, generator=generator).to(ids.device)
    num_experts = [len(layer.expert_names) for layer in attention_layers(model)]
    return {
        # as a check: their own
        "own": routes,
        # of any token of the sequence, so that shares stay what they are
        "shuffled": {layer: expert[row, order] for layer, expert in routes.items()},
        # of the token at the same place in another text: only the place is known
        "another text": {layer: expert.roll(1, dims=0) for layer, expert in routes.items()},
        # of any token anywhere
        "random": {layer: expert.flatten(0, 1)[anyone] for layer, expert in routes.items()},
        # of most tokens like it: only the token is known, nothing of its context
        "token alone": routes_by_token(reading, num_experts),
    }


def all_layers(signals: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Each signal by routed layer, its maximum over them and its mean [N, T - 1]."""
    return {
        name: {f"routed layer {index}": layer for index, layer in enumerate(values)}
        | {"max": values.amax(dim=0), "mean": values.mean(dim=0)}
        for name, values in signals.items()
    }


def baselines(reading: Reading) -> dict[str, Tensor]:
    """Uncertainty that needs no router; the loss needs to know what comes next."""
    made = reading.predictions
    plain = {"predictive entropy": made.entropy, "1 - top probability": 1.0 - made.confidence}
    return plain | {"loss": made.loss}


def emergence(rows: list[dict[str, float]], steps: int) -> Figures:
    """How suddenly routes became sure and cheap: see :func:`sharpest_fall`."""
    names = ("routing_entropy", "believed_cost", "routed_cost", "loss")
    curves = {name: [row[name] for row in rows if name in row] for name in ("step", *names)}
    return {
        "curves": curves,
        # runs from before it was written have none
        "sharpest": {
            name: sharpest_fall(curves["step"], curves[name], SHARP * steps)
            for name in names
            if len(curves[name]) == len(rows)
        },
    }


def sharpest_fall(steps: list[float], values: list[float], within: float) -> Figures | None:
    """The largest share of the whole fall that happens ``within`` so many steps, and where.

    The whole fall is the largest from any value to a later one. A straight line has a share of
    ``within`` over all steps, a jump has 1. None if nothing falls. Nothing is known of less than
    the steps between two values.
    """
    within = max([within, *(b - a for a, b in pairwise(steps))])
    step, value = (torch.tensor(row, dtype=torch.float64) for row in (steps, values))
    fall = value.unsqueeze(1) - value  # from a row to a column
    ahead = step - step.unsqueeze(1)
    fall = fall.masked_fill(ahead <= 0, 0.0)
    whole = fall.max().item() if len(values) else 0.0
    if whole <= 0.0:
        return None
    inside = fall.masked_fill(ahead > within, 0.0)
    index = int(inside.argmax())
    first, last = divmod(index, len(values))
    share = inside.max().item() / whole
    where = {"from": steps[first], "to": steps[last], "within": within}
    return {"fall": whole, "share": share, **where}


def _joined(first: Any, second: Any) -> Any:
    """Scores of two texts, one after the other, in dictionaries of any depth."""
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    return {name: _joined(first[name], second[name]) for name in first}


def _sequence_means(scores: Any) -> Any:
    if isinstance(scores, Tensor):
        return scores.mean(dim=1, keepdim=True)
    return {name: _sequence_means(values) for name, values in scores.items()}
