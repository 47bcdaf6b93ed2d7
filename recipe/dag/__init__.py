"""The engine of verl-dag: nothing in this package knows a task."""

__version__ = "0.1.0"
