"""Attention of blocks of queries to lists of key blocks: `bigbird`."""
