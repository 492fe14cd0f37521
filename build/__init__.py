"""Builds REPOSITORY: a complete Triton model repository around a checkpoint's engines."""

from build.assemble import assemble
from build.profile import BuildError, Profile, load_profile

__all__ = ["BuildError", "Profile", "assemble", "load_profile"]
