"""Time and memory of routed attention against its peers, measured in one run."""
