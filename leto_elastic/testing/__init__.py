"""Faults on purpose, and jobs under test; for the tests of leto_elastic and of those who use it."""

from leto_elastic.testing.faults import Fault, Faults, InjectedFault, install, parse, point, prepare

__all__ = ["Fault", "Faults", "InjectedFault", "install", "parse", "point", "prepare"]
