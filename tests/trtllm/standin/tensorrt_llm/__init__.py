"""Stand-in of TensorRT-LLM: what trtllm_model.py uses, with the signatures of tests/trtllm/api.json."""
