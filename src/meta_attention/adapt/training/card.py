"""The README of an adapter's folder: what it is for, what was measured, how to use it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meta_attention.adapt.adapters import CARD_FILE, WEIGHTS_FILE, read_card

README_FILE = "README.md"

_PAGE = """\
# Adapter for {base}

Routes the tokens of {base} ({family}) among {experts}, in {num_layers} of its {num_all} layers.
Trained by `meta-attention adapt`; the weights of the base are as they were{lora}.

## Measured

{tokens:,} tokens of held-out text ({eval_name}), in blocks of {length}, {device}:

| | base | adapted |
|---|---|---|
| loss, nats per token | {base_loss:.4f} | {lm_loss:.4f} ({loss_increase:+.4f}) |
| attention FLOPs (scores and values, all layers) | 100% | {attention_share:.1%} |

Divergence of the predictions {divergence:.4f} nats per token. Adapted layers cost
{routed_cost:.3f} of full attention{target}. Adaptivity {adaptivity:.4f} nats (zero: every token of
a layer is treated alike).

| layer | {expert_heads} | adaptivity |
|---|{expert_lines}---|
{layers}

Shares are of tokens at that length, on that text. Counted FLOPs are no time.
{prices}
## Use

```python
from meta_attention.adapt import load_adapter, load_base, load_tokenizer

model = load_adapter(load_base("{base}"), "THIS FOLDER")
tokenizer = load_tokenizer("{base}")
```

    meta-attention generate --adapter THIS_FOLDER --prompt "The lighthouse"

`--base FOLDER` says where the base lies, if not there.

## Training

{steps} steps of {batch} blocks of {length} tokens of {train_name}; loss `{loss}`, learning rate
{lr:g}, cost weight `{cost_weight}`, KL weight `{kl_weight}`, seed {seed}. All settings are in
`{card}`. `{weights}` holds the routers as they were after step {step}.
"""

_PRICES = """
## Prices

A token takes what is worth most to it at the going price, now {price:.3g} nats for full attention.
`meta_attention.adapt.set_price(model, price)` sets another, without training. Found for a cost, on
text of the training, and measured on the same text as above:

| cost | price, nats | attention FLOPs | loss | divergence |
|---|---|---|---|---|
{rows}
"""


def write_readme(folder: Path) -> Path:
    """Write the README of an adapter that ``train_router`` has saved."""
    card = read_card(folder)
    path = folder / README_FILE
    path.write_text(render(card), "utf-8")
    return path


def render(card: Mapping[str, Any]) -> str:
    """The page, from what an adapter's JSON says."""
    base, routing, metadata = card["base"], card["settings"], card["metadata"]
    measured, settings = metadata["measured"], metadata["settings"]
    experts = list(routing["experts"])
    rows = [
        f"| {index} | "
        + " | ".join(f"{layer['share'][name]:.1%}" for name in experts)
        + f" | {layer['adaptivity']:.4f} |"
        for index, layer in measured["layers"].items()
    ]
    target, offers = measured["target_cost"], measured.get("offers")
    return _PAGE.format(
        **{k: v for k, v in measured.items() if k not in ("layers", "target_cost", "price")},
        base=base["name"] or "its base",
        family=base["family"],
        experts=" and ".join(_describe(name, routing) for name in experts),
        num_layers=len(routing["layers"]),
        num_all=base["shape"]["num_hidden_layers"],
        lora=", but for a LoRA of its attention, in `lora/`" if card.get("lora") else "",
        tokens=metadata["eval_data"]["tokens"],
        eval_name=metadata["eval_data"]["name"],
        device={"cpu": "on a CPU", "cuda": "on a GPU"}.get(metadata["device"], metadata["device"]),
        target="" if target is None else f" (target {target:g})",
        expert_heads=" | ".join(experts),
        expert_lines="---|" * len(experts),
        layers="\n".join(rows),
        prices="" if offers is None else _prices(measured["price"], offers),
        train_name=metadata["data"]["name"],
        steps=settings["steps"],
        batch=settings["batch_size"],
        loss=settings["loss"],
        lr=settings["lr"],
        kl_weight=settings["kl_weight"],
        cost_weight=settings["cost_weight"],
        seed=settings["seed"],
        card=CARD_FILE,
        weights=WEIGHTS_FILE,
    )


def _prices(price: float, offers: Sequence[Mapping[str, float]]) -> str:
    rows = [
        f"| {offer['target_cost']:g} | {offer['price']:.3g} | {offer['attention_share']:.1%} | "
        f"{offer['lm_loss']:.4f} | {offer['divergence']:.4f} |"
        for offer in offers
    ]
    return _PRICES.format(price=price, rows="\n".join(rows))


def _describe(expert: str, routing: Mapping[str, Any]) -> str:
    name, _, window = expert.partition(":")
    if name != "local":
        return expert
    window = window or routing["window_size"]
    return f"local (window {window}, {routing['num_sinks']} first tokens)"
