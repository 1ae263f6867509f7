"""Engines: one graph per tensor-parallel rank, built from a checkpoint, and what describes it."""
