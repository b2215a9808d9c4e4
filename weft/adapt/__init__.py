"""Getting into other people's models: transformers, timm, torch.nn, and surgery on any of them."""
