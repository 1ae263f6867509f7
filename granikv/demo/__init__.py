"""The demo: one multi-agent workload through GraniKV and through uniform paging."""
