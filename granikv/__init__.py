"""GraniKV: LLM serving for agents that share long prefixes."""
