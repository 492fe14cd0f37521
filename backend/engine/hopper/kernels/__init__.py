"""The fused kernels, in the Triton language (the compiler, not the server).

Each has the signature and meaning of its namesake in `hopper/reference.py`.
"""
