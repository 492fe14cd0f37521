"""Qwen-Image's engines for Hopper GPUs: torch, FP8 matrix products, fused kernels."""
