"""Attention along the rows and columns of a grid with one softmax: the Combiners on grids, and strided `sparse`."""
