"""The report of an ablation: read, reduced over seeds, compared with the paper, drawn, written."""
