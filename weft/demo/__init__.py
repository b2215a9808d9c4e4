"""The demo: one file per part, each with `tell`, which measures something on this machine and returns a `Story`."""
