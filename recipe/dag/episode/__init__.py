"""Running one episode and turning it into rows."""
