"""Causal attention that factors through features, in chunks: `linear` and `performer`."""
