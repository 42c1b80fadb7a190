"""The program as plain immutable data: values, ops and their phases."""
