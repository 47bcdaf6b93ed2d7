"""Data sets as parquet files in verl's row schema, one script per data set."""
