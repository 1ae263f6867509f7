"""Attention backends: `reference` (torch twins, the oracle) and `cpu`."""
