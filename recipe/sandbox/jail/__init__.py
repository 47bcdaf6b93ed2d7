"""Engines that run programs in fresh Linux namespaces, forked from warm interpreters."""
