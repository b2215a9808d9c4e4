"""Attention to near keys, in blocks or windows, and to a few global keys: `local`, `longformer`, `sparse`."""
