"""Published training runs: rows of a table, as models, clusters and manual plans of this project."""
