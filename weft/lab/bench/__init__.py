"""`weft bench`: measured and counted costs of attention."""
