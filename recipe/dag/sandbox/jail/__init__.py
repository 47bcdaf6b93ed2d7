"""Programs in fresh Linux namespaces: warm forked interpreters, and bubblewrap."""
