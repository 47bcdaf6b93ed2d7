"""The run's configuration: how it is composed, what each key of verl's means here, and which values keys take."""
