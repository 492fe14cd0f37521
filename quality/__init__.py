"""The synthetic world, and the judge of pictures of it."""
