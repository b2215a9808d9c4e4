"""The attention contract, the registry, and building blocks shared by the mechanisms."""
