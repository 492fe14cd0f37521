"""Builds REPOSITORY: a checkpoint's engines for a profile, in a complete Triton model repository."""

from build.assemble import assemble
from build.profile import Profile, load_profile

__all__ = ["Profile", "assemble", "load_profile"]
