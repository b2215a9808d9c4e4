"""Pooling along the rows and columns of a grid: the summaries of the Combiners on grids."""
