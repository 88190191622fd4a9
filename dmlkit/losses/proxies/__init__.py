"""The engine of losses over learnable proxies."""
