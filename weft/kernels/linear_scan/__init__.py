"""Causal attention with feature maps, computed in chunks: `linear` and `performer`."""
