"""Attention along the rows and columns of a grid under one softmax: the Combiners on grids, and strided `sparse`."""
