"""A model of the study between two steps: trained, saved, and given to a variant that goes on.

Shapes: B sequences, T their length.
"""

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from study_data import Cache, draw_sequences
from study_evaluation import autocast
from study_fixed_heads import FixedHeads, choose_heads
from study_rule import RuledHeads, follow_rule
from study_variants import Scale, Variant
from torch import Tensor, nn

from meta_attention import MetaAttentionForCausalLM
from meta_attention.controller.controllers import MLPController
from meta_attention.controller.posterior import ValuePosterior
from meta_attention.errors import ConfigError, DataError
from meta_attention.objective import routing_loss
from meta_attention.training.economy import WINDOW, Economy
from meta_attention.training.route import learn_beside
from meta_attention.training.values import (
    NEARLY,
    REPRICED_EVERY,
    find_price,
    is_of_router,
    learn_values,
    value_controllers,
)

WARMUP = 0.05  # of the steps
# before a step is captured: kernels are compiled, the optimiser's state exists
PLAIN_STEPS = 3
# sequences of the training text on which experts of heads are compared
CHOOSING_SEQUENCES = 32
# of the training text on which a price is found, at the end and while the model learns on
PRICING_BATCHES, FEW_BATCHES = 16, 4
# of the steps to learn values, how many come first where the model learns on
FIRST_VALUES = 2 / 3
WEIGHT_DECAY, BETAS, MAX_NORM = 0.1, (0.9, 0.95), 1.0


class Training:
    """A model with its optimiser and its economy, between two steps.

    Args:
        cache: Text to train on.
        variant: What to train.
        scale: Its sizes.
        seed: Of weights, text and routes.
        device: Where.
        compile: Compile the blocks, which takes a while at the first step.
    """

    def __init__(
        self,
        cache: Cache,
        variant: Variant,
        scale: Scale,
        seed: int,
        device: str,
        *,
        compile: bool = False,
    ) -> None:
        self.variant, self.scale, self.seed, self.device = variant, scale, seed, device
        torch.manual_seed(seed)
        config = variant.model_config(scale, cache.vocab_size)
        self.model = MetaAttentionForCausalLM(config).train()
        self.model.to(torch.device(device))
        if variant.is_blind:
            self._blind_controllers()
        self.heads: FixedHeads | None = None
        self.prices: dict[str, float] | None = None
        if variant.is_rule and variant.target is None:
            follow_rule(self.model)
        elif variant.is_rule:
            self.heads = RuledHeads(self.model)
        elif variant.is_fixed:
            self.heads = FixedHeads(self.model)
        self._is_in_step = False
        if variant.is_shuffled:
            for controller in value_controllers(self.model):
                controller.register_forward_hook(self._shuffle)
        if compile:
            for block in self.model.model.layers:
                block.compile()
        names = ("kl_weight", "cost_weight", "hold", "lr", "router_lr")
        self.knobs = {name: torch.zeros((), device=device) for name in names}
        is_cuda = device == "cuda"
        self.groups = self._groups()
        self.optimiser = torch.optim.AdamW(
            [
                group | {"lr": self.knobs[name] if is_cuda else scale.lr}
                for name, group in self.groups
            ],
            betas=BETAS,
            weight_decay=0.0,
            fused=is_cuda,
            capturable=is_cuda,
        )
        pressure = variant.pressure(scale)
        is_steered = variant.is_routed and not variant.is_rule and not variant.priced
        self.economy = Economy(scale.steps, pressure, variant.target if is_steered else None)
        # of every corpus the beginning, so that more repetitions see a part of what fewer see
        texts = cache.tokens("train", device).values()
        self.text = torch.cat([text[: len(text) // scale.repeat] for text in texts])
        if len(self.text) <= scale.length:
            raise DataError(
                f"the training text must have more than {scale.length} tokens, got "
                f"{len(self.text)}; prepare a larger cache, or lower repeat"
            )
        self.ids = torch.zeros(scale.batch_size, scale.length, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.figures: Tensor
        self._plain_steps = 0
        self.steps_done = 0
        self.seconds = 0.0

    @torch.no_grad()
    def _blind_controllers(self) -> None:
        """Hidden units that are the same for every token; what is made of them is learnt."""
        for block in self.model.model.layers:
            if isinstance(block.attention.controller, MLPController):
                first = block.attention.controller.mlp[0]
                nn.init.zeros_(first.weight)  # type: ignore[arg-type]
                nn.init.ones_(first.bias)  # type: ignore[arg-type]
                first.requires_grad_(False)

    def _shuffle(self, _: nn.Module, __: Any, found: ValuePosterior) -> ValuePosterior:
        """What a token is routed by, of another of its text; all heads of the same one."""
        if not self._is_in_step:
            return found
        order = torch.rand(found.mean.shape[:2], device=found.mean.device).argsort(dim=1)
        index = order[..., *(None,) * (found.mean.dim() - 2)].expand_as(found.mean)
        mean, score = found.mean.gather(1, index), found.score.gather(1, index)
        return replace(found, mean=mean, score=score)

    def choose_heads(self) -> None:
        """Give heads that differ the experts that suit the model as it is, if there are any."""
        if self.heads is not None:
            torch.manual_seed(self.seed)
            assert self.variant.target is not None
            ids = self.batch(CHOOSING_SEQUENCES)
            choose_heads(self.heads, self.model, ids, self.variant.target)

    def take(self, weights: dict[str, Tensor]) -> None:
        """Those of a model that has no routes."""
        found = self.model.load_state_dict(weights, strict=False)
        new = [name for name in found.missing_keys if not is_of_router(name)]
        assert not new, new
        assert not found.unexpected_keys, found.unexpected_keys

    def learn_values(self, part: float = 1.0) -> list[dict[str, float]]:
        """What experts are worth to the model as it is; means of ten steps each.

        Args:
            part: Of the steps to learn values.
        """
        scale = self.scale
        share = part * scale.value_steps * self.variant.value_share
        num_steps = max(1, round(share * scale.steps))
        before = self.prices or {"value_tokens": 0, "value_seconds": 0.0}
        # of no step before
        torch.manual_seed(1_000_003 * (self.seed + 1) - (3 if self.prices else 1))
        rows: list[dict[str, float]] = []
        seen: list[dict[str, float]] = []
        begin, done = time.perf_counter(), 0

        def learn(number: int, target_cost: float | None = None) -> None:
            nonlocal done

            def keep(step: int, figures: dict[str, float]) -> None:
                seen.append(figures)
                if step % WINDOW == 0 or step == number:
                    means = {name: statistics.mean(f[name] for f in seen) for name in figures}
                    rows.append({"step": done + step} | means)
                    seen.clear()

            learn_values(
                self.model,
                (self.batch() for _ in range(number)),
                num_steps=number,
                lr=scale.value_lr,
                texts=() if target_cost is None else self._pricing_texts(FEW_BATCHES),
                target_cost=target_cost,
                autocast=torch.bfloat16 if self.device == "cuda" else None,
                on_step=keep,
            )
            done += number

        if not self.variant.around_own:
            learn(num_steps)
        elif self.prices is None:
            assert self.variant.target is not None
            learn_beside(num_steps, self.variant.target, learn)
        else:
            learn(num_steps, self.variant.target)
        self.prices = before | {
            "value_tokens": before["value_tokens"] + num_steps * self.ids.numel(),
            "value_seconds": before["value_seconds"] + time.perf_counter() - begin,
        }
        return rows

    def set_price(self, *, nearly: bool = False) -> None:
        """The price at which routes cost what is asked for."""
        texts = self._pricing_texts(FEW_BATCHES if nearly else PRICING_BATCHES)
        assert self.variant.target is not None
        assert self.prices is not None
        with autocast(self.device):
            price = find_price(
                self.model, texts, self.variant.target, tolerance=NEARLY if nearly else 0.0
            )
        self.prices = self.prices | {"price": price}

    def _pricing_texts(self, number: int) -> list[Tensor]:
        """Batches on which a price is found: the same at any step."""
        with torch.random.fork_rng(devices=[]):
            # as of no step; texts are drawn on the host
            torch.default_generator.manual_seed(1_000_003 * (self.seed + 1) - 2)
            return [self.batch() for _ in range(number)]

    def _groups(self) -> list[tuple[str, dict[str, Any]]]:
        """Parameters that learn alike, and the knob of their learning rate."""
        groups: list[tuple[str, dict[str, Any]]] = []
        for knob in ("lr", "router_lr"):
            of_router = knob == "router_lr"
            mine = [
                p for name, p in self.model.named_parameters() if is_of_router(name) == of_router
            ]
            matrices = [p for p in mine if p.dim() > 1]
            groups += [
                (knob, {"params": matrices, "weight_decay": 0.0 if of_router else WEIGHT_DECAY}),
                (knob, {"params": [p for p in mine if p.dim() <= 1]}),
            ]
        return [(knob, group) for knob, group in groups if group["params"]]

    def batch(self, size: int | None = None) -> Tensor:
        """Sequences from anywhere in the text [B, T], int64."""
        return draw_sequences(self.text, size or self.scale.batch_size, self.scale.length)

    def step(self) -> Tensor:
        """One step; what :meth:`window` takes the means of, on the device."""
        # text and routes of a step depend on nothing before it
        torch.manual_seed(1_000_003 * (self.seed + 1) + self.steps_done)
        self.ids.copy_(self.batch())
        self._turn_knobs()
        if self.graph is None:
            figures = self._compute()
            self._plain_steps += 1
            if self.device == "cuda" and self._plain_steps == PLAIN_STEPS:
                self._capture()
        else:
            self.graph.replay()
            figures = self.figures
        self.steps_done += 1
        return figures

    def _turn_knobs(self) -> None:
        """What changes from step to step, where a captured step reads it."""
        scale, step = self.scale, self.steps_done
        pressure = self.economy.value(self.economy.pressure, step)
        weights = {"kl_weight": self.economy.multiplier * pressure, "cost_weight": 0.0}
        if self.variant.presses_cost:
            kl_weight = self.variant.kl_weight(scale, step) * pressure / scale.cost_weight
            weights = {"kl_weight": kl_weight, "cost_weight": weights["kl_weight"]}
        for name, weight in weights.items():
            self.knobs[name].fill_(weight)
        is_held = self.economy.target is not None and self.economy.has_begun(step)
        self.knobs["hold"].fill_(scale.hold if is_held else 0.0)
        rates = {"lr": learning_rate(scale, step)}
        rates["router_lr"] = scale.router_lr * rates["lr"]
        for name, rate in rates.items():
            self.knobs[name].fill_(rate)
        if self.device != "cuda":
            for (name, _), group in zip(self.groups, self.optimiser.param_groups, strict=True):
                group["lr"] = rates[name]
        if step >= scale.argmax_from * scale.steps:
            if self.model.config.training_weights != "mean":
                # other code: captured again after some plain steps
                self.graph, self._plain_steps = None, 0
            self.model.config.training_weights = "mean"

    def _compute(self) -> Tensor:
        """Forward, backward and update: all of a step that runs on the device."""
        self.optimiser.zero_grad(set_to_none=True)
        self._is_in_step = True
        with autocast(self.device):
            out = self.model(
                self.ids,
                labels=self.ids,
                use_cache=False,
                output_routed_cost=True,
                output_routing_entropy=True,
            )
        self._is_in_step = False
        loss = routing_loss(
            out.task_loss,
            out.kl,
            kl_weight=self.knobs["kl_weight"],
            cost=out.projected_cost,
            cost_weight=self.knobs["cost_weight"],
        )
        loss = loss + self.knobs["hold"] * self.economy.below_target(out.routed_projected_cost)
        if out.depth_loss is not None:
            loss = loss + self.model.config.depth_weight * out.depth_loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimiser.step()
        costs = (out.projected_cost, out.routed_cost, out.routed_projected_cost)
        return torch.stack([out.task_loss, out.kl, *costs, out.routing_entropy, norm]).detach()

    def _capture(self) -> None:
        """Record a step, to be replayed: short kernels would wait for the host to launch them."""
        torch.cuda.synchronize()
        self.optimiser.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.figures = self._compute()

    def window(self) -> dict[str, float]:
        """The steps up to the next multiple of ``WINDOW`` or the end, and their means."""
        begin, first = time.perf_counter(), self.steps_done
        total = torch.zeros(7, device=self.device)
        while True:
            total += self.step()
            if self.steps_done % WINDOW == 0 or self.steps_done == self.scale.steps:
                break
        num_steps = self.steps_done - first
        means = (total / num_steps).tolist()
        # routes are drawn, so what was projected of routed layers is the cost of the belief
        loss, kl, projected_cost, routed_cost, believed_cost, routing_entropy, norm = means
        seconds = time.perf_counter() - begin
        self.seconds += seconds
        if not math.isfinite(loss):
            raise ConfigError(f"the loss must be finite, got {loss}; lower it with --set lr=...")
        if self.economy.is_watched:
            self.economy.observe(self.steps_done, loss, routed_cost)
        if self.variant.trains_on and self.steps_done % REPRICED_EVERY == 0:
            self.set_price(nearly=True)
        return {
            "step": self.steps_done,
            "loss": loss,
            "kl": kl,
            "projected_cost": projected_cost,
            "routed_cost": routed_cost,
            "believed_cost": believed_cost,
            "routing_entropy": 100.0 * routing_entropy,  # percent, as evaluation has it
            "grad_norm": norm,  # before it is clipped
            "pressure": self.economy.value(self.economy.pressure, self.steps_done),
            "multiplier": self.economy.multiplier,
            "lr": learning_rate(self.scale, self.steps_done - 1),
            "step_ms": 1e3 * seconds / num_steps,
            "tokens_per_s": num_steps * self.scale.batch_size * self.scale.length / seconds,
        }

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            # by name, as a variant that goes on has parameters that this one has not
            "optimiser": {
                name: self.optimiser.state[parameter]
                for name, parameter in self.model.named_parameters()
            },
            "economy": self.economy.state(),
            "prices": self.prices,
            "steps_done": self.steps_done,
            "seconds": self.seconds,
        }
        # a run that is killed while it writes has the checkpoint before
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint: of this run, or of what it was before it was routed."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        found = self.model.load_state_dict(state["model"], strict=False)
        new = [name for name in found.missing_keys if not is_of_router(name)]
        if new or found.unexpected_keys:
            raise ConfigError(
                f"a checkpoint must be of the same model but for controllers, and {path} is not: "
                f"{', '.join([*new, *found.unexpected_keys])}"
            )
        for name, parameter in self.model.named_parameters():
            if name in state["optimiser"]:
                self.optimiser.state[parameter] = state["optimiser"][name]
        self.economy.load(state["economy"])
        self.steps_done, self.seconds = state["steps_done"], state["seconds"]
        self.prices = state.get("prices")
        if self.prices is not None:
            self.model.set_price(self.prices["price"])


def learning_rate(scale: Scale, step: int) -> float:
    """Up in a straight line, then down to 0 as a cosine."""
    warmup = max(1, round(WARMUP * scale.steps))
    if step < warmup:
        return scale.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, scale.steps - warmup)
    return scale.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
