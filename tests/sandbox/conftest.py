"""The same machines as for the tests of the cluster."""

from tests.cluster.conftest import _sandbox, sandbox

__all__ = ["_sandbox", "sandbox"]
