"""`weft bench`: what attention costs, measured and counted."""
