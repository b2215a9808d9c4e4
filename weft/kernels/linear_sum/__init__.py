"""Bidirectional attention with feature maps: `linear`, `performer`."""
