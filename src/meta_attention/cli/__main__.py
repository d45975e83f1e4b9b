"""``python -m meta_attention.cli``: the command where it is not installed."""

from meta_attention.cli import main

main()
