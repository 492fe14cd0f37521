"""Checks a profile on the machine that will serve it: engines, pictures, speed; one report."""
