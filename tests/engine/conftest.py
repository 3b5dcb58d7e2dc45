"""Hypothesis without deadlines: the machine may be busy."""

from hypothesis import settings

settings.register_profile("jserve", deadline=None, derandomize=True)
settings.load_profile("jserve")
