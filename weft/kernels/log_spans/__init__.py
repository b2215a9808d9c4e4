"""Attention to the token itself and to the dyadic spans before it: `logsparse`."""
