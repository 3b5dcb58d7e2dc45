"""Fakes that keep the contract, for our tests and for users who test without a model.

It owns which fakes there are.
"""

from jserve.testing.proposer import FakeProposer
from jserve.testing.runner import FakeRunner, HostCopy
from jserve.testing.tokens import ByteTokenizer

__all__ = ["ByteTokenizer", "FakeProposer", "FakeRunner", "HostCopy"]
