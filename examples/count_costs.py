"""What each expert costs relative to full attention, counted at lengths from 1k to 128k.

The paper fixes these costs at 1, 0.15 and 0.30. Counted, they fall with the length, and below a
window's worth of tokens nothing is cheaper than full attention.

    python examples/count_costs.py
"""

from rich.console import Console
from rich.table import Table

from meta_attention import MetaAttentionConfig, compute_aware_prior
from meta_attention.experts import build_experts

LENGTHS = (128, 1024, 4096, 16384, 65536, 131072)


def main() -> None:
    config = MetaAttentionConfig(hidden_size=1024, num_attention_heads=16, window_size=256)
    experts = build_experts(config, layer_idx=0)
    table = Table(title="cost per token, head width 64, window 256, causal")
    table.add_column("tokens", justify="right")
    for name in experts:
        table.add_column(name, justify="right")
    table.add_column("prior concentration")
    for length in LENGTHS:
        costs = [expert.cost(length) for expert in experts.values()]
        prior = compute_aware_prior(costs)
        table.add_row(
            f"{length:,}",
            *(f"{cost:.3f}" for cost in costs),
            ", ".join(f"{value:.2f}" for value in prior.tolist()),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
