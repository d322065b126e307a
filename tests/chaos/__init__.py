"""ckpt-chaos, an outsider's tester, on every integration."""
