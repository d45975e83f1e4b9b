"""Whole models: the prefill of a long prompt, and one training step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meta_attention.bench.data import Mix, fix_routes
from meta_attention.bench.modules import build_model, draw_layers, millions_of, twin_gates
from meta_attention.bench.op_peers import HYBRID, HYBRID_PERIOD, HYBRID_WINDOW
from meta_attention.bench.op_suite import FIFTH, QUARTERS
from meta_attention.bench.rows import FULL_ONLY, ROUTED, SOFT, Gate, Row
from meta_attention.bench.session import Session, Work
from meta_attention.config import MetaAttentionConfig
from meta_attention.evaluation.flops import count_model
from meta_attention.models import MetaAttentionForCausalLM

PREFILL, STEP = "prefill", "training step"


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Sizes of a model and of what it reads."""

    layers: int
    B: int = 1
    T: int = 32768
    hidden_size: int = 1024
    heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 2816
    vocab_size: int = 32000
    window: int = 256
    hybrid_window: int = HYBRID_WINDOW
    small_T: int = 600
    small_layers: int = 2
    small_vocab: int = 256
    mix: Mix = QUARTERS

    def to_dict(self) -> dict[str, int]:
        return {"B": self.B, "T": self.T, "D": self.hidden_size, "layers": self.layers}


PREFILL_DEFAULT = ModelPlan(layers=24)
PREFILL_QUICK = ModelPlan(layers=4, T=8192)
TRAIN_DEFAULT = ModelPlan(layers=8, mix=FIFTH)
TRAIN_QUICK = ModelPlan(layers=2, T=4096, mix=FIFTH)


def run_model(session: Session, plan: ModelPlan = PREFILL_DEFAULT) -> list[Row]:
    """Prefill of a routed model, of itself in soft mode, and of static models."""
    hybrid = [
        ("full",) if index % HYBRID_PERIOD == HYBRID_PERIOD - 1 else ("local",)
        for index in range(plan.layers)
    ]
    variants: dict[str, dict[str, Any]] = {
        FULL_ONLY: {"layer_experts": [("full",)] * plan.layers},
        HYBRID: {"layer_experts": hybrid, "window_size": plan.hybrid_window},
        SOFT: {"routing": "soft"},
        ROUTED: {},
    }
    return _compare_variants(session, plan, "model", PREFILL, variants, _prefill_work)


def run_train(session: Session, plan: ModelPlan = TRAIN_DEFAULT) -> list[Row]:
    """One training step, without the optimiser's, of a routed and of a static model."""
    variants: dict[str, dict[str, Any]] = {
        FULL_ONLY: {"layer_experts": [("full",)] * plan.layers},
        ROUTED: {"route_gradient": "chosen"},
    }
    return _compare_variants(session, plan, "train", STEP, variants, _step_work)


def _compare_variants(
    session: Session,
    plan: ModelPlan,
    suite: str,
    work: str,
    variants: dict[str, dict[str, Any]],
    prepare: Callable[[Session, ModelPlan, str, dict[str, Any]], Work],
) -> list[Row]:
    rows: list[Row] = []
    for name, fields in variants.items():
        mix = plan.mix if name in (ROUTED, SOFT) else None
        row = session.row(suite, name, work, plan.to_dict(), mix)
        session.measure(row, partial(prepare, session, plan, name, fields))
        rows.append(row)
        session.keep(row, rows, [FULL_ONLY])
    return rows


def _config(plan: ModelPlan, fields: dict[str, Any], *, is_small: bool) -> MetaAttentionConfig:
    values: dict[str, Any] = {
        "vocab_size": plan.small_vocab if is_small else plan.vocab_size,
        "num_hidden_layers": plan.small_layers if is_small else plan.layers,
        "hidden_size": plan.hidden_size,
        "num_attention_heads": plan.heads,
        "head_dim": plan.head_dim,
        "intermediate_size": plan.intermediate_size,
        "window_size": plan.window,
        "max_position_embeddings": max(plan.T, plan.small_T),
        "experts": plan.mix.experts,
        "routing": "hard",
    }
    return MetaAttentionConfig(**(values | fields))


def _build(
    session: Session, plan: ModelPlan, fields: dict[str, Any], *, is_small: bool = False
) -> MetaAttentionForCausalLM:
    return build_model(
        _config(plan, fields, is_small=is_small),
        dtype=session.dtype,
        device=session.device,
        seed=session.seed,
    )


def _tokens(session: Session, vocab_size: int, B: int, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(session.seed)
    return torch.randint(vocab_size, (B, T), generator=generator).to(session.device)


def _routes(session: Session, plan: ModelPlan, layers: int, T: int) -> list[Tensor]:
    return draw_layers(plan.mix, layers, plan.B, T, seed=session.seed, device=session.device)


def _executed(plan: ModelPlan, model: nn.Module, routes: Sequence[Tensor]) -> list[Tensor]:
    """Routing weights of every layer, as they run."""
    config: MetaAttentionConfig = model.config  # type: ignore[assignment]
    counts = [len(config.experts_of(index)) for index in range(plan.layers)]
    if config.routing == "soft" or set(counts) == {1}:
        return [torch.ones(plan.B, plan.T, count) for count in counts]
    return [plan.mix.weights(route.cpu()) for route in routes]


def _prefill_work(session: Session, plan: ModelPlan, name: str, fields: dict[str, Any]) -> Work:
    gates: list[Gate] = []
    if name == ROUTED:
        small = _build(session, plan, fields, is_small=True)
        gates += _hidden_gates(session, plan, small, plan.small_T, is_small=True)
        del small
    model = _build(session, plan, fields)
    is_routed = name in (ROUTED, SOFT)
    routes = _routes(session, plan, plan.layers, plan.T) if is_routed else []
    if name == ROUTED:
        gates += _hidden_gates(session, plan, model, plan.T, is_small=False)
    ids = _tokens(session, plan.vocab_size, plan.B, plan.T)

    fix_routes(model, routes)

    def call() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(ids, use_cache=True, logits_to_keep=1).logits
            return logits

    if name != ROUTED:
        gates.append(_finite_gate(call()))
    flops = count_model(model.config, _executed(plan, model, routes), logits_to_keep=1).model
    return Work(call, gates, flops=flops, note=millions_of(model))


def _step_work(session: Session, plan: ModelPlan, name: str, fields: dict[str, Any]) -> Work:
    gates: list[Gate] = []
    if name == ROUTED:
        small = _build(session, plan, fields, is_small=True).train()
        gates += _gradient_gates(session, plan, small)
        del small
    model = _build(session, plan, fields)
    routes = _routes(session, plan, plan.layers, plan.T) if name == ROUTED else []
    if name == ROUTED:
        gates += _hidden_gates(session, plan, model, plan.T, is_small=False)
    model.train()
    ids = _tokens(session, plan.vocab_size, plan.B, plan.T)

    fix_routes(model, routes)

    def call() -> Tensor:
        loss: Tensor = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    gates.append(_finite_gate(call()))
    # a backward has two products for each of the forward
    flops = 3.0 * count_model(model.config, _executed(plan, model, routes)).model
    return Work(call, gates, flops=flops, note=f"{millions_of(model)}, no optimiser step")


def _hidden_gates(
    session: Session, plan: ModelPlan, model: nn.Module, T: int, *, is_small: bool
) -> list[Gate]:
    """Last hidden states of a model under forced routes, against its dense twin."""
    T = min(T, plan.T)
    layers = plan.small_layers if is_small else plan.layers
    vocab_size = plan.small_vocab if is_small else plan.vocab_size
    ids = _tokens(session, vocab_size, plan.B, T)

    def run(module: nn.Module) -> dict[str, Tensor]:
        base: nn.Module = module.model  # type: ignore[assignment]
        where = next(base.parameters()).device
        with torch.no_grad():
            return {"hidden states": base(ids.to(where), use_cache=False).last_hidden_state}

    return twin_gates(
        model,
        _routes(session, plan, layers, T),
        run,
        oracle_device=torch.device("cpu") if is_small else session.device,
        label=f"T={T}",
    )


def _gradient_gates(session: Session, plan: ModelPlan, model: nn.Module) -> list[Gate]:
    """Gradients of a small model's task loss, its controllers' left out, against its twin.

    The controllers' gradients differ by design: the twin's routes have none.
    """
    T = min(plan.small_T, plan.T)
    ids = _tokens(session, plan.small_vocab, plan.B, T)

    def run(module: nn.Module) -> dict[str, Tensor]:
        where = next(module.parameters()).device
        loss = module(ids.to(where), labels=ids.to(where), use_cache=False).task_loss
        wanted = {n: p for n, p in module.named_parameters() if "controller" not in n}
        gradients = torch.autograd.grad(loss, list(wanted.values()))
        kinds = ("q_proj", "k_proj", "v_proj", "mlp.")
        return {
            f"gradient of {kind.rstrip('.')}": torch.cat(
                [g.flatten() for n, g in zip(wanted, gradients, strict=True) if kind in n]
            )
            for kind in kinds
        }

    return twin_gates(
        model,
        _routes(session, plan, plan.small_layers, T),
        run,
        oracle_device=torch.device("cpu"),
        label=f"T={T}",
    )


def _finite_gate(x: Tensor) -> Gate:
    """A peer has no twin: its output must at least be of numbers."""
    return Gate("not finite", float((~x.isfinite()).sum().item()), 0.0)
