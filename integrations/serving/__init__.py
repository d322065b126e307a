"""What vLLM and SGLang share: weights from any checkpoint, and from the versions of a publisher."""
