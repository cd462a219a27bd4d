"""lossd for PyTorch."""
