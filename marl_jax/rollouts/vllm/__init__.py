"""A vLLM server in place of the embedded engine, see docs/vllm.md."""
