"""The paper's ablation and its further experiments: variants as data, runs, and many of them."""
