"""Route the words of a sentence with an untrained block, and print where each one goes.

The weights are random, so the routes mean nothing yet: what you see is the prior, which favours
cheap experts, moved a little by each word.

    python examples/route_a_sentence.py
    python examples/route_a_sentence.py "Any other sentence."
"""

import sys

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from meta_attention import MetaAttentionConfig, MetaTransformerBlock

SENTENCE = "The controller reads each word before attention runs and decides what it may cost ."
COLOURS = ("red", "blue", "green")


def main() -> None:
    words = (sys.argv[1] if len(sys.argv) > 1 else SENTENCE).split()
    if not words:
        sys.exit("error: the sentence is empty; give at least one word")

    torch.manual_seed(0)
    config = MetaAttentionConfig(
        hidden_size=128,
        num_attention_heads=4,
        window_size=4,
        max_position_embeddings=max(64, len(words)),
    )
    embed = nn.Embedding(len(words), config.hidden_size)
    block = MetaTransformerBlock(config).eval()

    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    ids = torch.tensor([[vocabulary[word] for word in words]])  # [1, T]
    with torch.no_grad():
        out = block(embed(ids))

    table = Table(title="experts per word (weights), and how sure the controller is (nats)")
    for column in ("word", *config.experts, "top expert", "mutual information", "KL to prior"):
        table.add_column(column)
    for t, word in enumerate(words):
        weights = out.routes.weights[0, t].tolist()
        top = int(out.routes.expert[0, t])
        table.add_row(
            word,
            *(f"{weight:.2f}" for weight in weights),
            f"[{COLOURS[top]}]{config.experts[top]}[/]",
            f"{out.posterior.mutual_information[0, t]:.3f}",
            f"{out.kl[0, t]:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"projected cost: {out.projected_cost.mean():.0%} of full attention "
        "(what the weights imply; with soft routing every expert still runs)"
    )


if __name__ == "__main__":
    main()
