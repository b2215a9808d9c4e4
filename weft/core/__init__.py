"""The contract of all mechanisms, the registry, and what mechanisms are built from."""
