"""Builds REPOSITORY: a complete Triton model repository around a checkpoint's engines."""
