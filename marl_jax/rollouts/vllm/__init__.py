"""A vLLM server in the place of the embedded engine, see docs/vllm.md."""
